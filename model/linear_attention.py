"""Causal linear attention (Katharopoulos et al. 2020, arXiv 2006.16236) with rotary positions (RoFormer, eq. 19).

out_m = sum_{n <= m} (R_m phi(q_m) . R_n phi(k_n)) v_n / sum_{n <= m} phi(q_m) . phi(k_n),   phi = elu + 1

Only the numerator is rotated: rotated features can be negative, and a denominator of them could be zero.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 128  # tokens whose products are written out; between chunks a state of D x D numbers is carried


def causal_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """sum_{n <= m} (q_m . k_n) v_n for q, k [B, H, T, D] and v [B, H, T, E] -> [B, H, T, E], with memory linear in T.

    Within a chunk the products q_m . k_n are computed directly; earlier chunks enter through their sum of k_n v_n^T.
    """
    T = q.shape[2]
    padding = -T % CHUNK
    q, k, v = (F.pad(t, (0, 0, 0, padding)).unflatten(2, (-1, CHUNK)) for t in (q, k, v))  # [B, H, chunks, CHUNK, .]
    inside = (q @ k.transpose(-1, -2)).tril() @ v
    states = (k.transpose(-1, -2) @ v).cumsum(dim=2)  # after each chunk
    before = torch.cat((torch.zeros_like(states[:, :, :1]), states[:, :, :-1]), dim=2)
    return (inside + q @ before).flatten(2, 3)[:, :, :T]


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], window: int | None
) -> Tensor:
    """q [B, T, H, D], k and v [B, T, G, D] -> [B, T, H, D] in v's dtype; computed in float32.

    rotate: (q, k) -> rotated (q, k), of the positional encoding. window: each query sees this many tokens, computed as
    the sums up to each token minus the sums up to `window` tokens earlier; None: all earlier tokens.
    """
    dtype, T, H = v.dtype, q.shape[1], q.shape[2]
    with torch.autocast(q.device.type, enabled=False):  # sums over thousands of tokens lose bfloat16's 8 bits
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = F.elu(q.to(wide)) + 1, F.elu(k.to(wide)) + 1
        heads = (q, k, v.to(wide), *rotate(q, k))
        q, k, v, rotated_q, rotated_k = (t.transpose(1, 2).repeat_interleave(H // t.shape[2], dim=1) for t in heads)
        ones = torch.ones_like(v[..., :1])

        def sums(drop: int) -> tuple[Tensor, Tensor]:
            """Numerator and denominator over the tokens up to `drop` before each."""
            rk, pk, vs, os = (F.pad(t, (0, 0, drop, 0))[:, :, :T] for t in (rotated_k, k, v, ones))
            return causal_sums(rotated_q, rk, vs), causal_sums(q, pk, os)

        numerator, denominator = sums(0)
        if window is not None and window < T:
            old = sums(window)
            numerator, denominator = numerator - old[0], denominator - old[1]
        return (numerator / denominator).transpose(1, 2).to(dtype)
