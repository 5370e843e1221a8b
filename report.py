"""Statistics and tables of evaluated curves. A curve is a list of rows, one for each length, as eval.py writes them."""

import itertools
import math

import numpy as np
from torch import Tensor

# Below these, in nats per token, far context has little to give: twice the noise of our runs, and a copy hardly noticed
SMALL_GAIN, SMALL_COPY = 0.02, 0.1


def bootstrap(per_document: np.ndarray, n_tokens: int, draws: int = 4000) -> tuple[float, float]:
    """95 % interval of sum / n_tokens over resampled documents, from each document's sum [documents].

    The draws are the same at every call: the interval of a difference of curves is the paired one.
    """
    n = len(per_document)
    picks = np.random.default_rng(0).integers(n, size=(draws, n))
    low, high = np.percentile(per_document[picks].sum(axis=1) / n_tokens, [2.5, 97.5])
    return float(low), float(high)


def difference(a: dict, b: dict) -> tuple[float, float, float]:
    """(mean, low, high) of loss a - loss b in nats per token, for two rows on the same targets."""
    delta = np.array(a["nll"]) - np.array(b["nll"])
    return float(delta.sum() / a["tokens"]), *bootstrap(delta, a["tokens"])


def gain(row: dict, window: dict) -> tuple[float, float, float]:
    """(mean, low, high) in nats per token: what this row saves over the window control at the same n."""
    return difference(window, row)


def table(curves: dict[str, list[dict]], asked: str, L: int, reach: int) -> None:
    """The table and the headline numbers of the scaling that was asked for."""
    none, window, own = (curves[k] for k in ("none", "window", asked))
    shown = {"none": none, "window": window, asked: own}
    print(
        f"\n{'':13}"
        + "".join(f"{k[:16]:>17}" for k in shown)
        + f"{asked[:16] + ', 95 %':>23}{'gain over window, 95 %':>27}"
    )
    print(
        f"{'n':>7}{'n/L':>6}" + f"{'ppl  bits/byte':>17}" * len(shown) + f"{'factor':>8}{'ppl':>15}{'nats/token':>27}"
    )
    for i, row in enumerate(own):
        cells = "".join(f"{c[i]['ppl']:>10.2f}{c[i]['bits_per_byte']:>7.3f}" for c in shown.values())
        mean, low, high = gain(row, window[i])
        interval = f"{math.exp(row['low']):.1f} .. {math.exp(row['high']):.1f}"
        print(
            f"{row['n']:>7}{row['n'] / L:>6.3g}{cells}{row['factor']:>8.3g}{interval:>15}"
            f"{mean:>+9.3f} [{low:+.3f}, {high:+.3f}]"
        )
    last = own[-1]
    mean, low, high = gain(last, window[-1])
    if last["n"] > reach and asked != "window":
        verdict = "better than" if low > 0 else "worse than" if high < 0 else "no different from"
        print(
            f"\ngain over the window control at n={last['n']} ({last['n'] / L:g}x): {mean:+.3f} nats/token "
            f"[{low:+.3f}, {high:+.3f}]: {verdict} seeing only {window[-1]['window']} tokens at a time"
        )
    inside = [i for i, row in enumerate(own) if row["n"] <= L]
    if inside and asked not in ("none", "window"):
        i = inside[-1]
        tax, low, high = difference(own[i], none[i])
        price = f"{tax:+.3f} nats/token [{low:+.3f}, {high:+.3f}]" if tax else "0, nothing is changed there"
        print(f"tax inside the trained context (n={own[i]['n']}, factor {own[i]['factor']:g}): {price}")


def position_rows(nats: Tensor) -> list[dict]:
    """The mean loss at positions 0-63, 64-127, 128-255, ... of nats [documents, ctx], each with its interval."""
    edges = [0, *(64 * 2**k for k in range(nats.shape[1].bit_length()) if 64 * 2**k < nats.shape[1]), nats.shape[1]]
    rows = []
    for start, end in itertools.pairwise(edges):
        per_document = nats[:, start:end].sum(dim=1).numpy()
        n = len(per_document) * (end - start)
        low, high = bootstrap(per_document, n)
        rows.append({"from": start, "to": end - 1, "loss": float(per_document.sum() / n), "low": low, "high": high})
    return rows


def position_table(curves: dict[str, list[dict]], L: int) -> None:
    print("\nloss by position, nats/token: each bucket has tokens of its own, so hard and easy places in the documents "
          "show here, too;\nonly the difference between columns of one line is due to the method")  # fmt: skip
    print(f"{'positions':>13}" + "".join(f"{k[:16]:>17}" for k in curves))
    for rows in zip(*curves.values(), strict=True):
        place = f"{rows[0]['from']}-{rows[0]['to']}"
        past = "  past L" if rows[0]["from"] >= L else ""
        print(f"{place:>13}" + "".join(f"{row['loss']:>17.3f}" for row in rows) + past)


def headroom(none: list[dict], copied: Tensor, L: int) -> str:
    """Whether this run has anything to gain from far context at all. copied: of protocols.copied."""
    rows = {row["n"]: row for row in none}
    n = copied.numel()
    per_document = copied.sum(dim=1).numpy()
    copy, (copy_low, copy_high) = per_document.sum() / n, bootstrap(per_document, n)
    line = f"headroom: a passage repeated within L costs {copy:.2f} nats/token less [{copy_low:.2f}, {copy_high:.2f}]"
    if L not in rows or L // 2 not in rows:
        return line
    gain, low, high = difference(rows[L // 2], rows[L])
    line += f"; the farther half of L saves {gain:+.3f} [{low:+.3f}, {high:+.3f}]"
    if gain < SMALL_GAIN or low <= 0 or copy < SMALL_COPY:
        line += "\n  that is little: this run can show what breaks past L, not who uses the context there"
    return line
