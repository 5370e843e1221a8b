"""Hugging Face in and out, held to transformers: logits and token ids of tiny random models, family by family.

Weights are drawn with a standard deviation of 0.3, not transformers' 0.02, where a model without any positions is within
0.01 of one that has them. Logits then reach 9, and 1e-4 is meant absolutely.
"""

import json

import pytest
import torch

from model import gpt, hf

transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests: pip install it")
transformers.logging.set_verbosity_error()

L, V = 32, 96
LENGTHS = (20, 32, 48, 96)  # below, at and above L
COMMON = {"vocab_size": V, "initializer_range": 0.3}
LLAMA = {**COMMON, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": L}  # fmt: skip
GQA = {**LLAMA, "num_key_value_heads": 2}
NEOX = {**LLAMA, "rotary_pct": 0.5, "hidden_act": "gelu"}
GPTJ = {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
FAMILIES = {
    "llama": ("Llama", {**GQA, "tie_word_embeddings": False}),
    "llama, biases, tied": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**GQA, "sliding_window": None, "head_dim": 12}),
    "qwen2": ("Qwen2", GQA),
    "qwen3": ("Qwen3", {**GQA, "head_dim": 16}),
    "arcee": ("Arcee", {**GQA, "hidden_act": "gelu_pytorch_tanh"}),
    "gpt_neox": ("GPTNeoX", NEOX),
    "gpt_neox, serial": ("GPTNeoX", {**NEOX, "use_parallel_residual": False, "hidden_act": "gelu_fast"}),
    "gptj": ("GPTJ", {**GPTJ, "n_positions": 256}),
}


def rope_types(pairs: int) -> dict[str, dict]:
    divisors = [1.0 + 0.3 * i for i in range(pairs)]
    trained = {"original_max_position_embeddings": L}
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, **trained}
    return {
        "default": {},
        "linear": {"rope_type": "linear", "factor": 4.0},
        "dynamic": {"rope_type": "dynamic", "factor": 2.0},
        "yarn": yarn,
        "yarn, mscale, not truncated": {**yarn, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
        "yarn, attention_factor": {**yarn, "attention_factor": 1.4},
        "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **trained},
        "longrope": {"rope_type": "longrope", "short_factor": divisors, "long_factor": [3 * d for d in divisors],
                     **trained},
    }  # fmt: skip


def biases(model: torch.nn.Module) -> torch.nn.Module:
    """Biases and norms start as zeros and ones, which would hide a mistake in them."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p += 0.2 * torch.randn(p.shape, generator=g)
    return model.eval()


def theirs(family: str, rope: dict, folder) -> torch.nn.Module:
    """A random transformers model, saved to folder."""
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    extended = {"max_position_embeddings": 4 * L} if "original_max_position_embeddings" in rope else {}
    rope = {"rope_parameters": {"rope_theta": 10000.0, **rope}} if rope else {}
    if name == "GPTNeoX" and rope:
        rope["rope_parameters"]["partial_rotary_factor"] = 0.5
    config = getattr(transformers, f"{name}Config")(**{**settings, **extended, **rope})
    model = biases(getattr(transformers, f"{name}ForCausalLM")(config))
    model.save_pretrained(folder)
    if name == "GPTJ":  # its table of angles ends with n_positions: theirs is longer than what ours is told
        edit(folder, n_positions=L)
    return model


def edit(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def ours(folder, train_ctx: int | None = None):
    """tokens -> our logits, scaled as the config says."""
    cfg, weights, vocab_size = hf.read(folder, max(LENGTHS), train_ctx)
    model = gpt.load(cfg, vocab_size, weights).eval()

    def logits(tokens):
        with torch.inference_mode():
            return model(tokens, scaled=gpt.own_scaling(cfg, model.pos, tokens.shape[1]))

    return logits


def tokens(n: int) -> torch.Tensor:
    return torch.randint(V, (2, n), generator=torch.Generator().manual_seed(n))


def difference(ours, theirs, n: int) -> tuple[float, float]:
    """(largest absolute difference of logits, largest logit)."""
    with torch.inference_mode():
        expected = theirs(tokens(n)).logits
    return (ours(tokens(n)) - expected).abs().max().item(), expected.abs().max().item()


def cases() -> list[tuple[str, str]]:
    every = list(rope_types(1))
    return [(f, r) for f in FAMILIES for r in (every if f != "gptj" else ["default"])]


TABLE: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def print_the_table(request):
    yield
    if TABLE:
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print("\nlogits, largest absolute difference from transformers (largest logit)")
            print(f"{'family':<22}{'rope type':<30}" + "".join(f"{f'n = {n}':>17}" for n in LENGTHS))
            print("\n".join(TABLE))


@pytest.mark.parametrize("family, rope_type", cases())
def test_logits_equal_transformers(family, rope_type, tmp_path):
    name, settings = FAMILIES[family]
    head = settings.get("head_dim", 8)
    rope = rope_types(head // 4 if name == "GPTNeoX" else head // 2)[rope_type]
    expected = theirs(family, rope, tmp_path)
    computed = ours(tmp_path, L if rope_type == "linear" else None)
    cells = []
    for n in LENGTHS:
        error, largest = difference(computed, expected, n)
        cells.append(f"{error:.1e} ({largest:.0f})".rjust(17))
        assert error <= 1e-4, (n, error, largest)
    TABLE.append(f"{family:<22}{rope_type:<30}" + "".join(cells))
