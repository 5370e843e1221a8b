"""Outputs of other authors' code for small inputs (tests/upstream.json), computed by ours.

The file has the repository, commit and path of each case; remake it with `python -m tests.upstream CHECKOUTS`.
"""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention import Where
from model.scaling import NO_CHANGE, ContextChange, TrainedContext, resolve
from model.scaling.lampe import Grained
from tests.helpers import encoding_of, model_of, yaml_values
from tests.upstream import FILE, projection, wave

ROWS = json.loads(FILE.read_text())
TOLERANCE = 5e-6  # the file has six decimals, and angles are float32


def frozen(case: str) -> pytest.MarkDecorator:
    """The test runs for every row of this case: its inputs and outputs."""
    rows = [(row["inputs"], torch.tensor(row["outputs"], dtype=torch.float64)) for row in ROWS if row["case"] == case]
    return pytest.mark.parametrize("given, want", rows, ids=[str(row) for row in range(len(rows))])


class Layer:
    """An attention layer with the projections of the file, whose output is that of the heads, side by side."""

    def __init__(self, given: dict[str, Any], pos: str, *overrides: str, **content: Tensor):
        """content: the parameters of an encoding that sees content, as layer.content has them."""
        self.T, H, G, D = (given[key] for key in "THGD")
        sizes = (f"model.n_heads={H}", f"model.n_kv_heads={G}", f"model.width={H * D}")
        model = model_of(pos, *sizes, *overrides)
        self.x, weight = projection(self.T, H, G, D)
        self.pos, self.attention, self.shape = model.pos, model.blocks[0].get_submodule("attention"), (self.T, H, D)
        parameters = {f"content.{name}": value for name, value in content.items()}
        self.attention.load_state_dict({"qkv.weight": weight, "out.weight": torch.eye(H * D), **parameters})

    def scaled(self, knobs: dict[str, Any], L: int) -> ContextChange:
        """What a scaling method does to the whole text if the trained context is L."""
        assert self.pos.inv_freq is not None
        return resolve(knobs, TrainedContext("rope", L, self.pos.inv_freq), self.T, self.T)

    def output(self, change: ContextChange = NO_CHANGE) -> Tensor:
        """[T, H, D]"""
        positions = torch.arange(self.T)
        with torch.no_grad():
            prepared = self.pos.prepare(positions, change)
            return self.attention(self.x[None], Where(self.pos, positions, prepared, change)).view(self.shape)


def check(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() < TOLERANCE


# ---- encodings ----


@frozen("fox")
def test_fox_equals_flash_linear_attention(given: dict[str, Any], want: Tensor):
    H, D = given["H"], given["D"]
    gate = {"gate.weight": wave(3, H, H * D), "gate.bias": wave(4, H)}
    check(Layer(given, "fox", "pos.base=null", **gate).output(ContextChange(window=given["window"])), want)


@frozen("cope")
def test_cope_equals_x_transformers(given: dict[str, Any], want: Tensor):
    """Theirs is the listing of the paper's appendix B, and as there the gates are of scores divided by sqrt(D)."""
    table = wave(5, given["positions"], given["D"]).T
    check(Layer(given, "cope", f"pos.positions={given['positions']}", table=table).output(), want)


@frozen("pope")
def test_pope_equals_x_transformers(given: dict[str, Any], want: Tensor):
    """Theirs clamp their biases; ours are periodic."""
    delta = (8 * wave(10, given["H"], given["D"]) - 3).clamp(-2 * math.pi, 0)
    for turn in (0, 2 * math.pi):
        check(Layer(given, "pope", delta=delta + turn).output(), want)


@frozen("path")
def test_path_equals_flash_linear_attention(given: dict[str, Any], want: Tensor):
    """The query heads that share keys have the same w and beta, as theirs."""
    H, G, D, rank = (given[key] for key in ("H", "G", "D", "rank"))
    up, b, c = wave(12, G * D, rank), wave(13, G, H * D), wave(14, G)
    factors = {"down.weight": wave(11, rank, H * D), "up.weight": up.repeat(H, 1)}
    factors |= {"beta.weight": b.repeat(H, 1), "beta.bias": c.repeat(H)}
    check(Layer(given, "path", f"pos.rank={rank}", **factors).output(), want)


@frozen("resonance")
def test_resonance_equals_its_authors(given: dict[str, Any], want: Tensor):
    """The sines at position 1, of the angles 2 pi / wavelength. They have beta_fast=2."""
    sizes = ("model.n_heads=1", f"model.width={given['D']}", f"ctx={given['L']}", f"batch_tokens={given['L']}")
    encoding = encoding_of("rope_resonance", *sizes)
    trained = TrainedContext("rope_resonance", given["L"], encoding.inv_freq)
    yarn = resolve({"kind": "yarn", "factor": given["factor"], "beta_fast": 2.0}, trained, 256, 256)
    for change, wavelengths in zip((NO_CHANGE, yarn), want, strict=True):
        _, sin = encoding.prepare(torch.tensor([1]), change).q
        check(sin[0] / change.attention_factor, (2 * math.pi / wavelengths).sin())
    fast = encoding.inv_freq.new_tensor([20.0])  # no wavelength is rounded to 0
    assert encoding.frequencies(ContextChange(inv_freq=fast)).item() == 2 * math.pi


@frozen("fope")
def test_fope_equals_its_authors(given: dict[str, Any], want: Tensor):
    """Under PI, too. The pairs that stand still have a sine of 1 there, like their cosine."""
    L, n, T, H, D = (given[key] for key in ("L", "n", "T", "H", "D"))
    encoding = encoding_of("fope", f"model.n_heads={H}", f"model.width={H * D}", f"pos.context={L}")
    M, positions = len(encoding.inv_freq), torch.arange(n - T, n)
    encoding.sums = torch.eye(D // 2).repeat(2, 1, 1).double()
    encoding.sums[:, :M, :M] += 0.3 * wave(15, 2, M, M)
    tables = encoding.prepare(positions, ContextChange(inv_freq=encoding.inv_freq / given["factor"]))
    assert (tables.q[1, :, M:] == 0).all()
    tables.q[1, :, M:] = 1
    q = wave(1, 1, T, H, D)
    check(encoding.rotate(q, q, tables)[0][0], want)


def bias(pos: str, given: dict[str, Any], knobs: list[str], parameters: dict[str, Tensor]) -> Tensor:
    """[H, T, T], and 0 where the key is after the query."""
    encoding, positions = encoding_of(pos, "model.n_heads=2", *knobs).double(), torch.arange(given["T"])
    encoding.load_state_dict(parameters)
    with torch.no_grad():
        result = encoding.bias(positions, positions)
    assert result is not None
    return result.tril()


@frozen("kerple")
def test_kerple_equals_dape(given: dict[str, Any], want: Tensor):
    parameters = {f"log_{x}": torch.tensor(given[x], dtype=torch.float64).log() for x in "pa"}
    check(bias("kerple", given, [], parameters), want.tril())


@frozen("fire")
def test_fire_equals_dape(given: dict[str, Any], want: Tensor):
    hidden, H = given["hidden"], given["H"]
    mlp = {"0.weight": (hidden, 1), "0.bias": (hidden,), "2.weight": (H, hidden), "2.bias": (H,)}
    parameters = {f"mlp.{name}": wave(seed, *shape) for seed, (name, shape) in enumerate(mlp.items(), start=6)}
    parameters |= {key: torch.tensor([given[key]]) for key in ("c", "multiplier")}
    knobs = [f"pos.hidden={hidden}", f"pos.context={4 * given['threshold']}"]
    check(bias("fire", given, knobs, parameters), want.tril())


# ---- maps of positions ----


@frozen("self_extend")
def test_self_extend_equals_longlm(given: dict[str, Any], want: Tensor):
    """In the first row the group divides the window; for other groups their Llama.py has fractions of positions here.

    The second row is of their Llama_4_40.py, which rounds down as we do.
    """
    layer = Layer(given, "rope")
    knobs = yaml_values("scaling", "self_extend") | {"size": given["window"], "group": given["group"]}
    check(layer.output(layer.scaled(knobs, 16)), want)


@frozen("dual_chunk")
def test_dual_chunk_equals_chunkllama(given: dict[str, Any], want: Tensor):
    """The third row has their factor on cos and sin for a text longer than max_position_embeddings: we have none."""
    layer = Layer(given, "rope")
    change = layer.scaled(yaml_values("scaling", "dual_chunk") | {"local": given["local"]}, given["L"])
    assert change.attention_factor == 1
    factor = 1 + 0.05 * math.log(given["T"] / given["unscaled"])
    check(layer.output(ContextChange(position_map=change.position_map, attention_factor=factor)), want)


@frozen("string")
def test_string_equals_its_authors(given: dict[str, Any], want: Tensor):
    layer = Layer(given, "rope")
    knobs = yaml_values("scaling", "string") | {"size": given["size"], "local": given["local"]}
    check(layer.output(layer.scaled(knobs, given["T"])), want)


@frozen("lampe")
def test_lampe_is_its_authors_map_but_for_their_rounding(given: dict[str, Any], want: Tensor):
    """They round down the position of each token and of the offset, so a distance may differ by less than 2.

    Their `mapped` distances are those of the whole text, compressed; head and tail come in addition.
    """
    head, tail, n = (given[key] for key in ("head", "tail", "n"))
    M = head + tail + given["mapped"] / (n - 1) * (n - head - tail)
    for m, row in zip(given["queries"], want, strict=True):
        k = torch.arange(0, m + 1, given["step"])
        got = (m - k).double()
        for region in Grained(head, tail, n, round(M)).regions():
            far = region.start + (region.q(m) - region.start - region.k(k)) / region.slow
            got = torch.where(k < region.end(m), far, got)
        differ = got - row[: len(k)]
        assert differ.abs().max() < 2 and (differ[m - k < head] == 0).all()
