"""Token-weighted means, summed in float64."""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override


class TokenMean(Metric):
    """Loss per label token over a whole evaluation, and bits per byte if the bytes are known.

    Sums of loss, tokens and bytes are kept in float64 and added over ranks. So the result does not depend on
    how the sequences were batched, or which rank evaluated them.

    Args:
        groups: Number of kinds of text that are also evaluated separately.

    Example:
        >>> metric = TokenMean()
        >>> metric.update(torch.tensor(2.0), 1)
        >>> metric.update(torch.tensor(90.0), 9)
        >>> float(metric.compute()["loss"])
        9.2
    """

    full_state_update = False
    loss_sum: Tensor
    tokens: Tensor
    bytes: Tensor
    bytes_loss_sum: Tensor

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        for name in ("loss_sum", "tokens", "bytes", "bytes_loss_sum"):
            self.add_state(name, torch.zeros(groups, dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def _apply(self, *args: Any, **kwargs: Any) -> "TokenMean":
        """Follow a module to another device, but not to half precision."""
        super()._apply(*args, **kwargs)
        for name in self._defaults:
            setattr(self, name, getattr(self, name).double())
            self._defaults[name] = cast(Tensor, self._defaults[name]).double()
        return self

    @override
    def update(self, loss_sum: Tensor, tokens: int | Tensor, bytes: int | Tensor | None = None) -> None:
        """Add a batch.

        Args:
            loss_sum: Summed cross entropy in nats, (groups,), or 0-d for one group.
            tokens: Number of labels in the sum, same shape.
            bytes: Bytes of text that these labels stand for, same shape; None if unknown.
        """
        self.loss_sum += loss_sum.detach().double()
        self.tokens += tokens
        if bytes is not None:
            self.bytes += bytes
            self.bytes_loss_sum += loss_sum.detach().double()

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return `loss` (nats per token) and, if bytes are known, `bits_per_byte`; 0-d float64.

        Also returns `group_loss`, `group_bits_per_byte` and `group_tokens`, (groups,). Without tokens a loss
        is NaN.
        """
        means = {
            "loss": self.loss_sum.sum() / self.tokens.sum(),
            "group_loss": self.loss_sum / self.tokens,
            "group_tokens": self.tokens.clone(),
        }
        if float(self.bytes.sum()):
            bits = self.bytes_loss_sum / math.log(2)
            means["bits_per_byte"] = bits.sum() / self.bytes.sum()
            means["group_bits_per_byte"] = bits / self.bytes
        return means
