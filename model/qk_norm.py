"""QK-norm (Henry et al. 2020, arXiv 2010.04245): queries and keys are normalised before they are rotated."""

import torch
from torch import Tensor, nn

from conf.schema import ModelConfig


class QKNorms(nn.ModuleList):
    """Divide each head of q and k by its root mean square; with qk_norm_all_heads by that of all heads together.

    Computed in float32, or in float64 for float64 inputs: squares in bfloat16 would lose too many bits.
    """

    def __init__(self, cfg: ModelConfig):
        self.all_heads, D = cfg.qk_norm_all_heads, cfg.head_width
        widths = (cfg.n_heads * D, cfg.kv_heads * D) if self.all_heads else (D, D)
        super().__init__(nn.RMSNorm(w, cfg.norm_eps, elementwise_affine=cfg.qk_norm_weight) for w in widths)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, T, H, D], k and v [B, T, G, D] -> q and k normalised, and v: [B, T, H + 2 G, D] in v's dtype."""
        wide = torch.promote_types(v.dtype, torch.float32)
        q, k = (
            norm((x.flatten(2) if self.all_heads else x).to(wide)).view(x.shape).to(v.dtype)
            for norm, x in zip(self, (q, k), strict=True)
        )
        return torch.cat((q, k, v), dim=2)
