"""What is scored at a context length n: pure functions of a model's losses and of the ends of documents.

losses(tokens [B, T], targets [B, S]) -> nats [B, S]: the cost of targets, which follow the last S of tokens. Every
protocol takes text [B, ctx + 1] and returns what losses gave for each scored token, [B, scored].
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

Losses = Callable[[Tensor, Tensor], Tensor]
Protocol = Callable[[Losses, Tensor, int], Tensor]


def protocol(name: str, score: int, stride: int) -> Protocol:
    return {
        "matched": functools.partial(matched, score=score),
        "sliding": functools.partial(sliding, stride=stride),
        "prefix": prefix,
    }[name]


def targets(protocol: Protocol, text: Tensor, n: int) -> Tensor:
    """The tokens that it scores, [B, scored]."""
    return protocol(lambda tokens, targets: targets, text, n)


def cost(protocol: Protocol, text: Tensor, n: int) -> int:
    """Tokens that the model reads for it."""
    read: list[int] = []
    protocol(lambda tokens, targets: read.append(tokens.numel()) or targets, text, n)
    return sum(read)


def matched(losses: Losses, text: Tensor, n: int, score: int) -> Tensor:
    """The last `score` tokens, given the last n: the same targets at every n [B, score] (github.com/bojone/rerope)."""
    windows = text[:, -n - 1 :]
    return losses(windows[:, :-1], windows[:, -score:])


def sliding(losses: Losses, text: Tensor, n: int, stride: int) -> Tensor:
    """Every one of the ctx tokens once, by windows of n tokens that move by stride (Press et al., arXiv 2108.12409).

    The first window scores all its tokens, each other one its last `stride`: they see n - stride tokens or more. The
    windows end with the text, so the first is the ragged one, if any. stride is n at most: then windows only touch.
    """
    ctx, stride = text.shape[1] - 1, min(stride, n)
    ends = list(range(ctx, n, -stride))[::-1]  # of the windows after the first
    first = ends[0] - stride if ends else ctx
    pieces = [losses(text[:, :first], text[:, 1 : first + 1])]
    for end in ends:
        start = max(0, end - n)
        pieces.append(losses(text[:, start:end], text[:, end - stride + 1 : end + 1]))
    return torch.cat(pieces, dim=1)


def prefix(losses: Losses, text: Tensor, n: int) -> Tensor:
    """The document cut after n tokens, all of it scored, [B, n]: what YaRN's tables and figures did (its issue 13).

    The easy and the hard early positions are in the mean, so a collapse at the end is diluted, and every n has targets
    of its own.
    """
    return losses(text[:, :n], text[:, 1 : n + 1])


def copied(losses: Losses, text: Tensor, n: int) -> Tensor:
    """What repetition saves: a passage of n / 2 tokens, twice. Nats of each token less those of its copy,
    [B, n / 2 - 1]."""
    half = n // 2
    twice = text[:, -half:].repeat(1, 2)
    nats = losses(twice[:, :-1], twice[:, 1:])
    return nats[:, : half - 1] - nats[:, half:]
