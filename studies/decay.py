"""How q . k falls with distance under RoPE, at several bases and with several scalings: python -m studies.decay

Two quantities at relative distance m, of heads of width D:
* q . k / D of all-ones q and k, which is 2 / D times B(m) = sum_i cos(m theta_i) of arXiv 2405.14591;
* Su's bound on any score, (2 / D) sum_j |sum_{i < j} e^{i m theta_i}| (kexue.fm/archives/8265; RoFormer, arXiv
  2104.09864, 3.4.3), which "may be too loose" (PI, arXiv 2306.15595, 2.2).
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import user_errors
from conf.registry import ROOT, yaml_values
from kernels import cos_sin, phase, rotate
from measure import plots
from model.scaling import TrainedContext
from model.spectrum import frequencies
from studies.spectrum import scaled

HEAD_DIM, POSITIONS, L = 64, 2048, 256  # D, the number of distances, the trained context of the scalings
BASES = (1, 100, 500, 5000, 50000)  # 10000 is in the panel of the scalings
SCALINGS = ("none", "pi", "ntk", "yarn")  # at base 10000
# Below the figure; D: head_dim
SYMBOLS = """D = {D} is the width of a head, θᵢ = base^(-2i/D) the angle by which pair i rotates per token, in radians.
Score = 2/D · B(m), where B(m) = Σᵢ cos(m θᵢ) (Men et al. 2024), which is PE(t) · PE(t + m) of sinusoidal embeddings.
All lines are means over 64 distances.
Su's bound = 2/D · Σⱼ |Σ_(i<j) exp(√-1 · m θᵢ)|: the score of any q and k is at most this times a factor that
depends on q and k, but not on m (RoFormer, section 3.4.3)."""


Decay = tuple[Tensor, Tensor]  # score and Su's bound at each distance, float64 [positions]

# ---- the quantities; inv_freq: radians per token, float64 [D / 2] ----


def score(inv_freq: Tensor, positions: int) -> Tensor:
    """q . k / D of all-ones q at position m and k at 0, float64 [positions].

    Computed with the rotation of the models, not with the formula for it, so it also tests the rotation.
    """
    q = torch.ones(1, positions, 1, 2 * len(inv_freq), dtype=torch.float64)  # [batch, positions, heads, D]
    rotated = rotate(q, *cos_sin(phase(inv_freq), torch.arange(positions)))
    return rotated[0, :, 0].sum(dim=-1) / (2 * len(inv_freq))


def su_bound(inv_freq: Tensor, positions: int) -> Tensor:
    """The mean over j of |sum_{i < j} e^{i m theta_i}|, float64 [positions]."""
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), inv_freq)  # [positions, D / 2]
    return torch.polar(torch.ones_like(angle), angle).cumsum(dim=1).abs().mean(dim=1)


def decay(inv_freq: Tensor, positions: int) -> Decay:
    """Both quantities at the distances 0 .. positions - 1."""
    return score(inv_freq, positions), su_bound(inv_freq, positions)


# ---- the command ----


def main() -> None:
    """Compute the decay for every base and scaling method, and draw the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results/decay", help="OUT.png, .svg, .pdf")
    out, T = parser.parse_args().out, POSITIONS
    trained = TrainedContext("rope", L, frequencies(HEAD_DIM, 10000.0))
    by_base = {f"base {base}": decay(frequencies(HEAD_DIM, base), T) for base in BASES}
    by_scaling = {name: decay(scaled(trained, yaml_values("scaling", name), T), T) for name in SCALINGS}
    draw(by_base, by_scaling, out)
    print(f"{out}.png")


def draw(by_base: dict[str, Decay], by_scaling: dict[str, Decay], path: Path) -> None:
    """Draw four panels: score and Su's bound, by base and by scaling method. The lines are means over 64 distances."""
    shades = plots.pyplot().get_cmap("viridis")(torch.linspace(0, 0.9, len(by_base)).tolist())
    colors = dict(zip(by_base, shades, strict=True))
    colors |= {name: plots.color_of("methods", name) for name in by_scaling}
    titles = ("by base, without scaling", f"base 10000, by scaling method (L = {L}, factor {POSITIONS / L:g})")
    fig, axes = plots.pyplot().subplots(2, 2, figsize=(13, 8), sharex=True, sharey="row")
    fig.subplots_adjust(wspace=0.42, hspace=0.12)  # room for the names at the ends of the lines
    for column, title, curves in zip(axes.T, titles, (by_base, by_scaling), strict=True):
        column[0].set_title(title)
        column[1].set_xlabel("m: distance between query and key, tokens")
        for name, quantities in curves.items():
            for ax, quantity in zip(column, quantities, strict=True):
                smooth = quantity.unfold(0, 64, 4).mean(dim=1)  # over 0 .. 63, 4 .. 67, ...
                m = [32 + 4 * k for k in range(len(smooth))]
                ax.plot(m, smooth, color=colors[name], linewidth=1.2, label=plots.NAMES.get(name, name))
    axes[0, 0].set_ylabel("score: q · k / D of all-ones q and k")
    axes[1, 0].set_ylabel("Su's bound")
    for ax in axes.flat:  # all lines are drawn, so the limits are final
        plots.end_labels(ax, space=16)
    fig.text(axes[0, 0].get_position().x0, 0.04, SYMBOLS.format(D=HEAD_DIM), fontsize=10, va="top", linespacing=1.5)
    plots.save(fig, path, ".png", ".svg", ".pdf")


if __name__ == "__main__":
    user_errors(main)()
