"""What RoPE's frequencies do inside a trained context, and where scaling methods put them: python -m studies.spectrum

Prints, for each pair, the turns it makes within L tokens, without scaling and with each method; draws the same.
"""

import argparse
import csv
import io
import math
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import one_line_errors
from conf.registry import usual
from model.checkpoint import write_atomically
from model.scaling import Trained, resolve

LLAMA2_SLOWEST = 0.075  # turns of Llama 2's slowest pair within its 4096 tokens (head_dim 128, base 10000)
METHODS = ("none", "pi", "ntk", "yarn", "yarn_paper", "ntk_mixed")
COLORS = ("#333333", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")


def frequencies(rotary_dim: int, base: float) -> Tensor:
    return base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def turns(inv_freq: Tensor, ctx: int) -> Tensor:
    """How often each pair goes round within ctx tokens, float64 [P]."""
    return ctx * inv_freq / (2 * math.pi)


def base_bound(rotary_dim: int, ctx: int) -> float:
    """The smallest base at which B(m) = sum_i cos(m theta_i) >= 0 for all m < ctx (Men et al. 2024, arXiv 2405.14591):
    with a smaller one, similar tokens far apart can score below random ones. To 0.1 %; inf above 1e9.

    Whether it holds goes on and off near the bound, so every base of a fine grid is tried, from 1 up.
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


def scale_matched_base(rotary_dim: int, ctx: int) -> float:
    """The base at which the slowest pair turns as often within ctx as Llama 2's does within 4096 tokens."""
    if rotary_dim < 4:
        return math.nan
    return (ctx / (2 * math.pi * LLAMA2_SLOWEST)) ** (rotary_dim / (rotary_dim - 2))


def card(trained: Trained) -> str:
    """Three lines on a run's spectrum; nothing for an encoding that does not rotate."""
    if trained.frequencies is None:
        return ""
    r, L, D = turns(trained.inv_freq, trained.train_ctx), trained.train_ctx, trained.rotary_dim
    bound = f"{base_bound(D, L):,.0f}" if L <= 2048 else "takes a while: python -m studies.spectrum"
    return (
        f"spectrum: {len(r)} pairs turn {r[0]:.3g} .. {r[-1]:.2g} times within {L} tokens; "
        f"{int((r < 1).sum())} never complete a turn\n"
        f"  smallest base that keeps B(m) >= 0 up to {L} (arXiv 2405.14591): {bound}\n"
        f"  base whose slowest pair turns as in Llama 2: {scale_matched_base(D, L):,.0f}"
    )


def warning(knobs: dict, trained: Trained) -> str:
    """One line if a method's threshold, in turns, is more than any pair makes at this context."""
    if trained.frequencies is None:
        return ""
    most = turns(trained.inv_freq, trained.train_ctx).max().item()
    for key in ("beta_fast", "beta", "high_freq_factor"):
        if key in knobs and knobs[key] > most:
            return (
                f"warning: scaling.{key}={knobs[key]:g} turns is more than any pair makes in {trained.train_ctx} "
                f"tokens ({most:.3g} at most), so no pair counts as fast: try scaling.{key}=4"
            )
    return ""


def draw(rows: dict[str, Tensor], ctx: int, title: str, path: Path) -> None:
    import matplotlib.pyplot as plt  # not at the top: train.py imports this module for its card

    from studies import pictures

    fig, ax = plt.subplots(figsize=(9, 5.2), dpi=150)
    for (name, r), color in zip(rows.items(), COLORS, strict=False):
        label, style = ("no scaling", (0, (2, 1.5))) if name == "none" else (name, "-")
        ax.plot(range(len(r)), r, color=color, marker="o", markersize=3, linewidth=1.4, linestyle=style, label=label)
    ax.axhline(1, color="#999999", linewidth=1)
    ax.annotate(f"one turn within {ctx} tokens", (1, 1), xycoords=("axes fraction", "data"), xytext=(-4, 4),
                textcoords="offset points", ha="right",
                color="#666666", fontsize=9)  # fmt: skip
    ax.set_yscale("log")
    ax.set_xlabel("rotary pair, fast to slow")
    ax.set_ylabel(f"turns within {ctx} tokens")
    ax.legend(frameon=False, fontsize=9)
    ax.set_title(title, fontsize=10, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    pictures.save(fig, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ctx", type=int, default=256, help="the trained context, L")
    parser.add_argument("--rotary-dim", type=int, default=64)
    parser.add_argument("--base", type=float, default=10000.0)
    parser.add_argument("--factor", type=float, default=8.0)
    parser.add_argument("--out", default="results/spectrum", help="writes OUT.png and OUT.csv")
    args = parser.parse_args()
    if args.ctx < 2 or args.rotary_dim < 4 or args.rotary_dim % 2 or args.base < 1 or args.factor < 1:
        raise ValueError("--ctx must be at least 2, --rotary-dim even and at least 4, --base and --factor at least 1")
    trained = Trained("rope", args.ctx, frequencies(args.rotary_dim, args.base))
    print(card(trained))
    rows = {}
    for name in METHODS:
        knobs = usual("scaling", name)
        knobs |= {"factor": args.factor} if "factor" in knobs else {}
        if line := warning(knobs, trained):
            print(f"{name}: {line}")
        scaled = resolve(knobs, trained, args.ctx, args.ctx)
        rows[name] = turns(trained.inv_freq if scaled.inv_freq is None else scaled.inv_freq, args.ctx)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["pair", *rows])
    print(f"\nturns within {args.ctx} tokens, factor {args.factor:g}\n{'pair':>5}" + "".join(f"{k:>12}" for k in rows))
    for i in range(args.rotary_dim // 2):
        print(f"{i:>5}" + "".join(f"{r[i]:>12.4g}" for r in rows.values()))
        table.writerow([i, *(f"{r[i]:.6g}" for r in rows.values())])
    out = Path(args.out)
    write_atomically(out.with_suffix(".csv"), lambda f: f.write(text.getvalue().encode()))
    title = (
        f"RoPE's pairs: rotary width {args.rotary_dim}, base {args.base:g}; factor {args.factor:g} at L = {args.ctx}"
    )
    draw(rows, args.ctx, title, out.with_suffix(".png"))
    print(f"\n{out.with_suffix('.png')}   {out.with_suffix('.csv')}")


if __name__ == "__main__":
    one_line_errors(main)()
