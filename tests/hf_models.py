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
import yaml

from conf.schema import TrainConfig
from data.tokenizer import byte_letters
from hf.checkpoint import open_folder
from hf.open import read_checkpoint
from model import gpt

transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests: pip install it")
transformers.logging.set_verbosity_error()

L, V = 32, 96  # the trained context, the vocabulary
LENGTHS = (8, 12, 32, 48, 96)  # below and at the windows, at and above L
FILE = Path(__file__).with_name("data") / "hf_models.yaml"
CASES = {name: tuple(case) for name, case in yaml.safe_load(FILE.read_text())["cases"].items()}
NO_ROPE_TYPES = ("gpt2", "bloom", "gemma3,", "ministral3", "mistral3")  # or other families have them
BY_TYPE = ("gemma3", "olmo3")  # families with rope_parameters of each type of layer
# Not with every rope type: what these change is not the rotation
SHORT = "olmo2 olmo3 granite stablelm gemma2 gemma3_text smollm3 cohere2 mistral qwen2 qwen3 exaone4 glm starcoder2"
VARIANTS = tuple(f"{family}, " for family in SHORT.split())


def rope_types(pairs: int) -> dict[str, dict]:
    divisors = [1.0 + 0.3 * i for i in range(pairs)]
    factors = {"short_factor": divisors, "long_factor": [3 * d for d in divisors]}
    trained = {"original_max_position_embeddings": L}
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, **trained}
    return {
        "default": {},
        "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
        "linear": {"rope_type": "linear", "factor": 4.0},
        "dynamic": {"rope_type": "dynamic", "factor": 2.0},
        "yarn": yarn,
        "yarn, mscale, not truncated": {**yarn, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
        "yarn, mscale alone": {**yarn, "mscale": 0.7},
        "yarn, attention_factor": {**yarn, "attention_factor": 1.2},
        "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **trained},
        "longrope": {"rope_type": "longrope", **factors, **trained},
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
    if kind == "sentencepiece":  # as Llama's, texts begin with a special token
        begin = ("<eos>", t.token_to_id("<eos>"))
        t.post_processor = tokenizers.processors.TemplateProcessing(single="<eos> $A", special_tokens=[begin])
    t.save(str(folder / "tokenizer.json"))
