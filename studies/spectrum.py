"""How often each pair of RoPE rotates within a trained context, without scaling and with each scaling method.

    python -m studies.spectrum

Prints what a published rule says about the base, and draws the rotations of each pair within L tokens.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError, user_errors
from conf.registry import yaml_values
from measure import plots
from model.scaling import TrainedContext, resolve
from model.spectrum import frequencies, rotations, warning

METHODS = ("none", "pi", "ntk", "yarn", "yarn_paper", "ntk_mixed")


def main() -> None:
    """Print the summary, and draw the figure to --out."""
    parser = argparse.ArgumentParser(description="Rotations of each pair of RoPE within a trained context")
    parser.add_argument("--ctx", type=int, default=256, help="the trained context, L")
    parser.add_argument("--rotary-dim", type=int, default=64)
    parser.add_argument("--base", type=float, default=10000.0)
    parser.add_argument("--factor", type=float, default=8.0, help="extension factor of the methods that have one")
    parser.add_argument("--out", default="results/spectrum", help="writes OUT.png, .svg, .pdf")
    args = parser.parse_args()
    if not (args.ctx >= 2 and args.rotary_dim >= 4 and not args.rotary_dim % 2 and args.base >= 1 and args.factor >= 1):
        raise UserError("--ctx must be at least 2, --rotary-dim even and at least 4, --base and --factor at least 1")

    L, out = args.ctx, Path(args.out)
    trained = TrainedContext("rope", L, frequencies(args.rotary_dim, args.base))
    turns = rotations(trained.inv_freq, L)
    print(f"{int((turns < 1).sum())} of {len(turns)} pairs never complete a rotation within {L} tokens")
    print(f"longest wavelength, 2 pi b^((d - 2) / d): {2 * math.pi / trained.inv_freq[-1]:,.1f} tokens")
    print(f"smallest base that keeps B(m) >= 0 up to {L} (arXiv 2405.14591): {base_bound(args.rotary_dim, L):,.0f}")
    by_method = rotations_by_method(trained, args.factor)
    settings = f"rotary_dim {args.rotary_dim}, base {args.base:g}, extension factor {args.factor:g}"
    draw(by_method, L, f"Rotations of each RoPE pair within L = {L} tokens ({settings})", out)
    print(f"{out}.png")


def base_bound(rotary_dim: int, ctx: int) -> float:
    """The smallest base at which B(m) = sum_i cos(m theta_i) >= 0 for all m < ctx (Men et al. 2024, arXiv 2405.14591).

    With a smaller base, two similar tokens at a large distance can have a lower expected score than two random tokens.
    Accurate to 0.1 %; inf if it is above 1e9. Near the bound the condition can hold for one base and fail for a larger
    one, so bases are tried in order on a fine grid from 1 up, instead of by bisection.
    """
    exponents = -torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    grid = torch.exp(torch.arange(0, math.log(1e9), 0.001, dtype=torch.float64))
    for bases in grid.split(512):
        for m in torch.arange(ctx, dtype=torch.float64).split(64):  # most bases fail early
            angle = m[:, None] * (bases[:, None] ** exponents)[:, None, :]
            bases = bases[(angle.cos().sum(-1) >= 0).all(-1)]
        if len(bases):
            return bases[0].item()
    return math.inf


def scaled(trained: TrainedContext, knobs: dict[str, Any], n: int) -> Tensor:
    """inv_freq of a scaling method at context length n, radians per token, float64 [D / 2]."""
    inv_freq = resolve(knobs, trained, n, n).inv_freq
    return trained.inv_freq if inv_freq is None else inv_freq


def rotations_by_method(trained: TrainedContext, factor: float) -> dict[str, Tensor]:
    """Method -> rotations of each pair within L tokens, float64 [P]. Prints the warning of a method that has one."""
    by_method = {}
    for name in METHODS:
        knobs = {key: factor if key == "factor" else x for key, x in yaml_values("scaling", name).items()}
        if text := warning(knobs, trained):
            print(f"{name}: {text}")
        by_method[name] = rotations(scaled(trained, knobs, trained.train_ctx), trained.train_ctx)
    return by_method


def plot_by_pair(ax: Any, lines: Mapping[str, Sequence[float] | Tensor]) -> None:
    """Draw a line for each method, of a number for each pair."""
    for name, y in lines.items():
        look = {"color": plots.color_of("methods", name), "linestyle": plots.CONTROL_DASHES if name == "none" else "-"}
        ax.plot(y, marker="o", label=plots.NAMES.get(name, name), **look)


def draw(by_method: dict[str, Tensor], ctx: int, title: str, path: Path) -> None:
    """Draw the rotations within ctx tokens against the index of the pair, with a line for each method."""
    fig, ax = plots.pyplot().subplots(figsize=(9, 5.2))
    plot_by_pair(ax, by_method)
    ax.axhline(1, color="#999999", linewidth=1)
    place = {"xytext": (-4, 4), "textcoords": "offset points", "ha": "right"}
    ax.annotate(f"one rotation within {ctx} tokens", (1, 1), xycoords=("axes fraction", "data"), **place, **plots.GREY)
    ax.set(yscale="log", title=title)
    ax.set(xlabel="rotary pair, from high to low frequency", ylabel=f"rotations within {ctx} tokens")
    plots.end_labels(ax, space=22)
    plots.save(fig, path, ".png", ".svg", ".pdf")


if __name__ == "__main__":
    user_errors(main)()
