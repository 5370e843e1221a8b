"""Does a run use far context, or does it only not break? python -m studies.probe run=recall ctx=2048 scaling=ntk

Texts of n tokens whose answer stands at a known distance, scored by nats per answer token and by accuracy, for every n
and distance, without scaling, under the window control, and with the scaling asked for. Right answers from further away
than L are use of far context; the control cannot give them. A run trained on data=recall or data=copy is asked for the
notes that it was trained to recall; any other for a passage of real text that another document interrupts.
"""

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

import eval as evaluation
from conf.errors import entry, one_line_errors
from conf.registry import ROOT, usual
from conf.schema import eval_config
from data import recall, tokens
from model import checkpoint, gpt, runtime, scaling
from model.scaling import Scaled

CUE, ANSWER = 8, 16  # tokens of a passage of real text: those that say which it is, and those that are scored
EXAMPLES = 64  # of each length and distance; 95 % of accuracy is then within 12 points


@dataclass
class Cell:
    n: int
    distance: int
    nats: float  # per answer token
    accuracy: float  # of answer tokens


def grid(ctx: int, shortest: int) -> list[tuple[int, int]]:
    """(n, distance) for n and distance in 64, 128, ... ctx and 32, 64, ... below n."""
    lengths = sorted({64 * 2**k for k in range(ctx.bit_length()) if 64 * 2**k < ctx} | {ctx})
    distances = [2**k for k in range(5, ctx.bit_length())]
    return [(n, d) for n in lengths for d in distances if shortest <= d <= n - 32]


def copy_of_text(corpus: tokens.Corpus, n: int, distance: int, seed: int) -> list[int]:
    """n + 1 tokens: a passage of CUE + ANSWER tokens, twice, `distance` tokens apart, in another held-out document."""
    rng = random.Random(f"copy of text {seed}")
    size = CUE + ANSWER
    a, b = rng.sample([d.tokens for d in corpus.held_out if len(d.tokens) > n + size], 2)
    start_a, start_b = rng.randrange(len(a) - size), rng.randrange(len(b) - n - size)
    passage, other = a[start_a : start_a + size].tolist(), b[start_b : start_b + n + size].tolist()
    between = other[: distance - size]
    return [*other[distance - size :], *passage, *between, *passage][-n - 1 :]


@torch.inference_mode()
def score(model: gpt.GPT, texts: Tensor, answer: int, scaled: Scaled) -> tuple[float, float]:
    """(nats per answer token, accuracy) of texts [B, n + answer], whose last `answer` tokens are scored."""
    logits = model.scores(texts[:, :-1], answer, scaled).float()
    want = texts[:, -answer:]
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), want.flatten()).item()
    return nats, (logits.argmax(-1) == want).float().mean().item()


@hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="eval")
@one_line_errors
def main(hydra_cfg: DictConfig) -> None:
    cfg = eval_config(hydra_cfg)
    ctx = max(cfg.ctx) if isinstance(cfg.ctx, list) else cfg.ctx
    name, why = evaluation.choose(cfg, ctx)
    device = runtime.pick_device(cfg.device)
    state = checkpoint.load(Path(cfg.runs) / name, device)
    train = state["cfg"]
    corpus = tokens.prepare(train.data, cfg.cache)
    if train.data["kind"] == "recall":
        key, answer = train.data["key"], train.data["answer"]
        task, shortest, chance = f"recall {answer} letters of a note", key + answer + 8, recall.CHANCE
        texts = [corpus.encoding.decode(d.tokens.tolist()) for d in corpus.held_out]
    else:
        task, answer, shortest, chance = f"copy {ANSWER} tokens of real text", ANSWER, 64, 0.0

    def example(n: int, distance: int, seed: int) -> list[int]:
        if train.data["kind"] == "recall":
            return recall.probe(texts, corpus.encoding.encode_ordinary, n, distance, seed, key, answer)
        return copy_of_text(corpus, n, distance, seed)

    model = gpt.build(train, corpus.vocab_size).to(device).eval()
    model.load_state_dict(state["model"])
    trained, own = gpt.trained(train, model.pos), gpt.own_scaling(train, model.pos)
    plus = [usual("scaling", k) for k in cfg.plus]
    asked = " + ".join([evaluation.label(HydraConfig.get().runtime.choices["scaling"], cfg.scaling), *cfg.plus])
    methods = {"none": [usual("scaling", "none")], "window": [usual("scaling", "window")], asked: [cfg.scaling, *plus]}
    print(f"run: {name} ({why}): pos={train.pos['kind']}, trained at ctx {train.ctx}; task: {task}")

    results: dict[str, list[Cell]] = {k: [] for k in methods}
    cells = grid(ctx, shortest)
    for n, distance in tqdm(cells, dynamic_ncols=True, mininterval=0.5 if sys.stderr.isatty() else 15):
        encoded = torch.tensor([example(n, distance, seed) for seed in range(EXAMPLES)], device=device)
        for curve, knobs in methods.items():
            scaled = scaling.on_top(own, scaling.resolve(knobs[0], trained, n, ctx, knobs[1:]))
            with runtime.autocast(device, cfg.dtype):
                parts = [score(model, part, answer, scaled) for part in encoded.split(max(1, 8192 // n))]
            results[curve].append(Cell(n, distance, *(sum(x) / len(x) for x in zip(*parts, strict=True))))
    report(results, trained.reach, chance)
    folder = Path(cfg.runs) / name / "eval" / "probe"
    rows = [{"run": name, "task": task, "label": k, **vars(cell)} for k, cells in results.items() for cell in cells]
    evaluation.write_rows(folder / f"{asked.replace(' ', '-')}-ctx{ctx}.jsonl", rows)
    picture = folder / f"{asked.replace(' ', '-')}-ctx{ctx}.png"
    draw(results, trained.reach, chance, f"{name}: {task}, pos={train.pos['kind']}", picture)
    print(f"rows and picture: {folder}/")


def report(results: dict[str, list[Cell]], reach: int, chance: float) -> None:
    print("accuracy in % (nats per answer token)" + (f"; chance {100 * chance:.0f} %" if chance else ""))
    print(f"{'n':>6}{'distance':>10}" + "".join(f"{k[:20]:>22}" for k in results))
    for cells in zip(*results.values(), strict=True):
        n, distance = cells[0].n, cells[0].distance
        where = "  distance past L" if distance >= reach else "  n past L" if n > reach else ""
        print(f"{n:>6}{distance:>10}" + "".join(f"{100 * c.accuracy:>14.0f} ({c.nats:5.2f})" for c in cells) + where)


def draw(results: dict[str, list[Cell]], reach: int, chance: float, title: str, path: Path) -> None:
    """A panel for each curve: accuracy by context length and distance."""
    import matplotlib.pyplot as plt
    import numpy as np

    from studies import pictures

    fig, axes = plt.subplots(1, len(results), figsize=(4.6 * len(results), 4.4), dpi=130, squeeze=False)
    for ax, (name, cells) in zip(axes[0], results.items(), strict=True):
        ns, ds = sorted({c.n for c in cells}), sorted({c.distance for c in cells})
        values = np.full((len(ds), len(ns)), np.nan)
        for c in cells:
            values[ds.index(c.distance), ns.index(c.n)] = 100 * c.accuracy
        ax.imshow(values, origin="lower", cmap="viridis", vmin=0, vmax=100, aspect="auto")
        for (y, x), v in np.ndenumerate(values):
            if not np.isnan(v):
                ax.text(x, y, f"{v:.0f}", ha="center", va="center", fontsize=8, color="white" if v < 60 else "black")
        ax.set_xticks(range(len(ns)), [str(n) for n in ns])
        ax.set_yticks(range(len(ds)), [str(d) for d in ds])
        ax.set_xlabel("context, n")
        ax.set_title({"none": "no scaling", "window": "window control"}.get(name, name), fontsize=10, loc="left")
        for mark, line in ((ns, ax.axvline), (ds, ax.axhline)):
            if any(m > reach for m in mark):
                line(sum(m <= reach for m in mark) - 0.5, color="#D55E00", linewidth=1.5)
    axes[0, 0].set_ylabel("distance of the answer, tokens")
    by_chance = f", chance {100 * chance:.0f} %" if chance else ""
    title = f"{title}\naccuracy in %{by_chance}; orange: the trained context, {reach}"
    fig.suptitle(title, fontsize=10, x=0.01, ha="left")
    fig.tight_layout()
    pictures.save(fig, path)


if __name__ == "__main__":
    entry(main)
