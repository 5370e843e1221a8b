"""When and what torch.compile compiles in training."""

import shutil

import torch

from model import attention
from model.gpt import GPT

# Below this many FLOPs of training a cold compile (about half a minute on two cores) costs more than it gains.
COMPILE_GAINS_FROM = 4e13


def compile_blocks(model: GPT) -> None:
    """Compile one block, whose code all blocks share, and the loss; in place, so that state dicts keep their names.

    Not the whole model: that is no faster here and takes longer to compile.
    """
    torch.compiler.reset()  # what an earlier job of a sweep compiled counts against dynamo's limit of recompilations
    torch._dynamo.config.suppress_errors = True  # no compiler, or one that fails: continue uncompiled
    # Compiled on a CPU, T5's bias at ctx=1024 trains to NaN. (A decorator would import triton in every process.)
    attention.attend_blockwise = torch.compiler.disable(attention.attend_blockwise)
    for block in model.blocks:
        block.compile(dynamic=False)
    model._block_losses = torch.compile(model._block_losses, dynamic=False)


def should_compile(setting: str, device: torch.device, flops: float) -> bool:
    """Whether to compile. setting: true, false or auto; flops: of the complete training.

    auto compiles on CUDA, and on a CPU if a C++ compiler is installed and the training is long enough to save more
    time than the compilation takes.
    """
    if setting != "auto":
        return setting == "true"
    pays = flops > COMPILE_GAINS_FROM and any(map(shutil.which, ("g++", "clang++")))
    return pays or device.type == "cuda"
