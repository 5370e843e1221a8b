"""A bias on attention scores that is computed from content, for modules of Encoding.layer_module."""

from torch import Tensor


class ContentBias:
    """A bias that is computed from content. `attend` uses it through three of Encoding's hooks.

    It is computed for tokens' indices, not positions: pass content_attention.indices(heads) as the positions.
    """

    has_bias = True

    def bias(self, q_index: Tensor, k_index: Tensor) -> Tensor:
        """The bias of these queries and keys, int64 [Tq] and [Tk] -> [H or 1, Tq, Tk] or [B, H, Tq, Tk]."""
        raise NotImplementedError

    def key_bias(self, k_index: Tensor) -> Tensor | None:
        """As Encoding.key_bias: of all T keys. Without it, memory is linear in T but not as small."""
        return None
