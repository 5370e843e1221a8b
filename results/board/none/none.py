"""NoPE: no positional encoding; the causal mask alone tells the order (Kazemnejad et al. 2023, arXiv 2305.19466)."""

from model.pos import Encoding as build

__all__ = ["build"]
