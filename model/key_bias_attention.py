"""Attention with a bias that depends on the key alone, such as ALiBi's: no mask, so the fused kernel can run.

Letters as in model/attention.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import Heads, repeat_heads


def attend_key_bias(heads: Heads, key_bias: Tensor) -> Tensor:
    """Causal attention with a bias that depends on the key alone, float32 [H, T] or [B, H, T], and no mask.

    The score q . k + b is one product of wider heads: [q | 1] . [k | b]. In bfloat16 b is split into three columns of 8
    bits each, whose sum has float32's 24 bits. D + 8 columns, because fused kernels need a multiple of 8.
    """
    B, H, T, D = heads.q.shape
    columns, rest = [], key_bias.expand(B, H, T)
    for _ in range(3):
        columns.append(rest.to(heads.q.dtype))
        rest = rest - columns[-1].to(rest.dtype)
    ones, pad = heads.q.new_ones(B, H, T, 3), heads.q.new_zeros(B, H, T, 5)
    q = torch.cat((heads.q * D**-0.5, ones, pad), dim=-1)  # [B, H, T, D + 8]
    k, v = repeat_heads(heads.k, H), repeat_heads(heads.v, H)  # query heads that share a key have different biases
    k = torch.cat((k, torch.stack(columns, dim=-1), pad), dim=-1)  # [B, H, T, D + 8]
    v = torch.cat((v, heads.q.new_zeros(B, H, T, 8)), dim=-1)  # the fused kernel wants one width for all
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)[..., :D]
