"""The positions of a padded batch's tokens, and conversions between packed and padded.

B batch, S sequence, T valid tokens, E features.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLayout:
    """How a flat list of tokens (N, E) becomes a batch (B, S, E) for attention and back.

    Linear layers, norms and the loss work on the flat list; only attention needs rows. With `index` the list
    holds only the valid tokens (N = T), so padding costs nothing outside attention. Without it N = B * S.
    """

    batch: int
    length: int
    index: Tensor | None = None
    """(T,) int64, indices of the valid tokens in the flattened batch; None if the list holds all tokens."""
    positions: Tensor | None = None
    """(B, S) int64 rotary positions; None for 0 … S - 1 in every row."""
    mask: Tensor | None = None
    """(B, 1, S, keys) bool, true for keys that a query may see; None for plain attention."""
    causal: bool = True
    """Whether a query sees only keys up to its own position; used only if `mask` is None."""

    def pad(self, flat: Tensor) -> Tensor:
        """Turn (N, E) into (B, S, E); positions without a token are zero."""
        if self.index is not None:
            rows = flat.new_zeros(self.batch * self.length, flat.shape[-1])
            flat = rows.index_copy(0, self.index, flat)
        return flat.view(self.batch, self.length, flat.shape[-1])

    def unpad(self, rows: Tensor) -> Tensor:
        """Turn (B, S, E) into (N, E), the inverse of `pad`."""
        flat = rows.reshape(self.batch * self.length, rows.shape[-1])
        return flat if self.index is None else select_rows(flat, self.index)


def is_right_padded(valid_mask: Tensor) -> bool:
    """Return whether every row of (B, S) has all its valid positions first.

    The host waits for an accelerator.
    """
    return not bool((valid_mask[:, 1:] & ~valid_mask[:, :-1]).any())


def masked_layout(valid_mask: Tensor) -> TokenLayout:
    """Return the layout of a batch with padding anywhere: left, right or in between.

    A row behaves as if its invalid positions were removed: rotary positions count valid tokens, and no valid
    query sees an invalid key. An invalid query also sees itself, so that no row of the softmax is empty.

    Args:
        valid_mask: (B, S) bool.
    """
    batch, length = valid_mask.shape
    causal = torch.ones(length, length, dtype=torch.bool, device=valid_mask.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=valid_mask.device)
    mask = (causal & valid_mask[:, None, :]) | itself
    positions = (valid_mask.long().cumsum(1) - 1).clamp_min(0)
    return TokenLayout(batch=batch, length=length, positions=positions, mask=mask[:, None])


class _SelectRows(torch.autograd.Function):
    """`index_select` of distinct rows, whose backward pass copies rows instead of adding them one by one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.count, grads[0].shape[1]).index_copy_(0, index, grads[0]), None


def select_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Return the rows (T, E) of (N, E) at `index` (T,), which must be distinct."""
    return cast(Tensor, _SelectRows.apply(rows, index))
