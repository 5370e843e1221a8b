"""Write a trained run as a Hugging Face checkpoint: python export.py run=rope out=DIR

DIR then holds config.json, model.safetensors and tokenizer.json, which AutoModelForCausalLM and AutoTokenizer load.
What transformers cannot express, encodings and scalings above all, is refused by name; nothing is approximated.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import tiktoken
import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import one_line_errors
from conf.schema import ModelConfig, TrainConfig
from data import tokens
from data.tokenizer import END
from model import checkpoint, gpt
from model.scaling import Scaled

SETTINGS = {"run": None, "out": None, "runs": "runs", "cache": ".cache"}


def architecture(m: ModelConfig) -> str:
    """The transformers model_type that computes what this model does. ValueError, in words, if there is none."""
    gated, biased = m.mlp == "swiglu", m.qkv_bias and m.out_bias
    cannot = {
        "norm": m.norm != "rms",
        "residual": m.residual != "serial",
        "head_bias": m.head_bias,
        "width": m.width % m.n_heads > 0,
        "out_bias": m.out_bias and not m.qkv_bias,
        "qk_norm": m.qk_norm and not (gated and m.qkv_bias == m.out_bias and not m.mlp_bias),  # only Qwen3 has it
        "qkv_bias": m.qkv_bias and not biased and not (gated and not m.mlp_bias),  # without out_bias only Qwen2
    }
    for setting in (s for s, bad in cannot.items() if bad):
        raise ValueError(
            f"model.{setting}={getattr(m, setting)}: cannot be exported with the other settings of this model; "
            "model=nano, tiny, gpt2, llama and qwen3 can"
        )
    if m.qk_norm:
        return "qwen3"  # ours without weights has theirs at 1
    if m.qkv_bias and not biased:
        return "qwen2"
    return "llama" if m.mlp == "swiglu" else "arcee"  # Arcee is Llama without the gate


def rope_parameters(cfg: TrainConfig, scaled: Scaled, L: int) -> dict:
    """What config.json says of this run's rotation. ValueError, in words, if it cannot say it."""
    p, kind = cfg.pos, cfg.scaling["kind"]
    if p["kind"] != "rope":
        raise ValueError(f"pos={p['kind']}: cannot be exported: only pos=rope and rope_interleaved can")
    for key, right in (("rotary_fraction", 1.0), ("proportional", False)):
        if p.get(key, right) != right:
            raise ValueError(f"pos.{key}={p[key]}: cannot be exported: must be {right}")
    if cfg.attention != "softmax":
        raise ValueError(f"attention={cfg.attention}: cannot be exported: must be softmax")
    if cfg.plus:
        raise ValueError(f"plus={cfg.plus[0]}: was trained with, and cannot be exported")
    k = {name: value for name, value in cfg.scaling.items() if name != "kind"} | {"factor": scaled.factor}
    given = {"rope_theta": float(p["base"]), "rope_type": "default"}
    trained = {"factor": k["factor"], "original_max_position_embeddings": L}
    if kind in ("ntk", "dynamic_ntk", "dynamic_hf"):  # at the trained length they are another base
        D = 2 * len(scaled.inv_freq)
        return given | {"rope_theta": p["base"] * k["factor"] ** (D / (D - 2))}
    if kind == "pi":
        return given | {"rope_type": "linear", "factor": k["factor"]}
    if kind == "yarn":
        kept = {name: k[name] for name in ("beta_fast", "beta_slow", "truncate")}
        return given | {"rope_type": "yarn", **trained, **kept, "attention_factor": scaled.attention_factor}
    if kind in ("llama3", "ntk_by_parts"):  # one formula, two names
        low, high = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("alpha", "beta")
        return given | {"rope_type": "llama3", **trained, "low_freq_factor": k[low], "high_freq_factor": k[high]}
    if kind != "none":
        raise ValueError(
            f"scaling={kind}: was trained with, and cannot be exported: none, pi, ntk, dynamic_ntk, dynamic_hf, yarn, "
            "llama3 and ntk_by_parts can"
        )
    return given


def weights(m: ModelConfig, ours: dict[str, Tensor], interleaved: bool) -> dict[str, Tensor]:
    """Our state dict under the names that Llama, Qwen and Arcee share."""
    D, sizes = m.head_width, [m.n_heads * m.head_width, *[m.kv_heads * m.head_width] * 2]
    # Theirs turns pairs (i, i + D/2): put our pairs (2i, 2i + 1) there. Scores are sums over dimensions in any order.
    order = torch.arange(D).view(-1, 2).T.flatten() if interleaved else torch.arange(D)
    w = {"model.embed_tokens.weight": ours["tokens.weight"], "model.norm.weight": ours["norm.weight"]}
    if not m.tied_head:
        w["lm_head.weight"] = ours["head.weight"]
    for i in range(m.n_layers):
        mine, theirs = f"blocks.{i}", f"model.layers.{i}"
        w[f"{theirs}.input_layernorm.weight"] = ours[f"{mine}.norm1.weight"]
        w[f"{theirs}.post_attention_layernorm.weight"] = ours[f"{mine}.norm2.weight"]
        for kind in ("weight", *["bias"] * m.qkv_bias):
            for x, part in zip("qkv", ours[f"{mine}.attention.qkv.{kind}"].split(sizes), strict=True):
                part = part if x == "v" else part.unflatten(0, (-1, D))[:, order].flatten(0, 1)
                w[f"{theirs}.self_attn.{x}_proj.{kind}"] = part
        for j, x in enumerate("qk" * m.qk_norm):
            gain = ours[f"{mine}.attention.qk_norms.{j}.weight"] if m.qk_norm_weight else torch.ones(D)
            w[f"{theirs}.self_attn.{x}_norm.weight"] = gain[order]
        for kind in ("weight", *["bias"] * m.out_bias):
            w[f"{theirs}.self_attn.o_proj.{kind}"] = ours[f"{mine}.attention.out.{kind}"]
        ups = ("gate", "up") if m.mlp == "swiglu" else ("up",)
        for kind in ("weight", *["bias"] * m.mlp_bias):
            for x, part in zip(ups, ours[f"{mine}.mlp.up.{kind}"].chunk(len(ups)), strict=True):
                w[f"{theirs}.mlp.{x}_proj.{kind}"] = part
            w[f"{theirs}.mlp.down_proj.{kind}"] = ours[f"{mine}.mlp.down.{kind}"]
    return {name: x.float().contiguous().clone() for name, x in w.items()}


def config(cfg: TrainConfig, vocab_size: int, end: int, hidden: int, rope: dict) -> dict:
    m, kind = cfg.model, architecture(cfg.model)
    names = {"llama": "Llama", "arcee": "Arcee", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    biases = {"attention_bias": m.qkv_bias and m.out_bias} if kind != "qwen2" else {}
    biases |= {"mlp_bias": m.mlp_bias} if kind in ("llama", "arcee") else {}
    return {
        "architectures": [f"{names[kind]}ForCausalLM"],
        "model_type": kind,
        "hidden_act": {"gelu": "gelu_pytorch_tanh", "gelu_exact": "gelu", "swiglu": "silu"}[m.mlp],
        "hidden_size": m.width,
        "intermediate_size": hidden,
        "num_hidden_layers": m.n_layers,
        "num_attention_heads": m.n_heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_width,
        "max_position_embeddings": cfg.ctx,
        "rms_norm_eps": m.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": m.tied_head,
        **biases,
        "vocab_size": vocab_size,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": "float32",
    }


def tokenizer_json(encoding: tiktoken.Encoding) -> dict:
    """The tokenizers package's form of our byte pairs.

    tiktoken joins the pair whose union has the lowest rank, so each way to split a token in two is a merge, in the
    order of the tokens' ranks.
    """
    ranks = encoding._mergeable_ranks
    letter = byte_letters()

    def spelt(token: bytes) -> str:
        return "".join(letter[b] for b in token)

    merges = [
        [spelt(token[:i]), spelt(token[i:])]
        for token, _ in sorted(ranks.items(), key=lambda item: item[1])
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    special = {"content": END, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    words = {"type": "Split", "pattern": {"Regex": encoding._pat_str}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": encoding.eot_token, **special, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, by_byte]},
        "post_processor": None,
        "decoder": by_byte,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": {spelt(token): rank for token, rank in ranks.items()}, "merges": merges,
        },
    }  # fmt: skip


def byte_letters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2): itself, or one from 256 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b if b in plain else next(others)) for b in range(256)]


def export(run: Path, out: Path, cache: str) -> str:
    """Write run to out, whole or not at all; returns the model_type."""
    if out.exists():
        raise ValueError(f"out={out}: is there already: choose another or remove it")
    state = checkpoint.load(run)
    cfg: TrainConfig = state["cfg"]
    kind, encoding = architecture(cfg.model), gpt.build_encoding(cfg)
    rope = rope_parameters(cfg, gpt.own_scaling(cfg, encoding), gpt.trained(cfg, encoding).train_ctx)
    corpus = tokens.prepare(cfg.data, cache)
    if corpus.key != state["corpus"]:
        raise ValueError(f"{run}: its corpus has changed since it was trained, and its tokenizer with it: train again")
    hidden = state["model"]["blocks.0.mlp.down.weight"].shape[1]
    end = corpus.encoding.eot_token
    files = {
        "config.json": config(cfg, corpus.vocab_size, end, hidden, rope),
        "generation_config.json": {"bos_token_id": end, "eos_token_id": end},
        "tokenizer.json": tokenizer_json(corpus.encoding),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END,
                                  "clean_up_tokenization_spaces": False, "model_max_length": cfg.ctx},
    }  # fmt: skip
    aside = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        for name, content in files.items():
            (aside / name).write_text(json.dumps(content, indent=1, ensure_ascii=False))
        theirs = weights(cfg.model, state["model"], cfg.pos["interleaved"])
        save_file(theirs, aside / "model.safetensors", metadata={"format": "pt"})
        aside.chmod(0o755)
        aside.rename(out)
    except OSError as e:
        raise ValueError(f"out={out}: cannot be written ({e.strerror or e})") from None
    finally:
        if aside:
            shutil.rmtree(aside, ignore_errors=True)
    return kind


def main() -> None:
    given = dict(SETTINGS)
    for argument in sys.argv[1:]:
        key, sign, value = argument.partition("=")
        if key not in SETTINGS or not sign or not value:
            raise ValueError(f"{argument}: must be one of {', '.join(f'{k}=...' for k in SETTINGS)}")
        given[key] = value
    for key in ("run", "out"):
        if given[key] is None:
            raise ValueError(f"{key}: must be given a value: python export.py run=NAME out=DIR")
    run, out = Path(given["runs"]) / given["run"], Path(given["out"])
    if not (run / "ckpt.pt").exists():
        known = ", ".join(name for name, _ in checkpoint.find(given["runs"])) or "none yet: python train.py pos=rope"
        raise ValueError(f"run={given['run']}: no trained run of that name in {given['runs']}/; there are {known}")
    kind = export(run, out, given["cache"])
    print(f"{out}: {run} as transformers' {kind}: AutoModelForCausalLM.from_pretrained('{out}')")


if __name__ == "__main__":
    one_line_errors(main)()
