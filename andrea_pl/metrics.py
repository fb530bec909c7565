"""Token-weighted means, summed in float64."""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override


class TokenMean(Metric):
    """Loss per label token over a whole evaluation, and bits per byte where the bytes are known.

    Sums of loss, tokens and bytes are kept in float64 and added over ranks, so that the result depends
    neither on how the sequences were put into batches nor on who evaluated them.

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

    def __init__(self) -> None:
        super().__init__()
        for name in ("loss_sum", "tokens", "bytes", "bytes_loss_sum"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

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
            loss_sum: Summed cross entropy in nats, 0-d.
            tokens: Labels that it is summed over.
            bytes: Bytes of text that these labels stand for; None where that is not known.
        """
        self.loss_sum += loss_sum.detach().double()
        self.tokens += tokens
        if bytes is not None:
            self.bytes += bytes
            self.bytes_loss_sum += loss_sum.detach().double()

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return `loss` (nats per token) and, where bytes are known, `bits_per_byte`; 0-d float64.

        Without a single token `loss` is NaN.
        """
        means = {"loss": self.loss_sum / self.tokens}
        if float(self.bytes):
            means["bits_per_byte"] = self.bytes_loss_sum / self.bytes / math.log(2)
        return means
