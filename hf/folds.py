"""What our GPT has no setting for, multiplied into the weights of a checkpoint when they are read.

A fold changes our state dict, and model.tied_head. hf/families.py says which family has which. The functions without
weights read the keys of config.json that a fold uses; the family's settings call them, so that a wrong value is refused
before the weights are read.

Letters: C width, D head width, i layer.
"""

import torch.nn.functional as F
from torch import Tensor

from conf.schema import ModelConfig
from hf.config import Config
from hf.weight_names import Take


def scale_scores(m: ModelConfig, ours: dict[str, Tensor], factors: list[float]) -> None:
    """Multiply the attention scores of each layer by its factor, by way of the weights that make the queries."""
    for i, factor in enumerate(factors):
        for name in (f"blocks.{i}.attention.qkv.{kind}" for kind in ("weight", "bias")):
            if name in ours and factor != 1:
                ours[name][: m.n_heads * m.head_width] *= factor


def fold_granite(c: Config, m: ModelConfig, ours: dict[str, Tensor], take: Take) -> None:
    """Granite's multipliers: of the embeddings, of what each block adds, of the scores, and a divisor of the logits."""
    residual = c.number("residual_multiplier", default=1.0)
    for name in ours:
        if ".attention.out." in name or ".mlp.down." in name:
            ours[name] *= residual
    scale_scores(m, ours, [c.number("attention_multiplier", default=1.0) * m.head_width**0.5] * m.n_layers)
    # Not in place, and no longer tied: a tied head is the same tensor, and has another factor
    ours["tokens.weight"] = ours["tokens.weight"] * c.number("embedding_multiplier", default=1.0)
    ours["head.weight"] = ours["head.weight"] / logits_scaling(c)
    m.tied_head = False


def logits_scaling(c: Config) -> float:
    divisor = c.number("logits_scaling", default=1.0)
    if divisor == 0:
        raise c.refuse("logits_scaling", divisor, "must be above 0")
    return divisor


def fold_gpt2(c: Config, m: ModelConfig, ours: dict[str, Tensor], take: Take) -> None:
    """GPT-2's other scales of the scores: not divided by sqrt(D), or divided by the number of the layer."""
    by_layer = c.flag("scale_attn_by_inverse_layer_idx")
    factor = 1.0 if c.flag("scale_attn_weights", default=True) else m.head_width**0.5
    scale_scores(m, ours, [factor / (i + 1) if by_layer else factor for i in range(m.n_layers)])


def fold_bloom(c: Config, m: ModelConfig, ours: dict[str, Tensor], take: Take) -> None:
    """BLOOM's LayerNorm of the embeddings: a function of the token alone, so its output is the embedding.

    The tied head has the embeddings before the norm, so it is no longer tied.
    """
    norm = {kind: take(f"transformer.word_embeddings_layernorm.{kind}", (m.width,)) for kind in ("weight", "bias")}
    ours["tokens.weight"] = F.layer_norm(ours["tokens.weight"], (m.width,), **norm, eps=m.norm_eps)
    m.tied_head = False


def fold_gemma3(c: Config, m: ModelConfig, ours: dict[str, Tensor], take: Take) -> None:
    """Gemma 3's norms multiply by 1 + weight, its embeddings by sqrt(C), and its scores have another divisor.

    A tied head has the embeddings without sqrt(C), by which the final norm is divided instead, so that it stays tied.
    """
    for name in (name for name, x in ours.items() if x.dim() == 1 and name.endswith("weight")):
        ours[name] = ours[name] + 1
    for i in range(m.n_layers):
        ours[f"blocks.{i}.attention.qk_norms.0.weight"] *= (m.head_width / score_width(c)) ** 0.5
    scale_embeddings(m, ours, m.width**0.5)


def unfold_gemma3(m: ModelConfig, ours: dict[str, Tensor]) -> None:
    """The inverse of `fold_gemma3`, where the scores are divided by the root of the width of a head."""
    scale_embeddings(m, ours, m.width**-0.5)
    for name in (name for name, x in ours.items() if x.dim() == 1 and name.endswith("weight")):
        ours[name] = ours[name] - 1


def scale_embeddings(m: ModelConfig, ours: dict[str, Tensor], factor: float) -> None:
    """Multiply the embeddings; if the head is tied to them, the final norm is divided so that the logits stay."""
    ours["tokens.weight"] = ours["tokens.weight"] * factor
    if m.tied_head:
        ours["head.weight"], ours["norm.weight"] = ours["tokens.weight"], ours["norm.weight"] / factor


def fold_cohere2(c: Config, m: ModelConfig, ours: dict[str, Tensor], take: Take) -> None:
    """Cohere 2's factor of the logits, by way of the final norm, which has no bias."""
    ours["norm.weight"] = ours["norm.weight"] * c.number("logit_scale", default=0.0625)


def score_width(c: Config) -> float:
    """Gemma 3 divides the scores by the root of this, where other models have the width of a head."""
    return c.number("query_pre_attn_scalar", default=256.0, least=1)
