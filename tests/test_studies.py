"""The spectrum card and the decay study, against independent values."""

import math
import sys

import mpmath
import pytest
import torch

from conf.errors import UserError
from model import spectrum
from studies import decay, spectrum as spectrum_study
from tests.helpers import encoding_of


def test_rotations_by_hand():
    r = spectrum.rotations(spectrum.frequencies(64, 10000.0), 256)
    assert r[0].item() == pytest.approx(256 / (2 * math.pi)) and (r < 1).sum() == 19  # 13 of 32 complete one
    assert r[-1].item() == pytest.approx(256 / (2 * math.pi) * 10000 ** (-62 / 64))


@pytest.mark.parametrize("D, L, published", [(128, 1024, 4.3e3), (128, 4096, 2.7e4)])
def test_base_bound_is_the_published_one(D, L, published):
    """Men et al. 2024, table 2; Su, kexue.fm/archives/10122. Both give two digits."""
    assert spectrum_study.base_bound(D, L) == pytest.approx(published, rel=0.04)


def test_base_bound_is_where_the_sum_of_cosines_becomes_negative():
    """There it holds, below it does not; with cosines of 60 digits."""
    D, L = 16, 40
    bound = spectrum_study.base_bound(D, L)

    def lowest(base: float) -> float:
        with mpmath.workdps(60):
            speeds = [mpmath.power(base, -2 * i / D) for i in range(D // 2)]
            return float(min(sum(mpmath.cos(m * speed) for speed in speeds) for m in range(L)))

    assert lowest(bound) >= 0
    assert all(lowest(bound * (1 - x)) < 0 for x in (0.001, 0.01, 0.1, 0.3))


def test_spectrum_study_draws_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["spectrum", "--ctx", "128", "--rotary-dim", "32", "--out", str(tmp_path / "s")])
    spectrum_study.main()
    assert "yarn: warning: scaling.beta_fast=32" in capsys.readouterr().out
    assert {f.suffix for f in tmp_path.iterdir()} == {".png", ".svg", ".pdf"}
    monkeypatch.setattr(sys, "argv", ["spectrum", "--base", "nan"])
    with pytest.raises(UserError, match="--ctx must be at least 2"):
        spectrum_study.main()


@pytest.mark.parametrize("base", decay.BASES)
def test_decay_curves_are_sus_formula(base):
    """Against complex numbers of 40 digits at a few distances, and q . k from the rotation itself."""
    D, T = 64, 2048
    f = spectrum.frequencies(D, base)
    score, bound = (g(f, T) for g in (decay.score, decay.su_bound))
    with mpmath.workdps(40):
        for m in (0, 1, 17, 500, 2047):
            waves = [mpmath.expj(m * mpmath.power(base, mpmath.mpf(-2 * i) / D)) for i in range(D // 2)]
            want = sum(abs(sum(waves[: j + 1])) for j in range(D // 2)) * 2 / D
            assert bound[m].item() == pytest.approx(float(want), rel=1e-9)
            assert score[m].item() == pytest.approx(float(sum(2 * w.real for w in waves)) / D, abs=2e-6)


def test_at_base_1_the_score_does_not_decay():
    want = torch.arange(2048).double().cos()
    assert decay.score(spectrum.frequencies(64, 1.0), 2048) == pytest.approx(want, abs=2e-6)


@pytest.mark.parametrize("base, falls", [(10, False), (100, False), (10000, True)])
def test_at_small_bases_the_score_falls_no_further(base, falls):
    sizes = decay.score(spectrum.frequencies(64, base), 2048).unfold(0, 256, 256).square().mean(dim=1).sqrt()
    assert (sizes[-1] < 0.7 * sizes[1]).item() == falls and (sizes[-1] > 0.9 * sizes[1]).item() != falls


def test_a_larger_base_weakens_the_decay():
    means = [decay.score(spectrum.frequencies(64, base), 2048)[256:].mean() for base in (500.0, 5000.0, 50000.0)]
    assert means == sorted(means)


def test_sinusoidal_embeddings_have_the_products_of_all_ones_under_rope():
    encoding, t = encoding_of("sinusoidal"), torch.arange(300)
    with torch.no_grad():
        embedded = encoding.embed(torch.zeros(1, 300, 64, dtype=torch.float64), t)[0] / encoding.scale
    score = decay.score(spectrum.frequencies(64, 10000.0), 300)
    assert embedded @ embedded.T == pytest.approx(32 * score[(t - t[:, None]).abs()], abs=1e-4)
