"""Intervals inside one run: the bootstrap over documents, and the difference of two rows on the same targets.

Intervals over several seeds are in measure/mixed_effects.py.
"""

import numpy as np

from measure.curves import Row, per_document_difference


def bootstrap(per_document: np.ndarray, draws: int = 4000) -> tuple[float, float]:
    """(low, high): the 95 % bootstrap interval of the mean of these values, over resampled documents; NaN for one.

    per_document: [documents]. The draws are the same in every call. For the difference of two curves, pass the
    differences per document: the interval is then a paired one.
    """
    n = len(per_document)
    picks = np.random.default_rng(0).integers(n, size=(draws, n))
    low, high = np.percentile(per_document[picks].mean(axis=1), [2.5, 97.5]) if n > 1 else (np.nan, np.nan)
    return float(low), float(high)


def difference(a: Row, b: Row) -> tuple[float, float, float]:
    """(mean, low, high) of loss a - loss b in nats per token, on the windows that both rows have."""
    delta = per_document_difference(a, b)
    return float(delta.mean()), *bootstrap(delta)


def gain(row: Row, control: Row) -> tuple[float, float, float]:
    """(mean, low, high) of the control's loss minus this row's loss, nats per token. Positive if the method is better.

    control: of `measure.curves.controls`, at the same length.
    """
    return difference(control, row)
