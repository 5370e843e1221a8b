"""Encodings that see content, and FIRE: against the papers' formulas, written out pair by pair in float64.

tests/test_upstream.py compares with outputs of other authors' code.
"""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine import checkpoint
from engine.device import store_in_bfloat16
from model import attention, gpt, masks
from model.attention import Cache, Heads, Where
from model.pos.fox import ForgetBias, wide_linear
from model.scaling import NO_CHANGE, ContextChange, TrainedContext, resolve
from tests import helpers
from tests.helpers import SMALL, attention_output, choices, encoding_of, model_of, random_tokens, train_settings

BASES = [None, 10000.0]
OTHERS = ["kerple", "fire", "pope"]  # besides REFERENCES


def model_with(pos: str, *overrides: str) -> gpt.GPT:
    """A float64 model in which no parameter of the encoding is at its initial value."""
    model = model_of(pos, *overrides)
    torch.manual_seed(3)
    for name, p in model.named_parameters():
        if gpt.of_encoding(name):
            torch.nn.init.uniform_(p, -1, 1)
    return model


# ---- compiled ----


@pytest.mark.slow
@pytest.mark.parametrize("pos", choices("pos"))
def test_compiled_gradients_are_as_close_to_float64_as_plain_ones(pos, monkeypatch):
    """Inductor returned NaN for a backward pass through T5's bias once (results/log.md, 2026-11-21)."""
    model, tokens = model_with(pos, "ctx=128", "batch_tokens=128").train(), random_tokens(2, 129)

    def gradients() -> tuple[torch.Tensor, ...]:
        loss = model.losses(tokens[:, :-1], tokens[:, 1:]).mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    exact = gradients()
    model.float()
    plain = gradients()
    helpers.compile_for(monkeypatch, model)
    for a, b, c in zip(exact, plain, gradients(), strict=True):
        assert (c - a).abs().max() <= 3 * (b - a).abs().max() + 1e-4 * a.abs().max()  # CoPE's gates are not continuous


# ---- the reference: one layer's attention, pair by pair ----


class Layer:
    """The first layer's queries, keys and values of one text, rotated by complex numbers if base is a number."""

    def __init__(self, model: gpt.GPT, tokens: torch.Tensor, base: float | None):
        self.parameters = dict(model.blocks[0].attention.named_parameters())
        self.x = model.blocks[0].norm1(model.tokens(tokens))[0]  # [T, C]
        layer, D = model.blocks[0].attention, 16
        qkv = layer.qkv(self.x).unflatten(-1, (-1, D))
        q, k, v = qkv.split((layer.H, layer.G, layer.G), dim=1)
        if base is not None:
            angle = torch.arange(len(q))[:, None, None] * base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
            q, k = (self.rotated(t, angle) for t in (q, k))
        repeats = layer.H // layer.G
        self.q, self.k, self.v = q, k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)

    @staticmethod
    def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), dim=-1)

    def score(self, h: int, i: int, j: int) -> torch.Tensor:
        return self.q[i, h] @ self.k[j, h] / 4

    def output(self, seen: Callable, weights: Callable) -> torch.Tensor:
        """[T, H * D]. seen(i): the keys of query i. weights(h, i, keys): the weight of each of them."""
        rows = []
        for i in range(len(self.q)):
            keys = seen(i)
            heads = [sum(w * self.v[j, h] for w, j in zip(weights(h, i, keys), keys, strict=True)) for h in range(4)]
            rows.append(torch.cat(heads))
        return torch.stack(rows)


def softmax(scores: list[torch.Tensor]) -> list[torch.Tensor]:
    powers = [s.exp() for s in scores]
    return [p / sum(powers) for p in powers]


def fox(layer: Layer) -> Callable:
    """log f summed token by token, arXiv 2503.02130, eq. 4 to 6."""
    w, b = layer.parameters["content.gate.weight"], layer.parameters["content.gate.bias"]

    def weights(h, i, keys):
        def forgotten(j):
            return sum((torch.sigmoid(w[h] @ layer.x[t] + b[h]).log() for t in range(j + 1, i + 1)), torch.tensor(0.0))

        return softmax([layer.score(h, i, j) + forgotten(j) for j in keys])

    return weights


def ssmax(layer: Layer) -> Callable:
    """n^(s z_j) / sum of them, arXiv 2501.19399, eq. 2."""
    s = layer.parameters["content.s"]

    def weights(h, i, keys):
        powers = [len(keys) ** (s[h] * layer.score(h, i, j)) for j in keys]
        return [p / sum(powers) for p in powers]

    return weights


def sink_logits(layer: Layer) -> Callable:
    """exp(sink) in the denominator only."""
    sink = layer.parameters["content.logit"]

    def weights(h, i, keys):
        powers = [layer.score(h, i, j).exp() for j in keys]
        return [p / (sum(powers) + sink[h].exp()) for p in powers]

    return weights


def cope(layer: Layer) -> Callable:
    """Arxiv 2405.18719, eq. 3 to 6; the gates of keys that the query does not see are not counted."""
    table = layer.parameters["content.table"]
    last = table.shape[1] - 1

    def weights(h, i, keys):
        scores = []
        for j in keys:
            p = sum(1 / (1 + (-layer.score(h, i, t)).exp()) for t in keys if t >= j).clamp(max=last)
            low = min(int(p), last - 1)
            embedding = table[:, low] * (low + 1 - p) + table[:, low + 1] * (p - low)
            scores.append(layer.score(h, i, j) + layer.q[i, h] @ embedding)
        return softmax(scores)

    return weights


def path(layer: Layer) -> Callable:
    """Arxiv 2505.16381, section 2: a key is multiplied by the Householder factors of later tokens, one by one."""
    down, up, b, c = (
        layer.parameters[f"content.{name}"] for name in ("down.weight", "up.weight", "beta.weight", "beta.bias")
    )
    w = (layer.x @ down.T @ up.T).unflatten(1, (4, 16))
    w, beta = w / w.norm(dim=-1, keepdim=True), 2 * torch.sigmoid(layer.x @ b.T + c)

    def weights(h, i, keys):
        def score(j):
            key = layer.k[j, h]
            for t in range(j + 1, i + 1):
                key = (torch.eye(16) - beta[t, h] * torch.outer(w[t, h], w[t, h])) @ key
            return layer.q[i, h] @ key / 4

        return softmax([score(j) for j in keys])

    return weights


REFERENCES = {"fox": fox, "ssmax": ssmax, "sink_logits": sink_logits, "cope": cope, "path": path}
KNOBS = {"cope": ["pos.positions=4"], "path": []}  # of those that do not rotate


@pytest.mark.parametrize("grad", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("change", [NO_CHANGE, ContextChange(window=5), ContextChange(window=3, always_visible=2)])
@pytest.mark.parametrize("pos, base", [(p, b) for p in REFERENCES for b in ([None] if p in KNOBS else BASES)])
def test_attention_is_the_papers_formula(pos, base, change, grad, monkeypatch):
    knobs = KNOBS.get(pos, [f"pos.base={'null' if base is None else base}"])
    model, tokens = model_with(pos, "model.n_kv_heads=2", *knobs), random_tokens(1, 10)
    monkeypatch.setattr("model.pos.path.CHUNK", 3)
    if not grad:
        monkeypatch.setattr(masks, "QUERY_BLOCK", 5)

    def seen(i: int) -> list[int]:
        return [j for j in range(i + 1) if change.window is None or i - j < change.window or j < change.always_visible]

    with torch.set_grad_enabled(grad):
        got = attention_output(model, tokens, change)
    with torch.no_grad():
        layer = Layer(model, tokens, base)
        want = layer.output(seen, REFERENCES[pos](layer))
    assert (got - want).abs().max() < (1e-6 if base is None else 1e-5)  # the tables of angles are float32


def in_chunks(i: int, j: int) -> tuple[int, int]:
    """Dual Chunk Attention with chunks of 3 and a largest position of 5."""
    own, chunk = i // 3 * 3, j // 3 * 3
    return (i, j) if chunk == own else (min(i - own + 3, 5) if chunk == own - 3 else 5, j - chunk)


def rope_score(model: gpt.GPT, h: int, q: torch.Tensor, k: torch.Tensor, m: float, n: float) -> torch.Tensor:
    return Layer.rotated(q, model.pos.inv_freq * (m - n)) @ k


def pope_score(model: gpt.GPT, h: int, q: torch.Tensor, k: torch.Tensor, m: float, n: float) -> torch.Tensor:
    """Arxiv 2509.10534: a frequency for each dimension, and a learned angle."""
    angle = (n - m) * 10000.0 ** (-torch.arange(16).double() / 16) + model.blocks[0].attention.content.delta[h]
    return (F.softplus(q) * F.softplus(k) * angle.cos()).sum()


def fope_score(model: gpt.GPT, h: int, q: torch.Tensor, k: torch.Tensor, m: float, n: float) -> torch.Tensor:
    """Arxiv 2412.17739: at L = 32 two pairs turn once; their cosines and sines are sums of the two."""

    def turned(x: torch.Tensor, position: float) -> torch.Tensor:
        angle = position * 10000.0 ** (-torch.arange(8).double() / 8) * (torch.arange(8) < 2)
        cos, sin = (angle.cos() @ model.pos.sums[0]).repeat(2), (angle.sin() @ model.pos.sums[1]).repeat(2)
        return x * cos + torch.cat((-x[8:], x[:8])) * sin

    return turned(q, m) @ turned(k, n)


SCORES = {"pope": pope_score, "fope": fope_score}
# Knobs -> as if at which positions queries i and keys j are rotated
MAPS = {
    "pi": ({"kind": "pi", "factor": 3.0}, lambda i, j: (i / 3, j / 3)),
    "rerope": (helpers.yaml_values("scaling", "rerope") | {"size": 5}, lambda i, j: (i, j) if i - j < 5 else (5, 0)),
    "dual_chunk": (helpers.yaml_values("scaling", "dual_chunk") | {"size": 5, "local": 2}, in_chunks),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("pos", ["fox", "ssmax", "sink_logits", *SCORES])
def test_frequencies_maps_of_positions_and_logn_apply_to_all_that_rotate(pos, name):
    """The reference is the same layer with other positions, and with a factor on its queries."""
    model, tokens = model_with(pos, "pos.base=10000"), random_tokens(1, 10)
    trained = TrainedContext(pos, 6, model.pos.inv_freq)
    knobs, place = MAPS[name]
    change = resolve(knobs, trained, 10, 10, [{"kind": "logn"}])
    with torch.no_grad():
        layer = Layer(model, tokens, None)

        def score(h: int, i: int, j: int) -> torch.Tensor:
            factor = max(1, math.log(i + 1) / math.log(6))
            return SCORES.get(pos, rope_score)(model, h, layer.q[i, h], layer.k[j, h], *place(i, j)) / 4 * factor

        layer.score = score
        plain = lambda layer: lambda h, i, keys: softmax([layer.score(h, i, j) for j in keys])  # noqa: E731
        want = layer.output(lambda i: range(i + 1), REFERENCES.get(pos, plain)(layer))
        assert (attention_output(model, tokens, change) - want).abs().max() < 1e-5
        assert (attention_output(model, tokens, NO_CHANGE) - want).abs().max() > 1e-3


# ---- against implementations of others ----


def test_ssmax_multiplies_queries_as_mistral_large_4():
    mistral = helpers.import_or_skip("transformers.models.mistral_large4.modeling_mistral_large4")
    theirs = mistral.MistralLarge4TextSoftmaxScaling(4).double()
    model = model_with("ssmax")
    scaling = model.blocks[0].attention.content
    theirs.load_state_dict({"scale": scaling.s, "bias": torch.zeros(4)})
    q, seen = torch.randn(1, 4, 10, 16, dtype=torch.float64), []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(attention, "attend", lambda heads, *rest: seen.append(heads.q))
        scaling(torch.zeros(1), Heads(q, q, q), Where(model.pos, torch.arange(10), None, NO_CHANGE))
        assert (seen[0] - theirs(q, torch.arange(10)[None], True)).abs().max() < 1e-6  # they take logs in float32


# ---- memory, precision, decoding, weights ----


@pytest.mark.parametrize("pos", [*(p for p in REFERENCES if p not in KNOBS), "pope"])
def test_no_mask_is_made_for_a_whole_text(pos, monkeypatch):
    """So the memory is linear in T, as that of the fused kernels."""
    model, tokens = model_with(pos), random_tokens()

    def fail(*args):
        raise AssertionError("a mask was made")

    monkeypatch.setattr(attention, "query_blocks", fail)
    with torch.no_grad():
        model(tokens)


@pytest.mark.parametrize("pos", ["path", "cope", "kerple"])
def test_training_keeps_no_mask_of_several_blocks(pos, monkeypatch):
    """And the gradients are those of one block, which is kept."""
    model, tokens, found = model_with(pos), random_tokens(), []
    for block in (masks.QUERY_BLOCK, 8):
        monkeypatch.setattr(masks, "QUERY_BLOCK", block)
        model.zero_grad()
        shapes: list[torch.Size] = []

        def keep(x: torch.Tensor, shapes: list = shapes) -> torch.Tensor:
            shapes.append(x.shape)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = model(tokens).logsumexp(-1).sum()
        loss.backward()
        found.append((shapes, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    T = tokens.shape[1]
    assert (T, T) in [shape[-2:] for shape in found[0][0]] and (8, T) not in [shape[-2:] for shape in found[1][0]]
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-9)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-3), (torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
def test_forget_gates_are_exact_over_thousands_of_tokens(dtype, tolerance):
    """c reaches -3000, where float32 has steps of 0.0002 and bfloat16 would have steps of 16."""
    T, generator = 1500, torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, T, 16, generator=generator).to(dtype).unbind()
    c = -(torch.rand(1, 4, T, generator=generator) * torch.tensor([4.0, 1.0, 0.1, 0.01])[:, None]).cumsum(-1)
    with torch.no_grad():
        got = attention.attend(Heads(q, k, v), ForgetBias(c), torch.arange(T), NO_CHANGE)
        bias = c.double()[..., None] - c.double()[..., None, :]
        scores = q.double() @ k.double().transpose(-1, -2) / 4 + bias
        want = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf).softmax(-1) @ v.double()
    assert (got.double() - want).abs().max() < tolerance


def test_gates_are_computed_in_float32_under_autocast():
    layer, x = torch.nn.Linear(64, 4), torch.randn(2, 5, 64)
    with torch.no_grad():
        want = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(wide_linear(x, layer), want) and not torch.equal(layer(x).float(), want)


@pytest.mark.parametrize("change", [NO_CHANGE, ContextChange(window=5, always_visible=1)])
@pytest.mark.parametrize("pos", [*REFERENCES, *OTHERS])
def test_several_new_tokens_at_once_continue_a_cache(pos, change):
    """One by one, with every scaling method: tests/test_sample.py."""
    model, x, cache = model_with(pos), random_tokens(2, 20), Cache()
    with torch.inference_mode():
        parts = [model.last_logits(part, part.shape[1], change, cache) for part in x.split([7, 1, 12], dim=1)]
        assert (torch.cat(parts, 1) - model(x, change=change)).abs().max() < 1e-5


# ---- in layer schedules ----

IN_SCHEDULES = [*REFERENCES, *OTHERS, "alibi", "t5_bias", "rope", "learned", "sinusoidal"]


@pytest.mark.parametrize("pos", IN_SCHEDULES)
def test_in_window_layers_an_encoding_is_that_of_the_uniform_model_with_a_window(pos):
    uniform = model_with(pos)
    of_windows = model_of(pos, "layers=window_only", "layers.L.window=7")
    weights = uniform.state_dict()
    of_windows.load_state_dict({a: weights[a.replace("pos.encodings.0.", "pos.")] for a in of_windows.state_dict()})
    tokens = random_tokens(2, 24)
    with torch.no_grad():
        want, free = uniform(tokens, change=ContextChange(window=7)), uniform(tokens)
        assert (of_windows(tokens) - want).abs().max() < 1e-9 < (free - want).abs().max()


@pytest.mark.parametrize("pos", ["kerple", "fire", "cope", "path", "t5_bias"])
def test_masks_are_made_for_a_block_of_queries_at_a_time(pos, monkeypatch):
    plain, sizes = attention.attend_masked, []

    def recorded(q, k, v, mask, *more):
        sizes.append(mask.shape[-2:])
        return plain(q, k, v, mask, *more)

    monkeypatch.setattr(attention, "attend_masked", recorded)
    monkeypatch.setattr(masks, "QUERY_BLOCK", 16)
    with torch.no_grad():
        model_with(pos)(random_tokens(1, 40))
    assert sizes == 2 * [(16, 16), (16, 32), (8, 40)]


# ---- parameters ----


@pytest.mark.parametrize("pos", [*REFERENCES, *OTHERS])
def test_all_parameters_learn_and_are_restored(pos):
    cfg = train_settings(f"pos={pos}", *SMALL)
    model = gpt.build(cfg, 50)
    model.losses(random_tokens(2, 33)[:, :-1], random_tokens(2, 33)[:, 1:]).mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    assert any(gpt.of_encoding(name) for name, _ in model.named_parameters())
    assert model.n_parameters() > gpt.build(train_settings("pos=none", *SMALL), 50).n_parameters()
    restored = gpt.from_weights(cfg, 50, model.state_dict())
    with torch.no_grad():
        assert torch.equal(restored(random_tokens()), model(random_tokens()))


def test_initial_values_are_those_of_the_papers():
    def content(pos: str, *overrides: str) -> torch.nn.Module:
        return gpt.build(train_settings(f"pos={pos}", *SMALL, *overrides), 50).blocks[1].attention.content

    gates = content("fox", "model.width=512", "model.n_heads=8").gate
    assert gates.bias.abs().max() == 0 and gates.weight.std().item() == pytest.approx(0.02, rel=0.1)
    s = content("ssmax", "ctx=1024", "batch_tokens=1024").s
    assert torch.allclose(s, torch.tensor(1024 / sum(math.log(n) for n in range(1, 1025))))  # 0.168
    assert content("ssmax", "ctx=1", "batch_tokens=1").s.isfinite().all()
    assert 0 < content("sink_logits", "model.width=512", "model.n_heads=32").logit.std() < 0.04
    assert content("cope").table.shape == (16, 64) and content("cope").table.abs().max() == 0
    kerple = encoding_of("kerple", "model.width=1024", "model.n_heads=256")
    p, a = kerple.log_p.exp(), kerple.log_a.exp()
    assert 0.0099 < p.min() < 0.1 and 1.8 < p.max() < 2 and 0.0099 < a.min() < 0.1 and 0.9 < a.max() < 1
    assert encoding_of("fire").threshold == 8 and encoding_of("fire").c.item() == pytest.approx(0.1)


# ---- FIRE ----


@pytest.mark.parametrize("context", [32, 400.0])
def test_fire_is_its_formula(context, monkeypatch):
    monkeypatch.setattr("model.pos.fire.PAIRS", 64 * 200)
    encoding = encoding_of("fire", f"pos.context={context}").double()
    torch.nn.init.uniform_(encoding.c, 0.2, 0.3)
    torch.nn.init.uniform_(encoding.multiplier, 1.1, 1.2)
    first, _, second = encoding.mlp
    q = torch.arange(200)  # more than are computed at a time
    bias = encoding.bias(q, q)
    assert bias.shape == (4, 200, 200)
    L, c = encoding.multiplier.item() * context / 4, encoding.c.item()
    for i, j in ((0, 0), (5, 2), (63, 1), (64, 0), (150, 149), (199, 0)):
        share = math.log(1 + c * (i - j)) / math.log(1 + c * max(i, L))
        hidden = [max(0.0, w.item() * share + b.item()) for w, b in zip(first.weight, first.bias, strict=True)]
        for h in range(4):
            want = sum(w.item() * x for w, x in zip(second.weight[h], hidden, strict=True)) + second.bias[h].item()
            assert bias[h, i, j].item() == pytest.approx(want, abs=1e-5)


def test_a_longer_context_in_fine_tuning_leaves_the_threshold_of_fire_as_it_is(here):
    helpers.run_train("pos=fire", "steps=1", "name=a")
    helpers.run_train("init=a", "ctx=128", "steps=1", "name=b")
    assert checkpoint.load(Path("runs/b"))["cfg"].pos["context"] == 64


@pytest.mark.parametrize("pos", [*REFERENCES, *OTHERS])
def test_weights_in_bfloat16_leave_the_encoding_in_float32(pos):
    """As eval.py stores them: sums over thousands of gates and FIRE's MLP would otherwise be rounded, or fail."""
    model = model_of(pos).float().eval()
    want = {name: x.clone() for name, x in model.named_parameters()}
    store_in_bfloat16(model)
    encoding = [model.pos, *(block.attention.content for block in model.blocks)]
    own = {x for m in encoding if m is not None for x in m.parameters()}
    for name, x in model.named_parameters():
        low = x not in own and x.dim() == 2 and name != "tokens.weight"
        assert x.dtype == (torch.bfloat16 if low else torch.float32), name
        assert low or torch.equal(x, want[name])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model(torch.arange(20)[None]).isfinite().all()
