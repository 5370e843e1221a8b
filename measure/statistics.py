"""Intervals: the bootstrap over documents, and the difference of two rows on the same targets."""

import numpy as np

from measure.curves import Row


def bootstrap(per_document: np.ndarray, n_tokens: int, draws: int = 4000) -> tuple[float, float]:
    """(low, high): the 95 % bootstrap interval of a mean per token, over resampled documents.

    per_document: the sum over the tokens of each document, [documents]. n_tokens: the tokens of all documents. The
    draws are the same in every call. For the difference of two curves, pass the differences per document: the interval
    is then a paired one.
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
    """(mean, low, high) of the window control's loss minus this row's loss, nats per token, at the same n.

    Positive if the method is better than the window control.
    """
    return difference(window, row)
