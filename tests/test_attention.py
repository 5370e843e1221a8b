"""Attention: each way to attend against formulas written out here, and the scaling methods that change scores."""

import itertools
import math

import pytest
import torch

from engine.optimizer import make_optimizers
from hf.weights import LLAMA as LLAMA_WEIGHTS, from_ours
from model import attention, masks
from model.attention import Cache, Heads, attend_blocks
from model.regions import Clipped
from model.scaling import NO_CHANGE, ContextChange, TrainedContext, resolve
from tests import helpers
from tests.helpers import attention_output, choices, dense, encoding_of, model_of, random_tokens, rotated_scores

# ---- every encoding, with and without a window ----


@pytest.mark.parametrize("pos", choices("pos"))
@pytest.mark.parametrize("window", [None, 1, 5, 24])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_blocked_and_written_out_attention_equal_the_plain_formula(pos, window, n_kv_heads, monkeypatch):
    """Both paths, against softmax(q k / sqrt(D) + bias) with a dense mask written here."""
    model = model_of(pos, f"model.n_kv_heads={n_kv_heads}")
    x, change = random_tokens(), ContextChange(window=window)
    written_out = model(x, change=change)
    with torch.no_grad():
        whole = model(x, change=change)
        monkeypatch.setattr(masks, "QUERY_BLOCK", 7)
        blocked = model(x, change=change)

    def plain(heads, pos, positions, change):
        q, k, v = heads.q, heads.k, heads.v
        T, window = q.shape[2], change.window
        distance = torch.arange(T)[:, None] - torch.arange(T)
        outside = (distance >= (window or T)) & (torch.arange(T) >= change.always_visible + heads.prepended)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        bias = pos.bias(positions, positions)
        scores = scores if bias is None else scores + bias
        return scores.masked_fill((distance < 0) | outside, -math.inf).softmax(-1) @ v

    monkeypatch.setattr(attention, "attend", plain)
    want = model(x, change=change)
    for got in (written_out, whole, blocked):
        assert (got - want).abs().max() < 1e-9


@pytest.mark.parametrize("pos", helpers.UNLIMITED)
def test_window_control_is_full_attention_inside_the_window(pos):
    model, x = model_of(pos), random_tokens(1, 24)
    with torch.no_grad():
        full = model(x)
        assert torch.equal(model(x, change=ContextChange(window=24)), full)
        assert (model(x, change=ContextChange(window=23)) - full).abs().max() > 1e-6


@pytest.mark.parametrize("pos", choices("pos"))
@pytest.mark.parametrize("change", [ContextChange(window=5), ContextChange(window=5, logn=8)])
def test_tokens_that_cannot_reach_the_scored_ones_through_windows_are_left_out(pos, change, monkeypatch):
    model, tokens = model_of(pos, *helpers.more_positions(pos, 40)), random_tokens(2, 40)
    n_layers, last = len(model.blocks), 3
    reach = last + n_layers * 4
    want = model(tokens, change=change)[:, -last:]
    processed = []
    monkeypatch.setattr(
        model.pos, "embed", lambda x, positions, f=model.pos.embed: processed.append(x) or f(x, positions)
    )
    with torch.no_grad():
        got = model.last_logits(tokens, last, change)
        assert processed[0].shape[1] == reach < 40 and (got - want).abs().max() < 1e-5  # xPos: float32
        # The oldest of them does reach the scored ones, and the token before it does not
        for index, reaches in ((40 - reach, True), (40 - reach - 1, False)):
            other = tokens.clone()
            other[:, index] = (other[:, index] + 1) % 7
            assert ((model(other, change=change)[:, -last:] - want).abs().max() > 1e-12) == reaches
        # Keys that every query sees reach from any distance
        processed.clear()
        model.last_logits(tokens, last, ContextChange(window=5, always_visible=1))
        assert processed[0].shape[1] == 40


def test_key_value_heads_are_shared_without_a_copy_in_inference_on_a_cpu(monkeypatch):
    model, seen = model_of("rope", "model.n_kv_heads=2"), []
    monkeypatch.setattr(
        attention, "attend_causal", lambda q, k, v, f=attention.attend_causal: seen.append(k) or f(q, k, v)
    )
    with torch.no_grad():
        model(random_tokens())
    assert all(k.shape[1] == 2 for k in seen)
    x = torch.randn(1, 3, 5, 4)
    assert attention.repeat_heads(x, 3) is x  # one key-value head for each query head: nothing to repeat


def test_the_memory_of_rerope_is_linear_in_the_length():
    """By the allocations of torch: the peak of a process would contain that of its imports."""

    def peak(T: int) -> int:
        q, k, v, q_far, k_far = torch.zeros(5, 1, 1, T, 8).unbind()
        heads, change = Heads(q, k, v, [(q_far, k_far)]), ContextChange(position_map=Clipped(64))
        with torch.inference_mode(), torch.profiler.profile(profile_memory=True) as profile:
            attend_blocks(heads, encoding_of("rope"), torch.arange(T), change)
        events = profile.profiler.kineto_results.events()
        return max(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]"))

    assert 1.8 < peak(16384) / peak(8192) < 2.2  # 4, if it were quadratic


# ---- the output gate ----


ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}
FAMILIES = {
    "Qwen3Next": ({"num_experts": 0, "rope_parameters": ROPE}, {"attention.gate": "self_attn.gate"}),
    "Lfm3": (
        {"use_sandwich_norm": False, "norm_eps": 1e-6, "rope_parameters": {"full_attention": ROPE}},
        {"norm1": "operator_norm", "norm2": "ffn_norm", "attention.gate": "self_attn.g_proj"}
        | {"mlp.up": ("feed_forward.w1", "feed_forward.w3"), "mlp.down": "feed_forward.w2"},
    ),
}


@pytest.mark.parametrize("gate, family", [("element", "Qwen3Next"), ("head", "Lfm3")])
def test_the_gate_equals_that_of_transformers(gate, family):
    """Models with full attention in all layers and no experts; Qwen3-Next's norms multiply by 1 + weight."""
    t, (settings, names) = helpers.import_or_skip("transformers"), FAMILIES[family]
    sizes = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 256, "tie_word_embeddings": False, "pad_token_id": None}
    config = getattr(t, f"{family}Config")(**sizes, layer_types=["full_attention"] * 2, **settings)
    given = ["model=qwen3", "model.head_dim=16", "model.tied_head=false", "model.mlp_width=256", "pos.base=100"]
    model = model_of("rope", *given, f"model.attention_gate={gate}")
    table = LLAMA_WEIGHTS._replace(layer=LLAMA_WEIGHTS.layer | names)
    state = from_ours(table, helpers.train_settings(*helpers.SMALL, *given).model, model.state_dict())
    if family == "Lfm3":
        state["model.embedding_norm.weight"] = state.pop("model.norm.weight")
    else:
        for name in [name for name in state if name.endswith("q_proj.weight")]:  # q and gate of a head together
            q, of_elements = (x.unflatten(0, (4, 16)) for x in (state[name], state.pop(name.replace("q_proj", "gate"))))
            state[name] = torch.cat((q, of_elements), dim=1).flatten(0, 1)
        state = {name: x - 1 if "norm" in name else x for name, x in state.items()}
    theirs = getattr(t, f"{family}ForCausalLM")(config).double().eval()
    theirs.load_state_dict(state)
    with torch.inference_mode():
        want = theirs(random_tokens()).logits
        assert (model(random_tokens()) - want).abs().max() < 1e-5 and want.abs().max() > 1


@pytest.mark.parametrize("pos", ["rope", "fox", "cope"])
def test_a_gate_of_a_head_is_that_of_its_elements(pos):
    """Also with a cache, beside an encoding that sees content, in layers with windows. Muon trains it."""
    head, element = (model_of(pos, "layers=olmo3", f"model.attention_gate={gate}") for gate in ("head", "element"))
    gates = {name: x for name, x in head.state_dict().items() if ".attention.gate." in name}
    element.load_state_dict(head.state_dict() | {name: x.repeat_interleave(16, 0) for name, x in gates.items()})
    tokens, cache = random_tokens(), Cache()
    with torch.inference_mode():
        parts = [head.last_logits(part, part.shape[1], NO_CHANGE, cache) for part in tokens.split([13, 1, 10], dim=1)]
        assert (torch.cat(parts, 1) - element(tokens)).abs().max() < 1e-6
    _, muon = make_optimizers(head, helpers.train_settings().optim)
    assert {gate.data_ptr() for gate in gates.values()} <= {p.data_ptr() for p in muon.param_groups[0]["params"]}


# ---- scaling methods that change scores ----


@pytest.mark.parametrize("block", [7, 512])
@pytest.mark.parametrize("leak", [None, 4.0, "auto"])
def test_rerope_clips_relative_positions(leak, block, monkeypatch):
    monkeypatch.setattr(masks, "QUERY_BLOCK", block)
    model, x = model_of("rope"), random_tokens(1, 24)
    trained = TrainedContext("rope", 12, model.pos.inv_freq)
    change = resolve({"kind": "rerope", "size": 6, "leak": leak, "always": False}, trained, 24, 24)
    slope = {None: 0.0, 4.0: 1 / 4, "auto": (12 - 6) / (24 - 6)}[leak]
    r = (torch.arange(24)[:, None] - torch.arange(24)).double()
    clipped = torch.where(r < 6, r, 6 + (r - 6) * slope)
    want = dense(model, x, rotated_scores(model.pos.inv_freq, clipped))
    assert (attention_output(model, x, change) - want).abs().max() < 1e-5
    if leak == "auto":
        assert clipped.max() < 12  # inside what was trained
    unclipped = dense(model, x, rotated_scores(model.pos.inv_freq, r))
    assert (want - unclipped).abs().max() > 1e-2


@pytest.mark.parametrize("block", [7, 512])
def test_window_with_sinks_keeps_the_first_keys_at_distance_L(block, monkeypatch):
    monkeypatch.setattr(masks, "QUERY_BLOCK", block)
    model, x = model_of("rope"), random_tokens(1, 24)
    change = resolve({"kind": "window_sink", "sinks": 2}, TrainedContext("rope", 8, model.pos.inv_freq), 24, 24)
    i, j = torch.arange(24)[:, None], torch.arange(24)
    seen = (i - j < 6) | (j < 2)
    rotated = rotated_scores(model.pos.inv_freq, (i - j).clamp(max=8).double())
    want = dense(model, x, lambda q, k: rotated(q, k).masked_fill(~seen, -math.inf))
    assert (attention_output(model, x, change) - want).abs().max() < 1e-5
    assert (seen & (j <= i)).sum(dim=1).max() == 8  # as many keys as the window control
