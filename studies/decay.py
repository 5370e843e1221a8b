"""How q . k falls with distance under RoPE, at several bases and with several scalings: python -m studies.decay

Three quantities at relative distance m, of heads of width D:
* q . k / D of all-ones q and k;
* B(m) = sum_i cos(m theta_i) of arXiv 2405.14591, which is D / 2 times the first;
* Su's bound on any score, (2 / D) sum_j |sum_{i < j} e^{i m theta_i}| (kexue.fm/archives/8265; RoFormer, arXiv
  2104.09864, 3.4.3), which "may be too loose" (PI, arXiv 2306.15595, 2.2).
"""

import argparse
import csv
import io
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import UserError, user_errors_in_one_line
from conf.registry import yaml_values
from engine.checkpoint import write_atomically
from kernels import cos_sin, phase, rotate
from model.scaling import TrainedContext, resolve
from model.spectrum import frequencies

BASES = (1, 10, 100, 500, 5000, 10000, 50000)
SCALINGS = ("none", "pi", "ntk", "yarn")  # at base 10000
# Below the figure; D: head_dim
SYMBOLS = """D = {D} is the width of a head, θᵢ = base^(-2i/D) the angle by which pair i rotates per token, in radians.
Score = 2/D · B(m), where B(m) = Σᵢ cos(m θᵢ) (Men et al. 2024). All lines are means over 64 distances.
Su's bound = 2/D · Σⱼ |Σ_(i<j) exp(√-1 · m θᵢ)|: the score of any q and k is at most this times a factor that
depends on q and k, but not on m (RoFormer, section 3.4.3)."""


# ---- the three quantities; inv_freq: radians per token, float64 [D / 2] ----


def score(inv_freq: Tensor, positions: int) -> Tensor:
    """q . k / D of all-ones q at position m and k at 0, float64 [positions].

    Computed with the rotation of the models, not with the formula for it, so it also tests the rotation.
    """
    q = torch.ones(1, positions, 1, 2 * len(inv_freq), dtype=torch.float64)  # [batch, positions, heads, D]
    rotated = rotate(q, *cos_sin(phase(inv_freq), torch.arange(positions)))
    return rotated[0, :, 0].sum(dim=-1) / (2 * len(inv_freq))


def similarity(inv_freq: Tensor, positions: int) -> Tensor:
    """B(m) = sum_i cos(m theta_i), float64 [positions]."""
    return torch.outer(torch.arange(positions, dtype=torch.float64), inv_freq).cos().sum(dim=1)


def su_bound(inv_freq: Tensor, positions: int) -> Tensor:
    """The mean over j of |sum_{i < j} e^{i m theta_i}|, float64 [positions]."""
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), inv_freq)  # [positions, D / 2]
    return torch.polar(torch.ones_like(angle), angle).cumsum(dim=1).abs().mean(dim=1)


@dataclass(frozen=True)
class Decay:
    """The three quantities at the distances 0 .. positions - 1, each float64 [positions]."""

    score: Tensor
    similarity: Tensor
    su_bound: Tensor


def decay(inv_freq: Tensor, positions: int) -> Decay:
    """The three quantities for frequencies float64 [D / 2], radians per token."""
    return Decay(score(inv_freq, positions), similarity(inv_freq, positions), su_bound(inv_freq, positions))


# ---- the command ----


def main() -> None:
    """Compute the decay for every base and scaling method, print a summary, and write the table and the figure."""
    args = parse_arguments()
    D, T, L = args.head_dim, args.positions, args.ctx
    by_base = {f"base {base}": decay(frequencies(D, base), T) for base in BASES}
    by_scaling = {name: decay(scaled_frequencies(name, D, T, L), T) for name in SCALINGS}
    curves = {**by_base, **by_scaling}
    table, figure = Path(args.out).with_suffix(".csv"), Path(args.out).with_suffix(".png")
    print_summary(curves, D, T)
    write_table(curves, T, table)
    draw(by_base, by_scaling, D, T, L, figure)
    print(f"{figure}   {table}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How q . k falls with distance under RoPE")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--ctx", type=int, default=256, help="L, for the scalings (base 10000, factor positions / L)")
    parser.add_argument("--out", default="results/decay", help="writes OUT.csv and OUT.png, .svg, .pdf")
    args = parser.parse_args()
    D, T, L = args.head_dim, args.positions, args.ctx
    if D < 4 or D % 2 or T < 64 or not 2 <= L <= T:
        raise UserError("--head-dim must be even and at least 4, --positions at least 64, --ctx from 2 to --positions")
    return args


def scaled_frequencies(name: str, head_dim: int, positions: int, L: int) -> Tensor:
    """inv_freq of base 10000 with the scaling method of that name, extended from L to `positions`, float64 [D / 2]."""
    trained = TrainedContext("rope", L, frequencies(head_dim, 10000.0))
    change = resolve(yaml_values("scaling", name), trained, positions, positions)
    return trained.inv_freq if change.inv_freq is None else change.inv_freq


def print_summary(curves: dict[str, Decay], head_dim: int, T: int) -> None:
    """Print for each curve the mean score of three ranges of distances, the lowest B(m) and the ends of Su's bound."""
    print(
        f"mean of q . k / D over distances, all-ones vectors, head_dim {head_dim}; lowest B(m); "
        "Su's bound at 0 and at the end"
    )
    print(f"{'':12}{'0..63':>9}{'64..255':>9}{f'256..{T - 1}':>11}{'lowest B':>10}{'bound 0':>9}{f'bound {T - 1}':>12}")
    for name, curve in curves.items():
        near, middle, far = (
            curve.score[start:end].mean().item() if start < T else float("nan")
            for start, end in ((0, 64), (64, 256), (256, T))
        )
        lowest, bound = curve.similarity.min(), curve.su_bound
        print(f"{name:<12}{near:>9.3f}{middle:>9.3f}{far:>11.3f}{lowest:>10.2f}{bound[0]:>9.2f}{bound[-1]:>12.2f}")


def write_table(curves: dict[str, Decay], T: int, path: Path) -> None:
    """score and su_bound at every distance, as CSV. B(m) is D / 2 times the score, so it has no column."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["distance", *(f"{name} {column}" for name in curves for column in ("score", "su_bound"))])
    for m in range(T):
        table.writerow([m, *(f"{x:.4g}" for c in curves.values() for x in (c.score[m], c.su_bound[m]))])
    write_atomically(path, lambda f: f.write(text.getvalue().encode()))


def draw(by_base: dict[str, Decay], by_scaling: dict[str, Decay], head_dim: int, T: int, L: int, path: Path) -> None:
    """Draw four panels: score and Su's bound, by base and by scaling method. The lines are means over 64 distances."""
    import matplotlib.pyplot as plt

    from measure import plots

    shades = plt.get_cmap("viridis")(torch.linspace(0, 0.9, len(by_base)).tolist())
    colors = dict(zip(by_base, shades, strict=True))
    colors |= {name: plots.color_of("methods", name) for name in by_scaling}
    titles = ("by base, without scaling", f"base 10000, by scaling method (L = {L}, factor {T / L:g})")
    fig, axes = plt.subplots(2, 2, figsize=(13, 8), sharex=True, sharey="row")
    fig.subplots_adjust(wspace=0.42, hspace=0.12)  # room for the names at the ends of the lines
    labels = {}  # of each panel
    for column, title, curves in zip(axes.T, titles, (by_base, by_scaling), strict=True):
        column[0].set_title(title)
        column[1].set_xlabel("m: distance between query and key, tokens")
        for ax, quantity in zip(column, ("score", "su_bound"), strict=True):
            labels[ax] = []
            for name, curve in curves.items():
                smooth = getattr(curve, quantity).unfold(0, 64, 4).mean(dim=1)  # over 0 .. 63, 4 .. 67, ...
                m = [32 + 4 * k for k in range(len(smooth))]
                ax.plot(m, smooth, color=colors[name], linewidth=1.2)
                labels[ax].append((m[-1], smooth[-1].item(), plots.NAMES.get(name, name), {"color": colors[name]}))
    axes[0, 0].set_ylabel("score: q · k / D of all-ones q and k")
    axes[1, 0].set_ylabel("Su's bound")
    for ax, ends in labels.items():  # all lines are drawn, so the limits are final
        plots.end_labels(ax, ends, space=16)
    fig.text(axes[0, 0].get_position().x0, 0.04, SYMBOLS.format(D=head_dim), fontsize=10, va="top", linespacing=1.5)
    plots.save(fig, path, ".png", ".svg", ".pdf")


if __name__ == "__main__":
    user_errors_in_one_line(main)()
