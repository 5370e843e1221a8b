"""Intervals: the bootstrap over documents, and the difference of two rows on the same targets."""

import numpy as np

from measure.curves import Row


def bootstrap(per_document: np.ndarray, n_tokens: int, draws: int = 4000) -> tuple[float, float]:
    """(low, high): 95 % interval of sum / n_tokens over resampled documents, from each document's sum [documents].

    The draws are the same at every call, so the interval of a difference of curves is the paired one.
    """
    n = len(per_document)
    picks = np.random.default_rng(0).integers(n, size=(draws, n))
    low, high = np.percentile(per_document[picks].sum(axis=1) / n_tokens, [2.5, 97.5])
    return float(low), float(high)


def difference(a: Row, b: Row) -> tuple[float, float, float]:
    """(mean, low, high) of loss a - loss b in nats per token, for two rows on the same targets."""
    delta = np.array(a.nll) - np.array(b.nll)
    return float(delta.sum() / a.tokens), *bootstrap(delta, a.tokens)


def gain(row: Row, window: Row) -> tuple[float, float, float]:
    """(mean, low, high) in nats per token: by how much this row's loss is below the window control's at the same n."""
    return difference(window, row)
