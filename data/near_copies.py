"""Near-copies: which tokens of the held-out documents repeat training text, as generated or copied source files do.

The loss of such tokens tells how well the model remembers its training text, so evaluation scores other tokens of the
document (measure/tasks/matched.py).
"""

import numpy as np

NGRAM = 8
CHUNK = 2**24  # tokens of the training stream that are compared at a time


def find_copies(train: np.ndarray, documents: list[np.ndarray]) -> list[np.ndarray]:
    """For each document bool [N]: whether the n-gram that ends here occurs in the training stream. Integer arrays [N].

    The first n - 1 tokens of a document complete no n-gram and count as not copied.
    """
    wanted = [ngram_hashes(tokens) for tokens in documents]
    known = np.sort(np.concatenate(wanted))
    found = np.zeros(len(known), dtype=bool)  # of equal n-grams, at the first one
    # Whether any n-gram of the documents has these upper bits. A search for each n-gram of the stream would be slow
    plausible = np.zeros(2**24, dtype=bool)
    plausible[upper_bits(known)] = True
    for start in range(0, len(train) if len(known) else 0, CHUNK):
        hashes = ngram_hashes(train[start : start + CHUNK + NGRAM - 1])
        hashes = hashes[plausible[upper_bits(hashes)]]
        at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        found[at[known[at] == hashes]] = True
    flags = [np.zeros(len(tokens), dtype=bool) for tokens in documents]
    for flag, hashes in zip(flags, wanted, strict=True):
        flag[NGRAM - 1 :] = found[np.searchsorted(known, hashes)]
    return flags


def upper_bits(hashes: np.ndarray) -> np.ndarray:
    """The upper 24 of 64 bits, int64 of the same shape."""
    return (hashes >> np.uint64(40)).astype(np.int64)


def ngram_hashes(tokens: np.ndarray, n: int = NGRAM) -> np.ndarray:
    """uint64 [N - n + 1]: a polynomial modulo 2^64. Equal n-grams have equal hashes, others nearly always not."""
    count = max(0, len(tokens) - n + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for i in range(n):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + tokens[i : i + count].astype(np.uint64) + np.uint64(1)
    return hashes
