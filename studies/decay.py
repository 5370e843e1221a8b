"""How q . k falls with distance under RoPE, at several bases and scalings: python -m studies.decay

At relative distance m: q . k / D of all-ones q and k of width D; B(m) = sum_i cos(m theta_i) of arXiv 2405.14591, which
is D / 2 times that; and Su's bound on any score, (2 / D) sum_j |sum_{i < j} e^{i m theta_i}| (kexue.fm/archives/8265;
RoFormer, arXiv 2104.09864, 3.4.3), which "may be too loose" (PI, arXiv 2306.15595, 2.2).
"""

import argparse
import csv
import io
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from conf.errors import one_line_errors
from conf.registry import usual
from kernels import cos_sin, phase, rotate
from model.checkpoint import write_atomically
from model.scaling import Trained, resolve
from studies import pictures
from studies.spectrum import frequencies

BASES = (1, 10, 100, 500, 5000, 10000, 50000)
SCALINGS = ("none", "pi", "ntk", "yarn")


def score(inv_freq: Tensor, positions: int) -> Tensor:
    """q . k of all-ones q at m and k at 0, over D, float64 [positions]: the rotation itself, not its formula."""
    q = torch.ones(1, positions, 1, 2 * len(inv_freq), dtype=torch.float64)
    turned = rotate(q, *cos_sin(phase(inv_freq), torch.arange(positions)))
    return turned[0, :, 0].sum(dim=-1) / (2 * len(inv_freq))


def similarity(inv_freq: Tensor, positions: int) -> Tensor:
    """B(m) = sum_i cos(m theta_i), float64 [positions]."""
    return torch.outer(torch.arange(positions, dtype=torch.float64), inv_freq).cos().sum(dim=1)


def su_bound(inv_freq: Tensor, positions: int) -> Tensor:
    """The mean over j of |sum_{i < j} e^{i m theta_i}|, float64 [positions]."""
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), inv_freq)
    return torch.polar(torch.ones_like(angle), angle).cumsum(dim=1).abs().mean(dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--ctx", type=int, default=256, help="L, for the scalings (base 10000, factor positions / L)")
    parser.add_argument("--out", default="results/decay", help="writes OUT.png and OUT.csv")
    args = parser.parse_args()
    D, T, L = args.head_dim, args.positions, args.ctx
    if D < 4 or D % 2 or T < 64 or not 2 <= L <= T:
        raise ValueError("--head-dim must be even and at least 4, --positions at least 64, --ctx from 2 to --positions")
    by_base = {f"base {b}": frequencies(D, b) for b in BASES}
    trained, by_scaling = Trained("rope", L, frequencies(D, 10000.0)), {}
    for name in SCALINGS:
        scaled = resolve(usual("scaling", name), trained, T, T)
        by_scaling[name] = trained.inv_freq if scaled.inv_freq is None else scaled.inv_freq
    curves = {name: (score(f, T), similarity(f, T), su_bound(f, T)) for name, f in {**by_base, **by_scaling}.items()}

    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    # B(m) is D / 2 times the score, so it has no column
    table.writerow(["distance", *(f"{name} {what}" for name in curves for what in ("score", "su_bound"))])
    for m in range(T):
        table.writerow([m, *(f"{x:.4g}" for score, _, bound in curves.values() for x in (score[m], bound[m]))])
    print(
        f"mean of q . k / D over distances, all-ones vectors, head_dim {D}; lowest B(m); Su's bound at 0 and at the end"
    )
    print(f"{'':12}{'0..63':>9}{'64..255':>9}{f'256..{T - 1}':>11}{'lowest B':>10}{'bound 0':>9}{f'bound {T - 1}':>12}")
    for name, (s, b, u) in curves.items():
        means = [s[a:z].mean().item() if a < T else float("nan") for a, z in ((0, 64), (64, 256), (256, T))]
        print(f"{name:<12}{means[0]:>9.3f}{means[1]:>9.3f}{means[2]:>11.3f}{b.min():>10.2f}{u[0]:>9.2f}{u[-1]:>12.2f}")

    fig, axes = plt.subplots(4, len(BASES), figsize=(15, 9), dpi=120, sharex=True, sharey="row")
    for group, top in ((by_base, 0), (by_scaling, 2)):
        for column in range(len(BASES)):
            if column >= len(group):
                axes[top, column].axis("off")
                axes[top + 1, column].axis("off")
                continue
            name = list(group)[column]
            for ax, curve in ((axes[top, column], curves[name][0]), (axes[top + 1, column], curves[name][2])):
                ax.plot(curve, color="#9ecae1", linewidth=0.5)
                ax.plot(range(32, T - 31), curve.unfold(0, 64, 1).mean(dim=1), color="#08519c", linewidth=1.3)
                ax.axhline(0, color="#999999", linewidth=0.6)
                ax.spines[["top", "right"]].set_visible(False)
            axes[top, column].set_title(name if top == 0 else f"base 10000, {name}", fontsize=10, loc="left")
            axes[top + 1, column].set_xlabel("distance m", fontsize=9)
        axes[top, 0].set_ylabel(f"q . k / D, all ones\n(B(m) is {D // 2} times this)", fontsize=9)
        axes[top + 1, 0].set_ylabel("Su's bound", fontsize=9)
    title = f"RoPE by distance, head_dim {D}: upper half by base, lower half by scaling (L = {L}, factor {T / L:g})"
    fig.suptitle(f"{title}; dark: mean over 64 distances", fontsize=11, x=0.01, ha="left")
    fig.tight_layout()
    out = Path(args.out)
    write_atomically(out.with_suffix(".csv"), lambda f: f.write(text.getvalue().encode()))
    pictures.save(fig, out.with_suffix(".png"))
    print(f"{out.with_suffix('.png')}   {out.with_suffix('.csv')}")


if __name__ == "__main__":
    one_line_errors(main)()
