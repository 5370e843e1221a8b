"""Positional encodings, one file each.

To add one, write two files; nothing else changes:
  model/pos/FILE.py    a subclass of Encoding, bound to the name `build`. Its knobs are the parameters of __init__ after
                       shape; they are checked against their type hints.
  conf/pos/NAME.yaml   `kind: FILE` and a value for every knob. Several yamls may share one kind. `lr_scale: 2.0`, if
                       the encoding trains better at twice the learning rates of optim=.
Then `python train.py pos=NAME` trains with it, and the tests run it too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conf.errors import check
from conf.registry import build_from_knobs, check_type, load_kind
from model.scaling import ContextChange


@dataclass(frozen=True)
class Shape:
    """The sizes of the model that an encoding may depend on."""

    width: int
    n_heads: int
    head_dim: int
    train_ctx: int


class Encoding(nn.Module):
    """The hooks by which a GPT applies a positional encoding. Each one does nothing here; a subclass overrides some.

    The GPT calls all hooks and does not know which encoding it has. Positions are always explicit: an int64 tensor
    [T] or [B, T].

    A subclass initialises its own parameters in __init__: the GPT does not touch parameters whose names start with
    "pos.". It raises UserError for knobs that are out of range.

    Letters: B batch, T time, H query heads, G key-value heads, D head width, C model width.
    """

    # Whether a shift of all positions leaves the logits unchanged. A test checks this for every encoding.
    relative: bool = True
    # Whether `rotate` also multiplies queries by a temperature, for the scores of softmax.
    tempers: bool = False
    # The number of positions that the encoding has, 0 .. max_positions - 1, where it keeps a table of them: the model
    # can neither be trained nor evaluated at a longer context. None: any position can be computed.
    max_positions: int | None = None
    # float64 [rotary_dim / 2], radians per position, if the encoding rotates; None: it has no frequencies to scale.
    inv_freq: Tensor | None = None
    # The learning rate of the encoding's own parameters, as a multiple of optim.lr; not of its modules in the layers
    lr_factor: float = 1.0
    # All learning rates of a training with this encoding, as a multiple of those of optim=: `lr_scale` of its yaml
    lr_scale: float = 1.0

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        # Without a bias attention needs no mask, hence a faster kernel.
        self.has_bias = type(self).bias is not Encoding.bias
        self.sees_content = type(self).layer_module is not Encoding.layer_module

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add positions to the token embeddings x [B, T, C] -> [B, T, C]."""
        return x

    def prepare(self, positions: Tensor, change: ContextChange) -> Any:
        """Compute the inputs of `rotate`, such as cosines: called once per forward pass, shared by all layers.

        positions: int64 [T] or [B, T]. change: what a scaling method changes, for example the frequencies.
        """
        return None

    def prepare_layers(
        self, n_layers: int, positions: Tensor, change: ContextChange
    ) -> list[tuple["Encoding", Any, ContextChange]]:
        """The encoding of each layer, what its `prepare` returns, and its change. A layer schedule overrides this."""
        return [(self, self.prepare(positions, change), change)] * n_layers

    def rotate(self, q: Tensor, k: Tensor, prepared: Any) -> tuple[Tensor, Tensor]:
        """Rotate queries [B, T, H, D] and keys [B, T, G, D] by their positions -> the same shapes and dtype.

        prepared: what `prepare` returned.
        """
        return q, k

    def rotate_qkv(self, qkv: Tensor, heads: tuple[int, int, int], prepared: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Split a projection qkv [B, T, H + 2 G, D] by heads = (H, G, G) and rotate q and k as `rotate` does.

        Returns q [B, T, H, D], k and v [B, T, G, D]. A separate hook, because a kernel can read the packed tensor.
        """
        q, k, v = qkv.split(heads, dim=2)
        return *self.rotate(q, k, prepared), v

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """The bias to add to the attention scores, [H, Tq, Tk] or [B, H, Tq, Tk]. None adds nothing and is faster."""
        return None

    def key_bias(self, k_positions: Tensor) -> Tensor | None:
        """If bias(q, k) = g(k) + c(q), return g: softmax ignores c(q), so attention needs no mask.

        float32 [H, Tk] or [B, H, Tk]; None if bias has no such form.
        """
        return None

    def layer_module(self, layer: int) -> nn.Module | None:
        """For encodings that see content: a module for layer 0, 1 ..., which attends there in place of plain attention.

        It is called as module(x, heads, where) with model.attention's Heads and Where. x [B, N, C] is the layer's input
        for the new tokens: all T without a cache. What it computes from x must be cached for later calls with
        where.cache.extend(self, ...). In the end it calls model.attention.attend, with other heads or with its own
        ScoreBias instead of the encoding's, and returns the result, [B, H, S, D]. It initialises its own parameters.
        None: plain attention, with the hooks above.
        """
        return None


def build(knobs: dict, shape: Shape) -> Encoding:
    """The encoding of these knobs, a yaml of conf/pos."""
    own = {key: value for key, value in knobs.items() if key != "lr_scale"}
    encoding = build_from_knobs(load_kind("model.pos", knobs["kind"], "build", "pos"), own, "pos", shape)
    encoding.lr_scale = knobs.get("lr_scale", Encoding.lr_scale)
    check_type("pos.lr_scale", encoding.lr_scale, float)
    check(encoding.lr_scale > 0, "pos.lr_scale", encoding.lr_scale, "above 0")
    return encoding


# ---- for encodings ----

_constants: dict[tuple, Tensor] = {}


def constant(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these values, [len(values)], which is not to be changed: the same one for the same arguments.

    So it is copied to a GPU one time: every copy waits for it.
    """
    key = (*values, dtype, device)
    if key not in _constants:
        if len(_constants) > 63:  # dynamic scaling methods have other frequencies at every length
            _constants.clear()
        with torch.inference_mode(False):  # what an evaluation makes can then be used in training
            _constants[key] = torch.tensor(values, dtype=dtype, device=device)
    return _constants[key]
