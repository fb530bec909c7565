"""Warns of gradients changed by something other than a clip: their norm before the change is unknown."""

from typing import cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor


class ChangedGradients:
    """Warns once of a gradient that was changed unseen. Flags on the device are read later, all at once.

    Args:
        category: The warning's category.
    """

    def __init__(self, category: type[Warning]) -> None:
        self._category = category
        self._doubts: list[tuple[int, Tensor]] = []
        self._has_warned = False

    def doubt(self, update: int, doubt: Tensor) -> None:
        """Keep an update's flag on the device: 0-d bool, whether its gradient was changed."""
        self._doubts.append((update, doubt))

    def read(self) -> None:
        """Read the flags, and warn if a gradient was changed in a way that torch does not count."""
        doubts, self._doubts = self._doubts, []
        if doubts and not self._has_warned:
            found = cast("list[bool]", torch.stack([each for _, each in doubts]).tolist())
            first = next((update for (update, _), doubt in zip(doubts, found, strict=True) if doubt), None)
            if first is not None:
                self.warn(first)

    def warn(self, update: int) -> None:
        """Warn of an update, unless a warning was given before."""
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
        """Drop the unread flags."""
        self._doubts.clear()
