"""Intervals and tests over seeds and documents: against independent computations, and their coverage in simulations."""

import functools
import itertools
import math

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from measure import intervals as mixed_effects
from measure.intervals import Estimate, estimate
from studies import gain_parts
from studies.rows import RESULTS, difference, read_rows

RNG = np.random.default_rng(0)


def crossed(seed: float, document: float, interaction: float, shape: tuple[int, ...], rng=RNG) -> np.ndarray:
    """Draws of mean 0 from the model, [..., S, D], from the variances of its effects."""
    *draws, S, D = shape
    effects = ((seed, (*draws, S, 1)), (document, (*draws, 1, D)), (interaction, (*draws, S, D)))
    return sum(math.sqrt(variance) * rng.standard_normal(size) for variance, size in effects)


# ---- the analysis of variance ----


def test_variance_components_maximise_the_restricted_likelihood():
    """In a balanced design, REML and the analysis of variance agree where no component is 0."""
    delta = crossed(1.0, 2.0, 0.5, (4, 12), np.random.default_rng(1))
    S, D = delta.shape
    one_seed = np.kron(np.eye(S), np.ones((D, D)))  # 1 where two cells have the same seed [S D, S D]
    one_document = np.kron(np.ones((S, S)), np.eye(D))
    ones = np.ones((S * D, 1))

    def minus_log_likelihood(log_variances: np.ndarray) -> float:
        seed, document, interaction = np.exp(log_variances)
        V = seed * one_seed + document * one_document + interaction * np.eye(S * D)
        inverse = np.linalg.inv(V)
        information = ones.T @ inverse @ ones
        rest = delta.reshape(-1, 1) - np.linalg.solve(information, ones.T @ inverse @ delta.reshape(-1, 1))
        logdets = np.linalg.slogdet(V)[1] + np.linalg.slogdet(information)[1]
        return float(logdets + (rest.T @ inverse @ rest).item()) / 2

    best = optimize.minimize(minus_log_likelihood, np.zeros(3), method="Nelder-Mead", options={"xatol": 1e-6})
    assert mixed_effects.variance_components(delta) == pytest.approx(np.exp(best.x), rel=1e-3)


def test_variance_of_the_mean_is_unbiased():
    seed, document, interaction, S, D = 0.5, 2.0, 1.0, 3, 32
    delta = crossed(seed, document, interaction, (20_000, S, D), np.random.default_rng(2))
    want = seed / S + document / D + interaction / (S * D)
    assert delta.mean(axis=(1, 2)).var() == pytest.approx(want, rel=0.03)
    assert mixed_effects.variance_of_mean(delta)[0].mean() == pytest.approx(want, rel=0.02)


def test_pure_cases_are_the_t_interval_of_the_means():
    """Only seeds differ: the t interval of the seeds' means. Only documents differ: that of the documents' means."""
    values = np.array([1.0, 2.0, 4.0])
    for delta in (np.tile(values[:, None], (1, 9)), np.tile(values, (9, 1))):
        low, high = estimate(delta).interval
        assert (low + high) / 2 == pytest.approx(7 / 3)
        assert (high - low) / 2 == pytest.approx(4.302653 * values.std(ddof=1) / math.sqrt(3), rel=1e-6)  # t of 2 df


def test_two_groups_have_the_intervals_of_welch_and_of_pairs():
    """Only seeds differ: Welch's t interval of the seeds. Only documents differ: the paired one of the documents."""
    of_seeds = [np.tile(RNG.normal(0, sd, (S, 1)), (1, 9)) for S, sd in ((4, 1), (6, 3))]
    welch = stats.ttest_ind(*(x[:, 0] for x in of_seeds), equal_var=False).confidence_interval()
    assert estimate(*of_seeds).interval == pytest.approx(welch)
    of_documents = [np.tile(RNG.normal(0, sd, (1, 9)), (S, 1)) for S, sd in ((4, 1), (6, 3))]
    paired = stats.ttest_rel(*(x[0] for x in of_documents)).confidence_interval()
    assert estimate(*of_documents).interval == pytest.approx(paired)


def test_growth_is_the_slope_of_the_least_squares_line():
    sizes, gains = (0.7, 3.7, 11), [RNG.normal(k, 1, (4, 9)) for k in (0, 2, 3)]
    want = np.polyfit(np.log10(sizes), [of_size.mean() for of_size in gains], 1)[0]
    assert gain_parts.growth(sizes, gains).mean == pytest.approx(want)


def test_equal_differences_are_exact():
    result = estimate(np.zeros((3, 8)))
    assert result.interval == (0, 0) and result.p_above(-0.1) == 0 and result.p_above(0) == 1
    assert Estimate(0.5).p_above(0) == 0 and Estimate(0.5).p_below(0) == 1


# ---- tests ----


def test_p_value_is_the_tail_of_the_t_distribution():
    result = Estimate(mean=1.0, variance=0.25, df=3.0, seeds=3, documents=32)

    def density(x: float) -> float:  # of Student's t, with 3 degrees of freedom
        return 2 / (math.pi * math.sqrt(3)) / (1 + x * x / 3) ** 2

    tail = integrate.quad(density, (1.0 - 0.2) / 0.5, np.inf)[0]
    assert result.p_above(0.2) == pytest.approx(tail)
    assert result.p_below(0.2) == pytest.approx(1 - tail)


def test_q_values_by_hand():
    assert mixed_effects.q_values([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.04 * 4 / 3, 0.04 * 4 / 3, 0.5])
    assert mixed_effects.q_values([]) == []


# ---- seeds needed ----


def test_seeds_needed_is_the_first_number_that_decides():
    """Against the interval of a matrix that has exactly these components."""
    components, mean, D = (0.04, 0.1, 0.02), 0.3, 32
    result = Estimate(mean, 1.0, 2.0, 3, D, components)
    needed = result.seeds_needed(0)
    assert needed is not None and needed > 2

    def excludes_0(S: int) -> bool:
        of_seeds, of_documents = components[0] / S + components[2] / (S * D), components[1] / D
        variance = of_seeds + of_documents
        df = 1 / (of_seeds / variance / (S - 1) + of_documents / variance / (D - 1))
        return Estimate(mean, variance, df).interval[0] > 0

    assert excludes_0(needed) and not excludes_0(needed - 1)
    assert result.seeds_needed(0, alpha=0.01) > needed
    assert result.seeds_needed(2 * mean) == needed  # as far from the mean, on the other side


def test_no_number_of_seeds_is_enough_where_documents_differ():
    assert Estimate(0.1, 1.0, 2.0, 3, 32, (0.1, 4.0, 0.1)).seeds_needed(0) is None
    assert estimate(RNG.standard_normal((1, 8))).seeds_needed(0) is None


# ---- coverage: the share of simulated studies whose 95 % interval contains the true mean ----

# Differences of the committed rows (run, label, n), from those in which only documents differ to those in which almost
# only seeds do
ROWS = {
    "gain of yarn at 2 L": (("rope", "window", 512), ("rope", "yarn", 512)),
    "gain of rerope + logn at 8 L": (("rope", "window", 2048), ("rope", "rerope + logn", 2048)),
    "gain of ntk at 2 L": (("rope", "window", 512), ("rope", "ntk", 512)),
    "rope at 2 L - at L": (("rope", "none", 512), ("rope", "none", 256)),
    "ntk - yarn at 4 L": (("rope", "ntk", 1024), ("rope", "yarn", 1024)),
    "pi - none at 4 L": (("rope", "pi", 1024), ("rope", "none", 1024)),
    "rerope - rerope + logn at 8 L": (("rope", "rerope", 2048), ("rope", "rerope + logn", 2048)),
}


@functools.cache
def components_of_rows() -> dict[str, tuple[float, float, float]]:
    """The variance components of ROWS."""
    rows = read_rows(RESULTS / "rope.jsonl")
    deltas = {name: difference(rows.find(*a), rows.find(*b)) for name, (a, b) in ROWS.items()}
    return {name: mixed_effects.variance_components(delta) for name, delta in deltas.items()}


def coverage(components: tuple[float, float, float], S: int, D: int = 32, draws: int = 4000) -> float:
    delta = crossed(*components, (draws, S, D), np.random.default_rng(3))
    variance, df = mixed_effects.variance_of_mean(delta)
    return float((abs(delta.mean(axis=(1, 2))) <= mixed_effects.half_width(variance, df)).mean())


@pytest.mark.parametrize("name", ROWS)
def test_coverage_with_three_seeds_for_the_components_of_our_rows(name):
    assert coverage(components_of_rows()[name], S=3) >= 0.93


def test_coverage_for_every_share_of_the_components():
    """At least 93 %, as the docstring of variance_of_mean states."""
    shares = [(s, i) for s, i in itertools.product((0, 0.2, 0.5, 0.7, 0.9, 1), (0, 0.05, 0.3)) if s + i <= 1]
    for S, lowest in ((2, 0.93), (3, 0.93), (5, 0.935)):
        found = [coverage((s * S, (1 - s - i) * 32, i * S * 32), S, draws=3000) for s, i in shares]
        assert min(found) >= lowest, (S, dict(zip(shares, found, strict=True)))


@pytest.mark.parametrize("S, T", [(4, 4), (4, 8), (6, 6)])
def test_coverage_of_the_difference_between_two_groups(S, T):
    """At least 93 %. The variances of the second group's seeds are `ratio` times those of the first."""
    rng, D, draws = np.random.default_rng(4), 32, 2000
    for s, i, ratio in itertools.product((0, 0.5, 0.9), (0, 0.1), (0, 0.1, 1)):
        a = crossed(s * S, max(0, 1 - s - i) * D, i * S * D, (draws, S, D), rng)
        b = crossed(ratio * s * T, 0, ratio * i * T * D, (draws, T, D), rng)
        easy = 10 * rng.standard_normal((draws, 1, D))  # which both groups share
        variance, df = mixed_effects.variance_of_mean(a + easy, b + easy)
        error = abs(a.mean(axis=(1, 2)) - b.mean(axis=(1, 2)))
        assert (error <= mixed_effects.half_width(variance, df) + 1e-12).mean() >= 0.93, (s, i, ratio)


@pytest.mark.parametrize("group", ["none", "< 2048"])
def test_coverage_of_the_gain_of_a_group(group):
    """Of yarn's at 8 L, resampled from the rows; in the second one a few documents have most of the variance."""
    sums, counts = gain_parts.gains_of_groups(read_rows(RESULTS / "rope.jsonl"), "rope", "yarn", 2048)[group]
    ratio, rng, (S, D) = sums.sum() / counts.sum(), np.random.default_rng(5), sums.shape
    draws = [np.ix_(rng.integers(S, size=S), rng.integers(D, size=D)) for _ in range(3000)]
    intervals = [mixed_effects.ratio_interval(sums[draw], counts[draw]) for draw in draws]
    assert np.mean([low <= ratio <= high for _, low, high in intervals]) >= 0.93
