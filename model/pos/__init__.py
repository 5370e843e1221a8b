"""Positional encodings: one file each. conf/pos/NAME.yaml says `kind: FILE` and the values of its knobs.

A new encoding is a file here with one subclass of Encoding named `build`, and one yaml; nothing else changes.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from conf.registry import call, load
from kernels import normed
from model.scaling import Scaled


@dataclass(frozen=True)
class Shape:
    """What an encoding may know of its model."""

    width: int
    n_heads: int
    head_dim: int
    train_ctx: int


class Encoding(nn.Module):
    """Hooks, each a function of an explicit tensor of positions, int64 [T] or [B, T]; each does nothing here.

    The GPT calls all of them and never asks which encoding it has. Nothing here has a maximum length unless
    max_positions says so.
    """

    relative: bool = True  # a shift of all positions changes nothing; a test holds every encoding to it
    max_positions: int | None = None
    inv_freq: Tensor | None = None  # float64 [rotary_dim / 2], radians per position, if the encoding rotates

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Token embeddings [B, T, C] -> the same with positions in them."""
        return x

    def prepare(self, positions: Tensor, scaled: Scaled) -> Any:
        """What rotate needs and all layers share, computed once for each forward pass."""
        return None

    def rotate(self, q: Tensor, k: Tensor, prepared: Any) -> tuple[Tensor, Tensor]:
        """Queries [B, T, H, D] and keys [B, T, H_kv, D] -> the same, turned."""
        return q, k

    def rotate_qkv(
        self, qkv: Tensor, heads: tuple[int, int, int], prepared: Any, norm_eps: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The projection [B, T, H + 2 G, D] -> q and k, turned, and v; norm_eps: with QK-norm before it."""
        q, k, v = qkv.split(heads, dim=2)
        return *self.rotate(normed(q, norm_eps).to(q.dtype), normed(k, norm_eps).to(k.dtype), prepared), v

    def rotate_far(self, q: Tensor, k: Tensor, prepared: Any) -> tuple[Tensor, Tensor] | None:
        """The same for pairs at a distance of Scaled.clip and more; None where nothing is clipped."""
        return None

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """What to add to the attention scores, [H, Tq, Tk] or [B, H, Tq, Tk]; None adds nothing and is faster."""
        return None

    def key_bias(self, k_positions: Tensor) -> Tensor | None:
        """If bias is a function of the key alone, but for a constant of each query, which the softmax does not see:
        that function, float32 [H, Tk] or [B, H, Tk]. Attention then needs no mask."""
        return None


def build(knobs: dict, shape: Shape) -> Encoding:
    """The encoding that a yaml of conf/pos names."""
    return call(load("model.pos", knobs["kind"], "build"), knobs, "pos", shape)
