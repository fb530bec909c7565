"""Gradients that something other than a clip changed, so that their norm before it is not known."""

from typing import cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor


class ChangedGradients:
    """Warns once of a gradient that was changed unseen; what the device doubts is read later, all at once.

    Args:
        category: Of the warning.
    """

    def __init__(self, category: type[Warning]) -> None:
        self._category = category
        self._doubts: list[tuple[int, Tensor]] = []
        self._has_warned = False

    def doubt(self, update: int, doubt: Tensor) -> None:
        """Keep what the device says of an update: 0-d bool, whether its gradient was changed."""
        self._doubts.append((update, doubt))

    def read(self) -> None:
        """Warn if a gradient turns out to have been changed in a way that torch does not count."""
        doubts, self._doubts = self._doubts, []
        if doubts and not self._has_warned:
            found = cast("list[bool]", torch.stack([each for _, each in doubts]).tolist())
            first = next((update for (update, _), doubt in zip(doubts, found, strict=True) if doubt), None)
            if first is not None:
                self.warn(first)

    def warn(self, update: int) -> None:
        """Warn of an update, if that is the first."""
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"update {update}: the gradients were changed after the backward pass, and not by a clip of "
                "torch, Lightning or the strategy, or they were clipped before the last backward pass. "
                "Their norm before the change is not known: train/grad_norm is left out of this update and "
                "of others like it. Clip once, with torch.nn.utils.clip_grad_norm_ or self.clip_gradients, "
                "and scale the loss instead of the gradients",
                category=self._category,
            )

    def clear(self) -> None:
        """Let go of what was not read."""
        self._doubts.clear()
