"""SelfExtend, Dual Chunk Attention, STRING, LaMPE: the relative positions of every pair, written out by loops.

tests/test_upstream.py compares them with outputs of the authors' code.
"""

import pytest
import torch

from model import masks
from model.scaling import ContextChange, TrainedContext, resolve
from model.scaling.dual_chunk import Chunks
from model.scaling.lampe import Grained
from model.scaling.self_extend import Grouped
from model.scaling.string import Shifted
from tests.helpers import attention_output, dense, model_of, random_tokens, rotated_scores, yaml_values

T = 24


def self_extend(w: int, group: int) -> torch.Tensor:
    """In the order of LongLM's code: group positions everywhere, replaced by the plain ones for neighbours.

    w // group is rounded down as in its Llama_4_40.py; its Llama.py does not round it.
    """
    relative = torch.zeros(T, T, dtype=torch.float64)
    for m in range(T):
        for n in range(m + 1):
            relative[m, n] = m // group + (w - w // group) - n // group
        for n in range(max(0, m - w + 1), m + 1):  # the neighbours: the query and w - 1 before it
            relative[m, n] = m - n
    return relative


def dual_chunk(s: int, c: int) -> torch.Tensor:
    """In the order of ChunkLlama's forward, without its factor on cos and sin: one chunk of queries after another, with
    tables for the keys before, and those before.
    """
    k = [n % s for n in range(T)]
    q = list(range(s))
    q_next = [min(i + s, c) for i in range(s)]
    relative = torch.zeros(T, T, dtype=torch.float64)
    for begin in range(0, T, s):
        for m in range(begin, min(begin + s, T)):
            for n in range(begin, m + 1):
                relative[m, n] = q[m - begin] - k[n]
            for n in range(max(0, begin - s), begin):
                relative[m, n] = q_next[m - begin] - k[n]
            for n in range(max(0, begin - s)):
                relative[m, n] = q_next[s - 1] - k[n]
    return relative


def string(S: int, W: int) -> torch.Tensor:
    """In the order of STRING's decoding: the S nearest keys, then those before, for which the query is at m - S + W."""
    relative = torch.zeros(T, T, dtype=torch.float64)
    for m in range(T):
        for n in range(max(0, m + 1 - S), m + 1):
            relative[m, n] = m - n
        for n in range(m + 1 - S):
            relative[m, n] = (m - S + W) - n
    return relative


def lampe(s1: int, s2: int, M: int) -> torch.Tensor:
    """The paper's three cases, without rounding, for the distance i - j in a text of l = T tokens."""
    relative = torch.zeros(T, T, dtype=torch.float64)
    for i in range(T):
        for j in range(i + 1):
            if i - j <= s1:
                relative[i, j] = i - j
            elif i - j < T - s2:
                relative[i, j] = (M - s1 - s2) / (T - s1 - s2) * (i - j - s1) + s1
            else:
                relative[i, j] = M - T + (i - j)
    return relative


CASES = [
    *((Grouped(w, g), self_extend(w, g)) for w, g in ((6, 3), (6, 4), (5, 1), (1, 2), (30, 3))),
    *((Chunks(s, c), dual_chunk(s, c)) for s, c in ((5, 7), (8, 8), (6, 30), (1, 1), (24, 24))),
    *((Shifted(S, W), string(S, W)) for S, W in ((8, 3), (12, 0), (5, 5), (1, 0), (24, 9))),
    *((Grained(s1, s2, T, M), lampe(s1, s2, M)) for s1, s2, M in ((4, 3, 12), (1, 0, 2), (6, 7, 14), (10, 1, 20))),
]


@pytest.mark.parametrize("block", [7, 512])
@pytest.mark.parametrize("position_map, relative", CASES, ids=lambda x: "" if isinstance(x, torch.Tensor) else str(x))
def test_every_pair_has_the_published_relative_position(position_map, relative, block, monkeypatch):
    monkeypatch.setattr(masks, "QUERY_BLOCK", block)
    model, tokens = model_of("rope"), random_tokens(1, T)
    got = attention_output(model, tokens, ContextChange(position_map=position_map))
    distance = (torch.arange(T)[:, None] - torch.arange(T)).double()
    want, plain = (dense(model, tokens, rotated_scores(model.pos.inv_freq, r)) for r in (relative, distance))
    assert (got - want).abs().max() < 1e-5
    # Equal to plain RoPE exactly up to the length that the map says
    n = min(position_map.near, T)
    assert (got - plain)[:n].abs().max() < 1e-5
    changed = (relative - distance).tril().abs().sum() > 0
    assert ((got - plain).abs().max() > 1e-2) == changed


@pytest.mark.parametrize("n", [65, 100, 128, 512, 5000])
def test_the_default_knobs_keep_all_distances_within_the_trained_context(n):
    """group=auto is the fewest tokens that do; the largest distance is that of the last query and the first key."""
    trained = TrainedContext("rope", 64, torch.ones(4, dtype=torch.float64))
    for name in ("self_extend", "dual_chunk"):
        position_map = resolve(yaml_values("scaling", name), trained, n, n).position_map
        positions = torch.arange(n)
        largest = max(int((r.q(positions).max() - r.k(positions).min()).item()) for r in position_map.regions())
        assert largest < 64
        if name == "self_extend":
            w, fewer = 32, position_map.group - 1
            assert fewer == 0 or (n - 1) // fewer + w - w // fewer >= 64
        else:
            assert position_map == Chunks(40, 48)  # L / 8 tokens less than 3 L / 4
        assert resolve(yaml_values("scaling", name), trained, 64, n).position_map is None
        assert resolve({**yaml_values("scaling", name), "always": True}, trained, 64, n).position_map is not None


def test_lampe_maps_as_many_distances_as_the_authors_for_llama_3_and_never_more_than_trained():
    def mapped(L: int, n: int, **more: object) -> int:
        run = TrainedContext("rope", L, torch.ones(4, dtype=torch.float64))
        return resolve({**yaml_values("scaling", "lampe"), **more}, run, n, n).position_map.mapped

    # In their scripts, by their fit to Llama 3 8B; its upper limit is 6204, and 3/4 L = 6144
    assert mapped(8192, 32 * 1024) == pytest.approx(4501, rel=0.015)
    assert all(mapped(64, n) <= 48 for n in (65, 128, 10**6)) and mapped(64, 65) == 8 and mapped(64, 65, size=60) == 62
