"""by_antecedent=true of eval.py: the gain by the distance of each target to its antecedent.

The antecedent of a target is the latest earlier place in the document where its last five tokens (four before it and
the target) occurred. A model that copies can predict such a target from the antecedent, if it can use context at that
distance. Targets without one gain little from any context.
"""

import numpy as np

from data.near_copies import ngram_hashes
from measure.evaluation import Evaluation
from measure.groups import Groups, matched_task

NGRAM = 5
EDGES = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # tokens


def antecedent_groups(evaluation: Evaluation) -> Groups:
    """The targets by the distance to their antecedent: none, < 64, < 256, ..., up to the longest length."""
    task = matched_task(evaluation, "by_antecedent=true")
    edges = [edge for edge in EDGES if edge < evaluation.ctx] + [evaluation.ctx]
    distances = np.array(
        [
            [repeats[end - task.scored_tokens : end] for end in ends[task.near]]
            for repeats, ends in zip((antecedents(d.tokens) for d in task.documents), task.ends, strict=True)
        ]
    )  # [documents, windows, scored]
    group = np.where(distances == 0, 0, 1 + np.searchsorted(edges, distances, side="right"))
    return Groups(
        "antecedent",
        "tokens back to the antecedent",
        ["none", *(f"< {edge}" for edge in edges), f">= {edges[-1]}"],
        group,
    )


def antecedents(tokens: np.ndarray, n: int = NGRAM) -> np.ndarray:
    """int64 [N]: tokens back to the latest earlier occurrence of the n-gram that ends here; 0 if there is none."""
    hashes = ngram_hashes(tokens, n)
    order = np.argsort(hashes, kind="stable")  # equal n-grams follow one another, in the order of their positions
    distances = np.zeros(len(tokens), dtype=np.int64)
    same = hashes[order][1:] == hashes[order][:-1]
    distances[order[1:][same] + n - 1] = np.diff(order)[same]
    return distances
