"""Measure whether a run uses distant context: python -m studies.probe run=recall ctx=2048 scaling=ntk

The input is a text of n tokens that ends in an answer, and the answer occurs exactly once before, at a known distance.
For every n and distance, the loss (nats per answer token) and the accuracy of the answer are measured without scaling,
with the window control and with the requested scaling. If the distance is larger than L, correct answers show that the
run uses distant context; the window control cannot see the first occurrence. A run that was trained on data=recall or
data=copy is probed with notes like those of its training, any other run with a passage of real text that is repeated in
another document.
"""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor

from conf.eval_schema import EvalConfig, eval_config
from conf.hydra_patches import exp_selects_runs, run_main, sweep_job
from conf.registry import ROOT
from data.corpora import recall
from data.corpus import Corpus, HeldOut
from engine import device as devices
from engine.progress import progress_bar
from engine.run import Run
from measure.curves import write_jsonl
from measure.evaluation import NONE, WINDOW, Method, requested_method
from model.gpt import GPT
from model.scaling import ContextChange

CUE, ANSWER = 8, 16  # tokens of a passage of real text: the first identify the passage, the others are scored
EXAMPLES = 64  # of each length and distance; 95 % of accuracy is then within 12 points
TOKENS_PER_PASS = 8192


@dataclass(frozen=True)
class Probe:
    """A kind of text that ends in an answer which also occurs once before, at a chosen distance."""

    description: str
    answer: int  # number of tokens of the answer, which are scored
    shortest: int  # the smallest possible distance between the two occurrences, tokens
    chance: float  # accuracy of guessing
    example: Callable[[int, int, int], list[int]]  # (n, distance, seed) -> n + 1 tokens


@dataclass(frozen=True)
class Cell:
    """The result of one method at one length and distance."""

    n: int
    distance: int
    nats: float  # per answer token
    accuracy: float  # of answer tokens


# ---- the two kinds of text ----


def probe_of(run: Run) -> Probe:
    """Notes for a run that was trained on the corpus `recall` (data=recall or data=copy), else a copy of real text."""
    if run.cfg.data["kind"] != "recall":
        return copy_probe(run.corpus)
    assert isinstance(run.corpus, Corpus)  # our own runs have one
    return notes_probe(run.corpus, run.cfg.data)


def notes_probe(corpus: Corpus, data: dict) -> Probe:
    """Notes in the lines of held-out documents, as the corpus `recall` trains them. data: its settings."""
    key, answer = data["key"], data["answer"]
    texts = [corpus.encoding.decode(document.tokens.tolist()) for document in corpus.held_out]

    def example(n: int, distance: int, seed: int) -> list[int]:
        return recall.probe(texts, corpus.encoding.encode_ordinary, n, distance, seed, key, answer)

    return Probe(f"recall {answer} letters of a note", answer, key + answer + 8, recall.CHANCE, example)


def copy_probe(corpus: HeldOut) -> Probe:
    """A passage of a held-out document, repeated after a part of another one."""

    def example(n: int, distance: int, seed: int) -> list[int]:
        return copy_of_text(corpus, n, distance, seed)

    return Probe(f"copy {ANSWER} tokens of real text", ANSWER, 64, 0.0, example)


def copy_of_text(corpus: HeldOut, n: int, distance: int, seed: int) -> list[int]:
    """n + 1 tokens: a passage of CUE + ANSWER tokens twice, `distance` tokens apart, inserted in another document.

    Passage and document are drawn from the held-out documents; the same seed gives the same text.
    """
    rng = random.Random(f"copy of text {seed}")
    size = CUE + ANSWER
    # Two documents, and where the passage starts in the first and the surrounding text in the second
    a, b = rng.sample([d.tokens for d in corpus.held_out if len(d.tokens) > n + size], 2)
    start_a, start_b = rng.randrange(len(a) - size), rng.randrange(len(b) - n - size)
    passage, other = a[start_a : start_a + size].tolist(), b[start_b : start_b + n + size].tolist()
    before, between = other[distance - size :], other[: distance - size]
    return [*before, *passage, *between, *passage][-n - 1 :]


# ---- measuring ----


def grid(ctx: int, shortest: int) -> list[tuple[int, int]]:
    """(n, distance) in tokens, for n = 64, 128, ... ctx and distance = 32, 64, ... from `shortest` up to n - 32."""
    lengths = sorted({64 * 2**k for k in range(ctx.bit_length()) if 64 * 2**k < ctx} | {ctx})
    distances = [2**k for k in range(5, ctx.bit_length())]
    return [(n, d) for n in lengths for d in distances if shortest <= d <= n - 32]


@torch.inference_mode()
def score(model: GPT, texts: Tensor, answer: int, change: ContextChange) -> tuple[float, float]:
    """(nats per answer token, accuracy) of texts, int64 [B, n + 1], whose last `answer` tokens are scored."""
    logits = model.last_logits(texts[:, :-1], answer, change).float()  # [B, answer, V]
    targets = texts[:, -answer:]
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    return nats, (logits.argmax(-1) == targets).float().mean().item()


def measure(run: Run, probe: Probe, methods: list[Method], ctx: int, dtype: str) -> dict[str, list[Cell]]:
    """Label of the method -> a cell for every length and distance of the grid, each from EXAMPLES texts.

    All methods get the same texts. ctx: the longest length, tokens.
    """
    device = next(run.model.parameters()).device
    results: dict[str, list[Cell]] = {method.label: [] for method in methods}
    cells = grid(ctx, probe.shortest)
    bar = progress_bar(len(methods) * EXAMPLES * sum(n for n, _ in cells))
    for n, distance in cells:
        texts = torch.tensor([probe.example(n, distance, seed) for seed in range(EXAMPLES)], device=device)
        passes = texts.split(max(1, TOKENS_PER_PASS // n))
        for method in methods:
            change = run.change(method.scalings, n, ctx)
            with devices.autocast(device, dtype):
                scores = [score(run.model, part, probe.answer, change) for part in passes]
            nats, accuracy = (sum(values) / len(values) for values in zip(*scores, strict=True))
            results[method.label].append(Cell(n, distance, nats, accuracy))
            bar.update(EXAMPLES * n)
    bar.close()
    return results


# ---- the command ----


@hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="eval")
@sweep_job
def main(hydra_cfg: DictConfig) -> None:
    probe_run(eval_config(hydra_cfg))


def probe_run(cfg: EvalConfig) -> None:
    """Measure, print a table, and write rows and a figure to runs/NAME/eval/probe/."""
    ctx, requested = cfg.longest_ctx, requested_method(cfg)
    device = devices.start(cfg.device, cfg.kernel)
    run = Run.open(
        cfg.run,
        runs=cfg.runs,
        cache=cfg.cache,
        device=device,
        ctx=ctx,
        scalings=requested.scalings,
        exp=cfg.trained_with,
    )
    probe = probe_of(run)
    methods = [NONE, WINDOW]
    if requested not in methods:
        methods.append(requested)
    print(f"{run.describe()}\ntask: {probe.description}")

    results = measure(run, probe, methods, ctx, cfg.dtype)
    trained_ctx = run.context.longest_trained_ctx
    print_table(results, trained_ctx, probe.chance)
    folder = run.folder / "eval" / "probe"
    name = f"{requested.label.replace(' ', '-')}-ctx{ctx}"
    rows = [
        {"run": run.name, "task": probe.description, "label": label, **asdict(cell)}
        for label, cells in results.items()
        for cell in cells
    ]
    write_jsonl(folder / f"{name}.jsonl", rows)
    title = f"{run.name}: {probe.description}, pos={run.context.pos}"
    draw(results, trained_ctx, probe.chance, title, folder / f"{name}.png")
    print(f"rows and picture: {folder}/")


def print_table(results: dict[str, list[Cell]], trained_ctx: int, chance: float) -> None:
    """A line for each length and distance, a column for each method."""
    print("accuracy in % (nats per answer token)" + (f"; chance {100 * chance:.0f} %" if chance else ""))
    print(f"{'n':>6}{'distance':>10}" + "".join(f"{label[:20]:>22}" for label in results))
    for cells in zip(*results.values(), strict=True):
        n, distance = cells[0].n, cells[0].distance
        note = "  distance past L" if distance >= trained_ctx else "  n past L" if n > trained_ctx else ""
        values = "".join(f"{100 * cell.accuracy:>14.0f} ({cell.nats:5.2f})" for cell in cells)
        print(f"{n:>6}{distance:>10}{values}{note}")


def draw(results: dict[str, list[Cell]], trained_ctx: int, chance: float, title: str, path: Path) -> None:
    """A panel for each method: accuracy by context length and distance."""
    import matplotlib.pyplot as plt
    import numpy as np

    from measure import plots

    fig, axes = plt.subplots(1, len(results), figsize=(4.6 * len(results), 4.4), dpi=130, squeeze=False)
    for ax, (label, cells) in zip(axes[0], results.items(), strict=True):
        ns, distances = sorted({c.n for c in cells}), sorted({c.distance for c in cells})
        values = np.full((len(distances), len(ns)), np.nan)  # nan: not measured, the distance is longer than n
        for c in cells:
            values[distances.index(c.distance), ns.index(c.n)] = 100 * c.accuracy
        ax.imshow(values, origin="lower", cmap="viridis", vmin=0, vmax=100, aspect="auto")
        for (y, x), v in np.ndenumerate(values):
            if not np.isnan(v):
                ax.text(x, y, f"{v:.0f}", ha="center", va="center", fontsize=8, color="white" if v < 60 else "black")
        ax.set_xticks(range(len(ns)), [str(n) for n in ns])
        ax.set_yticks(range(len(distances)), [str(d) for d in distances])
        ax.set_xlabel("context, n")
        ax.set_title({"none": "no scaling", "window": "window control"}.get(label, label), fontsize=10, loc="left")
        # the trained context: a line between the last value inside it and the first one beyond
        for values_of_axis, draw_line in ((ns, ax.axvline), (distances, ax.axhline)):
            if values_of_axis[-1] > trained_ctx:
                draw_line(sum(v <= trained_ctx for v in values_of_axis) - 0.5, color="#D55E00", linewidth=1.5)
    axes[0, 0].set_ylabel("distance of the answer, tokens")
    by_chance = f", chance {100 * chance:.0f} %" if chance else ""
    title = f"{title}\naccuracy in %{by_chance}; orange: the trained context, {trained_ctx}"
    fig.suptitle(title, fontsize=10, x=0.01, ha="left")
    fig.tight_layout()
    plots.save(fig, path)


if __name__ == "__main__":
    run_main(main, exp_selects_runs)
