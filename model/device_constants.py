"""Tensors of constant values on a device, which are copied there one time: every copy to a GPU waits for it."""

from collections.abc import Sequence

import torch
from torch import Tensor

_kept: dict[tuple, Tensor] = {}


def constant(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these values, [len(values)], which is not to be changed: the same one for the same arguments."""
    key = (*values, dtype, device)
    if key not in _kept:
        if len(_kept) > 63:  # dynamic scaling methods have other frequencies at every length
            _kept.clear()
        with torch.inference_mode(False):  # what an evaluation makes can then be used in training
            _kept[key] = torch.tensor(values, dtype=dtype, device=device)
    return _kept[key]
