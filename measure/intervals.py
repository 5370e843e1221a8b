"""Intervals and tests: over the documents of one run, and over seeds and documents; how they are printed.

Inside one run: a t interval over documents, of paired differences where two curves are compared. (A bootstrap of
four documents covers 80 % instead of 95 %.)

Over seeds: crossed random effects, with Satterthwaite's t approximation. The input is a matrix of differences delta
[..., seeds, documents] in nats per token: loss a - loss b of each document with each seed. All seeds are evaluated on
the same documents, so seeds and documents are crossed, with one value in each cell. The model is
delta[s, d] = mean + seed[s] + document[d] + interaction[s, d] with independent random effects (Searle, Casella &
McCulloch 1992, Variance Components, chapter 4). Between two groups of runs, the input is a matrix of losses of each:
documents are the same, seeds are not. An interval over documents alone does not contain the differences
between trainings. A bootstrap over two or three seeds contains them, but too narrowly: it cannot leave the range of the
seeds.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

LEVEL = 0.95  # of all intervals
MOST_SEEDS = 1000  # `seeds_needed` looks no further


def interval_text(mean: float, low: float, high: float, form: str = "+.3f") -> str:
    """`+0.038 [+0.020, +0.056]`, as every interval is printed; of one document (NaN) the mean. form: of the numbers."""
    return f"{mean:{form}}" + ("" if math.isnan(low) else f" [{low:{form}}, {high:{form}}]")


# ---- over several seeds: the analysis of variance ----


def mean_squares(delta: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(seeds, documents, interaction): the mean squares of the two-way table, each [...]. delta: [..., S, D], S, D >= 2

    Their degrees of freedom are S - 1, D - 1 and (S - 1)(D - 1), their expectations D * var(seed) + var(interaction),
    S * var(document) + var(interaction), and var(interaction).
    """
    S, D = delta.shape[-2:]
    mean = delta.mean(axis=(-2, -1), keepdims=True)
    by_seed, by_document = delta.mean(axis=-1, keepdims=True), delta.mean(axis=-2, keepdims=True)
    rest = delta - by_seed - by_document + mean
    seeds = D * ((by_seed - mean) ** 2).sum(axis=(-2, -1)) / (S - 1)
    documents = S * ((by_document - mean) ** 2).sum(axis=(-2, -1)) / (D - 1)
    return seeds, documents, (rest**2).sum(axis=(-2, -1)) / ((S - 1) * (D - 1))


def variance_components(delta: np.ndarray) -> tuple[float, float, float]:
    """(seed, document, interaction): the variances of the effects, estimated from the mean squares; at least 0.

    delta: [S, D]. In (nats per token)^2; the interaction contains the noise of a single cell.
    """
    S, D = delta.shape
    seeds, documents, interaction = (float(ms) for ms in mean_squares(delta))
    return max(0.0, (seeds - interaction) / D), max(0.0, (documents - interaction) / S), interaction


def variance_of_mean(*groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(variance of the mean over seeds and documents [...], its degrees of freedom [...]). One group: [..., S, D]

    The variance is (MS_seeds + MS_documents - MS_interaction) / (S D). Two guards, because the difference of mean
    squares can be too small or negative, and because MS_seeds is an estimate with only S - 1 degrees of freedom:

    * A mean square below that of the interaction counts as equal to it, as if its component were 0. So the variance is
      never below that of one random effect alone.
    * Satterthwaite (1946) has 1 / df = w^2 / (S - 1) + (1 - w)^2 / (D - 1), w being the share of MS_seeds in the
      variance. With two or three seeds w is often too small by chance, and the interval then too narrow. We take the
      shares without the squares, 1 / df = w / (S - 1) + (1 - w) / (D - 1): never more degrees of freedom. With two
      seeds w is replaced by its root, which is larger.

    Simulated over all sets of variance components, the lowest coverage of the 95 % interval is 94 % with 3 seeds (with
    Satterthwaite's squares 92 %) and 93 % with 2 (87 %; without the root 91 %); tests/test_mixed_effects.py repeats
    this for the components of our rows. With one seed: the variance over documents, D - 1 degrees of freedom.

    With two groups [..., S, D] and [..., T, D] it is the variance of the difference of their means. They are evaluated
    on the same documents, but their seeds are independent trainings, also where their numbers agree. So documents count
    by their differences, and the seeds of both groups add up:

    variance = var(mean a - mean b of a document) / D + sum over both groups of (MS_seeds - MS_interaction) / (S D)

    The first term also has the interactions; the guards are the same. The seeds' part has the degrees of freedom of
    Welch (1947), which are combined with those of the documents as above. Simulated with 4 and 4, 4 and 8 or 6 and 6
    seeds and all sets of variance components, where those of one group are 0, 0.1 or 1 times those of the other, the
    lowest coverage is 93.5 %.
    """
    D, sizes = groups[0].shape[-1], [x.shape[-2] for x in groups]
    of_documents = groups[0].mean(axis=-2) - sum(x.mean(axis=-2) for x in groups[1:])
    documents = of_documents.var(axis=-1, ddof=1) / D
    if sizes == [1]:
        return documents, np.full(documents.shape, D - 1.0)
    squares = [[ms / (S * D) for ms in mean_squares(x)] for x, S in zip(groups, sizes, strict=True)]
    seeds, interaction = np.array([x[0] for x in squares]), np.array([x[2] for x in squares])
    of_interaction, of_seeds = interaction.sum(axis=0), seeds.sum(axis=0)
    total = np.maximum(seeds, interaction).sum(axis=0) + np.maximum(documents, of_interaction) - of_interaction
    welch = sum(x**2 / (S - 1) for x, S in zip(seeds, sizes, strict=True))
    df = np.where(of_seeds > 0, of_seeds**2, 1) / np.where(of_seeds > 0, welch, 1)
    return total, degrees_of_freedom(np.minimum(of_seeds, total) / np.where(total > 0, total, 1), df, D)


def degrees_of_freedom(share: np.ndarray | float, seeds: np.ndarray | float, D: int) -> np.ndarray:
    """Of the variance of the mean. share: of the seeds in it, 0 .. 1 [...]. seeds: degrees of freedom of that part"""
    w = np.where(np.asarray(seeds) == 1, np.sqrt(share), share)
    return 1 / (w / seeds + (1 - w) / (D - 1))


def half_width(variance: np.ndarray | float, df: np.ndarray | float, level: float = LEVEL) -> np.ndarray:
    """Half of a two-sided t interval."""
    return special.stdtrit(df, (1 + level) / 2) * np.sqrt(variance)


# ---- one difference ----


@dataclass(frozen=True)
class Estimate:
    """The mean of a matrix of differences, with what is needed for its interval and its tests."""

    mean: float  # nats per token
    variance: float = 0.0  # of the mean; 0: the value is exact
    df: float = np.inf
    seeds: int = 1
    documents: int = 1
    components: tuple[float, float, float] | None = None  # variances of seed, document, interaction; None: one seed
    groups: int = 1  # of seeds, so many in each

    def __str__(self) -> str:
        return interval_text(self.mean, *self.interval)

    @property
    def interval(self) -> tuple[float, float]:
        """(low, high) of the 95 % interval. With one seed it covers other documents, but not other seeds."""
        half = float(half_width(self.variance, self.df)) if self.variance else 0.0
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float:
        """The two-sided p value against a mean of 0: below 0.05 exactly if the interval excludes 0."""
        return min(1.0, 2 * min(self.p_above(0), self.p_below(0)))

    def p_above(self, margin: float) -> float:
        """The one-sided p value against "the mean is at most the margin": small if it is above."""
        if not self.variance:
            return float(self.mean <= margin)
        return float(special.stdtr(self.df, (margin - self.mean) / np.sqrt(self.variance)))

    def p_below(self, margin: float) -> float:
        """The one-sided p value against "the mean is at least the margin": small if it is below.

        With `p_above(-margin)` these are the two one-sided tests of equivalence (Schuirmann 1987).
        """
        return Estimate(-self.mean, self.variance, self.df).p_above(-margin)

    def seeds_needed(self, margin: float, alpha: float = 1 - LEVEL) -> int | None:
        """The smallest number of seeds with which the interval of level 1 - alpha is expected to exclude the margin.

        Expected: with the mean and the variance components of now. None: more seeds are not enough, because the
        variance over the documents remains, or the components are unknown (one seed).
        """
        if self.components is None:
            return None
        seed, document, interaction = self.components
        D = self.documents
        for S in range(2, MOST_SEEDS + 1):
            of_seeds = seed / S + interaction / (S * D)
            variance = of_seeds + document / D
            df = degrees_of_freedom(of_seeds / variance, self.groups * (S - 1), D) if variance else np.inf
            if half_width(variance, df, 1 - alpha) < abs(self.mean - margin):
                return S
        return None


def estimate(*groups: np.ndarray) -> Estimate:
    """The mean of differences [S, D] with its variance, or the difference between the means of two groups of runs.

    In nats per token, D >= 2. Of two groups [S, D] and [T, D] the components are the sums, and the seeds the fewer. Of
    more groups: the mean of the first less those of all others.
    """
    variance, df = (float(x) for x in variance_of_mean(*groups))
    mean = float(groups[0].mean() - sum(x.mean() for x in groups[1:]))
    (S, *_), D = sorted(map(len, groups)), groups[0].shape[1]
    if S == 1:
        return Estimate(mean, variance, df, S, D)
    parts = [variance_components(x) for x in groups]
    of_seeds = sum((seed + interaction / D) / len(x) for x, (seed, _, interaction) in zip(groups, parts, strict=True))
    seed, _, interaction = map(sum, zip(*parts, strict=True))
    return Estimate(mean, variance, df, S, D, (seed, D * max(0.0, variance - of_seeds), interaction), len(groups))


def mean_interval(values: np.ndarray, most_df: float = np.inf) -> tuple[float, float, float]:
    """(mean, low, high) of values [seeds, documents]: over documents for one seed, over both for several.

    most_df: degrees of freedom, at most. NaN for the interval over one document.
    """
    if values.shape[1] == 1:
        return float(values.mean()), np.nan, np.nan
    found = estimate(values)
    return found.mean, *replace(found, df=min(found.df, most_df)).interval


def ratio_interval(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float, float]:
    """(ratio, low, high) of sum(sums) / sum(counts), [documents] or [seeds, documents]: that of the linearised ratio.

    Its variance is that of the mean of (sum - ratio * count) / mean count (Cochran 1977, Sampling Techniques, 2.11).
    Often a few documents have most of this variance: it has no more degrees of freedom than their effective number,
    (sum d^2)^2 / sum d^4 over the documents' deviations d. Without this the intervals of some groups cover 90 %.
    """
    mean = sums.sum() / counts.sum()
    values = np.atleast_2d(mean + (sums - mean * counts) / counts.mean())
    square = (values.mean(axis=0) - mean) ** 2
    return mean_interval(values, square.sum() ** 2 / ((square**2).sum() or 1))


# ---- many differences ----


def q_values(p: list[float]) -> list[float]:
    """Benjamini & Hochberg (1995): the false discovery rate if all tests with a p value up to this one count.

    p: of all tests of one table.
    """
    from scipy import stats  # takes half a second

    return stats.false_discovery_control(p).tolist() if p else []
