"""Activation checkpointing (Chen et al. 2016, arXiv 1604.06174). Imported only with recompute=true."""

import functools

from torch.utils.checkpoint import checkpoint

from model.gpt import GPT


def recompute_blocks(model: GPT) -> None:
    """Keep only the inputs of each block for the backward pass, which computes the block again; in place.

    Replaces each block's forward, so that the hooks of DDP and FSDP2, which surround it, run one time.
    """
    for block in model.blocks:
        # There is no dropout, so nothing random has to be repeated
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
