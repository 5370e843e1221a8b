"""Thresholds of scaling methods, in rotations within the trained context: a warning where one splits off few pairs."""

from model.scaling import TrainedContext
from model.spectrum import rotations

# Threshold -> pairs above its default within L: Llama 2 (L 4096, base 10000), Llama 3 (L 8192, base 500000)
PUBLISHED = {"beta_fast": ("Llama 2", 21), "beta": ("Llama 2", 21), "high_freq_factor": ("Llama 3", 29)}


def warning(knobs: dict, trained: TrainedContext) -> str:
    """One line if a method's threshold, in rotations within L, has fewer than 1/10 or more than 9/10 of the pairs above
    it; else empty. Comparable is the threshold with the share of pairs above it that it has in the published model.
    """
    if trained.frequencies is None:
        return ""
    r, L = rotations(trained.inv_freq, trained.train_ctx), trained.train_ctx
    for key, (model, count) in PUBLISHED.items():
        if key in knobs and not len(r) <= 10 * (above := int((r > knobs[key]).sum())) <= 9 * len(r):
            return (
                f"warning: scaling.{key}={knobs[key]:g}: {above} of {len(r)} pairs rotate more often than that within "
                f"{L} tokens (in {model}: {count} of 64); comparable: scaling.{key}={r.quantile(1 - count / 64):.2g}"
            )
    return ""
