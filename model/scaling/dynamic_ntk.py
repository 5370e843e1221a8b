"""Dynamic NTK, clean (emozilla 2023; YaRN, arXiv 2309.00071, section 3.3): NTK with s = max(1, n / L).

Its factor follows the length, so it has no knob. (Hugging Face's "dynamic" reads its factor f as
s = f * n / L - (f - 1), which is this one only at f = 1.)
"""

from model.scaling import ContextChange, TrainedContext, ntk

PREFIX_CONSISTENT = False  # a longer input changes what earlier positions see; a test holds it to that


def scale(trained: TrainedContext, n: int) -> ContextChange:
    return ntk.scale(trained, n, factor=max(n, trained.longest_trained_ctx) / trained.train_ctx)
