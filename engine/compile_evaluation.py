"""compile=true of eval.py: torch.compile for evaluations of many methods."""

import torch

from model import attention
from model.gpt import GPT


def compile_blocks(model: GPT, backend: str = "inductor") -> None:
    """Compile the blocks except for attention itself, in place, for any batch and length.

    Attention depends on the method, so it would be compiled anew for each, and its kernels are no faster then.
    """
    torch._dynamo.config.suppress_errors = True
    # Of one function: for a batch of one, fewer queries, ReRoPE, log-n ...
    torch._dynamo.config.recompile_limit = 64  # ty: ignore[invalid-assignment]
    attention.attend = torch.compiler.disable(attention.attend)
    for block in model.blocks:
        block.compile(dynamic=True, backend=backend)
