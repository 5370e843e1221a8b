"""What scaling methods do to RoPE's angles, and what biases add to the scores: python -m studies.choosing

The figure of docs/choosing.md, for the last query of 4 L tokens at L = 256. It needs no run.
"""

from typing import Any

import torch
from torch import Tensor, nn

from conf.registry import ROOT, yaml_values
from measure import plots
from model.pos import Shape, build
from model.pos.fox import ForgetBias
from model.scaling import TrainedContext, resolve
from model.spectrum import frequencies, rotations

L, N = 256, 1024
SHAPE = Shape(width=256, n_heads=4, head_dim=64, train_ctx=L)
ROPE = TrainedContext("rope", L, frequencies(SHAPE.head_dim, 10000.0))
PAIRS = {"fast": 0, "middle": 8, "slow": 24}  # of 32
DISTANCES = torch.arange(N)


def angles(pair: int) -> dict[str, Tensor]:
    """Method -> angles of the pair at DISTANCES, as far as the query sees, in units of the largest trained one."""
    m, keys, curves = torch.tensor(N - 1), N - 1 - DISTANCES, {}
    for method in ("none", "ntk", "yarn", "pi", "rerope", "window"):
        change, distance = resolve(yaml_values("scaling", method), ROPE, N, N), DISTANCES.double()
        for region in change.position_map.regions() if change.position_map else ():
            far = region.start + (region.q(m) - region.start - region.k(keys)) / region.slow
            distance = torch.where(keys < region.end(m), far, distance)
        inv_freq = ROPE.inv_freq if change.inv_freq is None else change.inv_freq
        curves[method] = (distance * inv_freq[pair] / ROPE.inv_freq[pair] / L)[: change.window]
    return curves


@torch.no_grad()
def biases() -> dict[str, Tensor]:
    """Encoding -> biases at DISTANCES of the head whose slope in ALiBi is 1/64.

    What training learns is an example: kerple has p = a = 1, t5_bias the same values, and fire -6 times its argument.
    """
    names = ("alibi", "t5_bias", "kerple", "fire")
    knobs = ({key: L if key == "context" else x for key, x in yaml_values("pos", name).items()} for name in names)
    encodings: list[Any] = [build(of_one, SHAPE) for of_one in knobs]
    _, t5, kerple, fire = encodings
    starts = torch.searchsorted(t5.bucket(DISTANCES), torch.arange(t5.buckets))
    t5.table.weight.copy_(-starts.log1p()[:, None])
    kerple.log_p.zero_(), kerple.log_a.zero_()
    fire.mlp = nn.Linear(1, SHAPE.n_heads, bias=False)
    fire.mlp.weight.fill_(-6)
    log_gates = torch.full((SHAPE.n_heads, N), -0.001)
    log_gates[:, [113, 323, 423, 603, 693, 853, 983]] = -2  # at these tokens fox forgets
    encodings.append(ForgetBias(log_gates.cumsum(-1)))
    scores = (x.bias(DISTANCES[-1:], N - 1 - DISTANCES)[..., 2, 0, :] for x in encodings)
    return dict(zip((*names, "fox"), scores, strict=True))


def draw() -> Any:
    """A panel for each of PAIRS, and one of the biases. Grey: the slow pair's trained angles; the others met all."""
    turns = rotations(ROPE.inv_freq, L)
    panels = {f"{name} pair: {turns[i]:.2g} turns within L": angles(i) for name, i in PAIRS.items()}
    fig, axes = plots.pyplot().subplots(2, 2, figsize=(9, 7))
    fig.subplots_adjust(wspace=0.75, hspace=0.35)  # room for the names at the ends of the lines
    for ax, (title, curves) in zip(axes.flat, [*panels.items(), ("biases", biases())], strict=True):
        kind, ylabel = ("methods", "angle / its largest trained one") if title in panels else ("encodings", "bias")
        for (name, y), dashes in zip(curves.items(), plots.DASHES, strict=False):
            look = {"color": plots.color_of(kind, name), "linestyle": dashes, "label": plots.NAMES.get(name, name)}
            ax.plot(DISTANCES[: len(y)] / L, y, markevery=[-1], marker="o", **look)
        if "slow" in title:
            ax.axhspan(0, 1, color="#999999", alpha=0.15, linewidth=0)
        ax.set(title=title, xlabel="distance / L", ylabel=ylabel)
        plots.mark(ax, 1, "trained: L")
        plots.end_labels(ax, space=16)
    return fig


if __name__ == "__main__":
    plots.save(draw(), ROOT / "results/choosing.png")
