"""What is compiled in training, and which blocks are computed again in their backward pass."""

import functools
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from model import attention
from model.gpt import GPT

# Below this many FLOPs of training a cold compile (about half a minute on two cores) costs more than it gains.
COMPILE_GAINS_FROM = 4e13


def should_compile(setting: str, device: torch.device, flops: float) -> bool:
    """Whether to compile. setting: true, false or auto; flops: of the complete training.

    auto compiles on CUDA, and on a CPU if a C++ compiler is installed and the training is long enough to save more
    time than the compilation takes.
    """
    pays = flops > COMPILE_GAINS_FROM and any(map(shutil.which, ("g++", "clang++")))
    return device.type == "cuda" or pays if setting == "auto" else setting == "true"


def recompute_blocks(model: GPT) -> None:
    """Keep only the inputs of each block for the backward pass, which computes the block again; in place.

    Activation checkpointing (Chen et al. 2016, arXiv 1604.06174). Replaces each block's forward, so that the hooks of
    DDP and FSDP2, which surround it, run one time.
    """
    for block in model.blocks:
        # There is no dropout, so nothing random has to be repeated
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def compile_blocks(model: GPT, fallback: bool = True) -> None:
    """Compile the forward of each block, whose code equal blocks share, and the loss; state dicts keep their names.

    Not the whole model: that is no faster here and takes longer to compile. fallback: if something cannot be compiled,
    everything runs uncompiled, after a warning. Without it the error is raised: a benchmark must not measure that.
    """
    import torch._functorch.config  # with dynamo and triton, a second
    from torch._dynamo.exc import TorchDynamoException

    failed: list[str] = []

    def compiled(plain: Callable) -> Callable:
        fast = torch.compile(plain, dynamic=False)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                if not failed:
                    return fast(*args, **kwargs)
            except TorchDynamoException as e:
                failed.append(" ".join(str(e).split("\n\n")[0].split()))
                print(f"warning: torch.compile failed, it continues uncompiled: {failed[0]}", file=sys.stderr)
            return plain(*args, **kwargs)

        return call if fallback else fast

    # By default at most 8 versions of a block are compiled; each kind of layer needs one to train and one to validate
    torch._dynamo.config.recompile_limit = 64  # ty: ignore[invalid-assignment]
    # Compile backward passes with the forward ones, where `call` catches what fails
    torch._functorch.config.force_non_lazy_backward_lowering = True  # ty: ignore[invalid-assignment]
    torch.compiler.reset()  # what an earlier job of a sweep compiled counts against dynamo's limit of recompilations
    # Compiled on a CPU, T5's bias at ctx=1024 trains to NaN, and so does linear attention in bfloat16. As a decorator
    # this would import dynamo in every process.
    for name in ("attend_blocks", "linear_attention"):
        setattr(attention, name, torch.compiler.disable(getattr(attention, name)))
    recomputed = any("forward" in vars(block) for block in model.blocks)
    for block in model.blocks:
        vars(block).pop("forward", None)
        block.forward = compiled(block.forward)
    if recomputed:  # around the compiled code, because dynamo skips what checkpoint calls
        recompute_blocks(model)
    model._block_losses = compiled(model._block_losses)
