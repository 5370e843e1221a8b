"""Log-n attention (Su, kexue.fm/archives/8823; Chiang and Cholak 2022, arXiv 2202.12172).

A query at position m is multiplied by max(1, ln(m + 1) / ln L), so that attention over m + 1 keys is as concentrated as
it was over L keys. It works with any encoding, and together with methods that change frequencies: scaling=ntk
plus=logn.
"""

from model.scaling import ContextChange, NotApplicable, TrainedContext


def scale(trained: TrainedContext, n: int) -> ContextChange:
    if trained.train_ctx < 2:
        raise NotApplicable("ln L needs a trained context of at least 2")
    return ContextChange(logn=trained.longest_trained_ctx)
