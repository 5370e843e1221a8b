"""What torch.compile compiles in training. Imported only where something is."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo.exc import TorchDynamoException

from conf.errors import rank
from model import attention
from model.gpt import GPT


def compile_blocks(model: GPT, fallback: bool = True) -> None:
    """Compile one block, whose code all blocks share, and the loss; in place, so that state dicts keep their names.

    Not the whole model: that is no faster here and takes longer to compile. fallback: what cannot be compiled runs
    uncompiled, which each process says one time by name. Without it the error is raised: a benchmark must not measure
    that.
    """
    failed: set[str] = set()  # what could not be compiled

    def compiled(name: str, plain: Callable) -> Callable:
        fast = torch.compile(plain, dynamic=False)
        return or_plain(name, fast, plain, failed) if fallback else fast

    # By default 8 versions of a block are compiled. A kind of layer needs one for each length of the rows (ctx_start)
    config: Any = torch._dynamo.config
    config.recompile_limit = max(64, config.recompile_limit)
    # Compile backward passes with the forward ones, where or_plain catches what fails (new in torch 2.9)
    functorch: Any = torch._functorch.config
    functorch.force_non_lazy_backward_lowering = True
    torch.compiler.reset()  # what an earlier job of a sweep compiled counts against dynamo's limit of recompilations
    # Compiled on a CPU, T5's bias at ctx=1024 trains to NaN. (A decorator would import triton in every process.)
    attention.attend_blocks = torch.compiler.disable(attention.attend_blocks)
    recomputed = any("forward" in vars(block) for block in model.blocks)
    for block in model.blocks:
        vars(block).pop("forward", None)
        block.forward = compiled("a block", block.forward)
    if recomputed:  # around the compiled code, because dynamo skips what checkpoint calls
        from engine.recompute import recompute_blocks

        recompute_blocks(model)
    model._block_losses = compiled("the loss", model._block_losses)


def or_plain(name: str, compiled: Callable, plain: Callable, failed: set[str]) -> Callable:
    """compiled, until it fails or finds no compiler: from then on plain. `failed` gets the name, which is printed."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if name not in failed:
                return compiled(*args, **kwargs)
        except TorchDynamoException as e:
            failed.add(name)
            reason, where = " ".join(str(e).split("\n\n")[0].split()), f"rank {rank()}: " if rank() else ""
            print(f"warning: {where}torch.compile of {name} failed, it continues uncompiled: {reason}", file=sys.stderr)
        return plain(*args, **kwargs)

    return call
