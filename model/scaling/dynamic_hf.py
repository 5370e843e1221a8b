"""Hugging Face's `dynamic`: NTK with s = f * n / L - (f - 1) past the trained context (and 1 inside it).

f is what Hugging Face calls `factor`, and it is not the extension factor: at n = 4 L, f = 4 gives s = 13, f = 2 gives
7, and only f = 1 gives 4, which is `dynamic_ntk`. It is a separate method, so that f in a config.json is not mistaken
for s. (In transformers it also keeps the frequencies of the longest input so far, transformers#25104; here it has no
state.)
"""

from conf.errors import check
from model.scaling import ContextChange, TrainedContext, ntk

PREFIX_CONSISTENT = False  # a longer input changes what earlier positions see; a test holds it to that


def scale(trained: TrainedContext, n: int, hf_factor: float = 2.0) -> ContextChange:
    check(hf_factor >= 1, "scaling.hf_factor", hf_factor, "at least 1")
    L = trained.train_ctx
    return ntk.scale(trained, n, factor=hf_factor * max(n, trained.longest_trained_ctx) / L - (hf_factor - 1))
