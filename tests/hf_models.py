"""Random models of transformers at tiny size, which the tests of hf/ compare with the same weights in our GPT.

Weights are drawn with a standard deviation of 0.3: at transformers' 0.02 taking all positions away moves the logits by
0.002, at 0.3 by 8. Logits then reach 10. Both models compute in float64. What remains of the difference comes from
transformers' angles and root mean squares, which are float32 at any dtype.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from conf.schema import TrainConfig
from data.tokenizer import byte_letters
from hf.checkpoint import open_folder
from hf.open import read_checkpoint
from model import gpt

transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests: pip install it")
transformers.logging.set_verbosity_error()

L, V = 32, 96
LENGTHS = (8, 12, 32, 48, 96)  # below and at the windows, at and above L
COMMON = {"vocab_size": V, "initializer_range": 0.3}
LLAMA = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": L,
}
GQA = {**LLAMA, "num_key_value_heads": 2}
NEOX = {**LLAMA, "num_attention_heads": 2, "rotary_pct": 0.5, "hidden_act": "gelu"}
GPTJ = {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
PHI3 = {"pad_token_id": 0, "original_max_position_embeddings": L, "bos_token_id": 1, "eos_token_id": 2}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 1.5}
GPT2 = {**COMMON, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96}
# Windows below L. With 5 layers of the pattern 3, layers of each kind follow both kinds
WINDOW = {"sliding_window": 12}
GEMMA3 = {
    **GQA,
    **WINDOW,
    "num_hidden_layers": 5,
    "sliding_window_pattern": 3,
    "head_dim": 16,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 24,
}
OLMO3 = {**GQA, **WINDOW, "num_hidden_layers": 5}
COHERE2 = {**GQA, **WINDOW, "num_hidden_layers": 5, "sliding_window_pattern": 3, "logit_scale": 0.3}
SMOLLM3 = {**GQA, "num_hidden_layers": 4, "no_rope_layer_interval": 3, "pad_token_id": 0}
QWEN_WINDOW = {**GQA, **WINDOW, "use_sliding_window": True, "max_window_layers": 1}
EXAONE4 = {**GQA, "pad_token_id": 0, "head_dim": 16, "num_hidden_layers": 5, "sliding_window_pattern": 3}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}
IMAGES = {"text_config": GEMMA3, "vision_config": VISION, "mm_tokens_per_image": 4, "initializer_range": 0.3}
GEMMA2 = {**GQA, **WINDOW, "head_dim": 16, "pad_token_id": 0, "query_pre_attn_scalar": 24, "num_hidden_layers": 3}
MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": L,
    "max_position_embeddings": 4 * L,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
MISTRAL3 = {**GQA, "head_dim": 16, "max_position_embeddings": 4 * L, "rope_parameters": MINISTRAL}
PIXTRAL = {**VISION, "model_type": "pixtral", "head_dim": 16}
MPT = {**COMMON, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 96}
CASES = {
    "llama": ("Llama", {**GQA, "tie_word_embeddings": False}),
    "llama, biases, tied": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**GQA, "sliding_window": None, "head_dim": 12}),
    "qwen2": ("Qwen2", GQA),
    "qwen3": ("Qwen3", {**GQA, "head_dim": 16}),
    "arcee": ("Arcee", {**GQA, "hidden_act": "relu2"}),
    "arcee, gelu": ("Arcee", {**GQA, "hidden_act": "gelu_pytorch_tanh"}),
    "gpt_neox": ("GPTNeoX", NEOX),
    "gpt_neox, serial": ("GPTNeoX", {**NEOX, "use_parallel_residual": False, "hidden_act": "gelu_fast"}),
    "gptj": ("GPTJ", {**GPTJ, "n_positions": 256}),
    "phi3": ("Phi3", {**GQA, **PHI3}),
    "phi3, partial": ("Phi3", {**GQA, **PHI3, "partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", GQA),
    "olmo2, biases": ("Olmo2", {**LLAMA, "attention_bias": True, "tie_word_embeddings": True}),
    "granite": ("Granite", {**GQA, **GRANITE}),
    "granite, biases, tied": (
        "Granite",
        {**GQA, **GRANITE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "stablelm": ("StableLm", {**GQA, "partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "stablelm, parallel": ("StableLm", {**GQA, "partial_rotary_factor": 0.5, "use_parallel_residual": True}),
    "gpt2": ("GPT2", GPT2),
    "gpt2, other scores": (
        "GPT2",
        {
            **GPT2,
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "n_inner": 48,
            "reorder_and_upcast_attn": True,
            "tie_word_embeddings": False,
        },
    ),
    "bloom": ("Bloom", {**COMMON, "hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": L}),
    "bloom, 6 heads": ("Bloom", {**COMMON, "hidden_size": 48, "n_layer": 2, "n_head": 6, "seq_length": L}),
    "mpt": ("Mpt", MPT),
    "mpt, 6 heads": ("Mpt", {**MPT, "d_model": 48, "n_heads": 6, "tie_word_embeddings": False}),
    "gemma3_text": ("Gemma3Text", GEMMA3),
    "gemma3_text, biases, untied": (
        "Gemma3Text",
        {**GEMMA3, "attention_bias": True, "tie_word_embeddings": False, "hidden_activation": "silu"},
    ),
    # Caps that some scores and logits of these random weights reach
    "gemma2": ("Gemma2", {**GEMMA2, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma2, no caps, untied": (
        "Gemma2",
        {
            **GEMMA2,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention", *["sliding_attention"] * 2],
        },
    ),
    "ministral3": ("Ministral3", MISTRAL3),
    "ministral3, window, tied": (
        "Ministral3",
        {**MISTRAL3, **WINDOW, "tie_word_embeddings": True, "rope_parameters": {**MINISTRAL, "mscale": 0.5}},
    ),
    "mistral3": (
        "Mistral3",
        {"text_config": {**MISTRAL3, **WINDOW, "model_type": "ministral3"}, "vision_config": PIXTRAL},
    ),
    "olmo3": ("Olmo3", OLMO3),
    "olmo3, biases, tied": (
        "Olmo3",
        {
            **OLMO3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", *["sliding_attention"] * 4],
        },
    ),
    "smollm3": ("SmolLM3", SMOLLM3),
    "smollm3, windows, untied": (
        "SmolLM3",
        {
            **SMOLLM3,
            **WINDOW,
            "use_sliding_window": True,
            "mlp_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "num_hidden_layers": 5,
            "no_rope_layers": [0, 1, 0, 1, 1],
            "layer_types": [*["sliding_attention"] * 2, *["full_attention"] * 2, "sliding_attention"],
        },
    ),
    "cohere2": ("Cohere2", COHERE2),
    "cohere2, biases, untied": ("Cohere2", {**COHERE2, "attention_bias": True, "tie_word_embeddings": False}),
    "gemma3, tied": ("Gemma3", IMAGES),
    "gemma3, untied": ("Gemma3", {**IMAGES, "tie_word_embeddings": False}),
    "exaone4": ("Exaone4", {**EXAONE4, **WINDOW}),
    "exaone4, no window, tied": (
        "Exaone4",
        {**EXAONE4, "sliding_window": None, "tie_word_embeddings": True, "layer_types": ["full_attention"] * 5},
    ),
    "glm": ("Glm", {**GQA, "head_dim": 16, "pad_token_id": 0, "partial_rotary_factor": 0.5}),
    "glm, no biases, tied": (
        "Glm",
        {
            **GQA,
            "head_dim": 16,
            "pad_token_id": 0,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.75,
        },
    ),
    "starcoder2, window": ("Starcoder2", {**GQA, **WINDOW}),
    "starcoder2, no biases, untied": ("Starcoder2", {**GQA, "use_bias": False, "tie_word_embeddings": False}),
    "mistral, window": ("Mistral", {**GQA, **WINDOW}),
    "phi3, window": ("Phi3", {**GQA, **PHI3, **WINDOW}),
    "qwen2, window": ("Qwen2", QWEN_WINDOW),
    "qwen3, window": ("Qwen3", {**QWEN_WINDOW, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}),
}
NO_ROPE_TYPES = ("gptj", "gpt2", "bloom", "mpt", "gemma3,", "ministral3", "mistral3")  # or other families have them
NO_ROPE = ("gpt2", "bloom", "mpt")
BY_TYPE = ("gemma3", "olmo3")  # families with rope_parameters of each type of layer
# Not with every rope type: what these change is not the rotation
SHORT = (
    "olmo2",
    "olmo3",
    "granite",
    "stablelm",
    "gemma2",
    "gemma3_text",
    "smollm3",
    "cohere2",
    "mistral",
    "qwen2",
    "qwen3",
    "exaone4",
    "glm",
    "starcoder2",
)
VARIANTS = tuple(f"{family}, " for family in SHORT)


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
        "yarn, mscale alone": {**yarn, "mscale": 0.7},
        "yarn, attention_factor": {**yarn, "attention_factor": 1.2},
        "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **trained},
        "longrope": {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": [3 * d for d in divisors],
            **trained,
        },
    }


def biases(model: torch.nn.Module) -> torch.nn.Module:
    """Biases and norms start as zeros and ones, which would hide a mistake in them."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p += 0.2 * torch.randn(p.shape, generator=g)
    return model.eval()


def random_model(config: Any) -> torch.nn.Module:
    """Of transformers, with this configuration."""
    images = config.model_type == "mistral3"
    auto = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    return biases(auto.from_config(config))


def save_random(family: str, rope: dict, folder: Path) -> torch.nn.Module:
    """A random model of transformers, saved to folder."""
    name, settings = CASES[family]
    torch.manual_seed(0)
    extended = {"max_position_embeddings": 4 * L} if "original_max_position_embeddings" in rope else {}
    # At this base some pair is on every ramp: with 10000 none is, and a wrong ramp would not show
    rope = {"rope_parameters": {"rope_theta": 100.0, **rope}} if rope else {}
    if family.startswith(BY_TYPE) and rope:
        rope["rope_parameters"].pop("truncate", None)  # transformers reads it for all layers together only
        sliding = {"rope_theta": 30.0, "rope_type": "default"}
        rope["rope_parameters"] = {"full_attention": rope["rope_parameters"], "sliding_attention": sliding}
    if name == "GPTNeoX" and rope:
        rope["rope_parameters"]["partial_rotary_factor"] = 0.5
    config = getattr(transformers, f"{name}Config")(**{**settings, **extended, **rope})
    model = random_model(config)
    model.save_pretrained(folder)
    # Their tables of angles and biases end with the trained context, so they are built with a longer one
    edit(folder, **{"GPTJ": {"n_positions": L}, "Mpt": {"max_seq_len": L}}.get(name, {}))
    return model


def rotary_pairs(family: str) -> int:
    """The number of pairs that a model of CASES rotates."""
    name, settings = CASES[family]
    D = settings.get("head_dim", settings.get("hidden_size", 0) // settings.get("num_attention_heads", 1))
    return int(D * settings.get("partial_rotary_factor", 0.5 if name == "GPTNeoX" else 1.0)) // 2


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def read(folder: Path, ctx: int, train_ctx: int | None = None) -> tuple[TrainConfig, dict[str, torch.Tensor], int]:
    """`read_checkpoint` of a Hugging Face folder."""
    return read_checkpoint(open_folder(folder), ctx, train_ctx)


def our_logits(folder: Path, train_ctx: int | None = None, ctx: int = 96) -> Callable[[torch.Tensor], torch.Tensor]:
    """tokens -> the logits in float64 of our GPT with the weights in folder, scaled as config.json says."""
    return logits_of(*read(folder, ctx, train_ctx))


def logits_of(cfg: TrainConfig, weights: dict[str, torch.Tensor], vocab_size: int) -> Callable:
    """Like `our_logits`, from what `read` returns."""
    model = gpt.from_weights(cfg, vocab_size, weights).double().eval()

    def logits(tokens):
        with torch.inference_mode():
            return model(tokens, change=gpt.trained_scaling(cfg, gpt.trained_context(cfg, model.pos), tokens.shape[1]))

    return logits


def tokens(n: int) -> torch.Tensor:
    return torch.randint(V, (2, n), generator=torch.Generator().manual_seed(n))


def difference(computed: Callable, model: torch.nn.Module, n: int) -> tuple[float, float]:
    """(largest absolute difference of logits, largest logit) at n tokens; model: transformers'.

    In float64 on both sides. inv_freq stays float32, as transformers has it in every model.
    """
    frequencies = {name: x for name, x in model.named_buffers() if name.endswith("inv_freq")}
    model.double()
    for name, inv_freq in frequencies.items():
        module, _, buffer = name.rpartition(".")
        setattr(model.get_submodule(module), buffer, inv_freq)
    with torch.inference_mode():
        expected = model(tokens(n)).logits
    return (computed(tokens(n)) - expected).abs().max().item(), expected.abs().max().item()


def assert_equal(computed: Callable, model: torch.nn.Module, lengths: tuple[int, ...] = LENGTHS) -> None:
    """The logits are those of transformers' model at these lengths."""
    for n in lengths:
        error, largest = difference(computed, model, n)
        assert error <= 1e-4 and largest > 0.5, (n, error, largest)


def load(folder: Path) -> torch.nn.Module:
    """The model of transformers in a folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def save_complete(family: str, folder: Path = Path("model")) -> None:
    """A random checkpoint of 301 tokens with a tokenizer."""
    name, settings = CASES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**settings, "vocab_size": 301, "initializer_range": 0.1})
    biases(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
    with_tokenizer(folder)


def with_tokenizer(folder, kind: str = "bytes"):
    """A tokenizer.json beside the model: byte-level, or as SentencePiece's with byte fallback."""
    if kind == "bytes":
        t = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(byte_letters())}, []))
        t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        t.decoder = tokenizers.decoders.ByteLevel()
    else:
        words = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz", "th", "the"]
        merges = [("t", "h"), ("th", "e")]
        vocab = {w: i for i, w in enumerate(words)}
        t = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
        n, d = tokenizers.normalizers, tokenizers.decoders
        t.normalizer = n.Sequence([n.Prepend("\u2581"), n.Replace(" ", "\u2581")])
        t.decoder = d.Sequence([d.Replace("\u2581", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    t.add_special_tokens(["<eos>"])
    t.save(str(folder / "tokenizer.json"))
