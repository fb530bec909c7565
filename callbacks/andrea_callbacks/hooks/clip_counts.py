"""Counts on the device how often and how hard gradients are clipped."""

from collections import deque
from typing import Any, cast

import torch
from torch import Tensor

from andrea_callbacks.hooks.measuring import HARD_CLIP
from andrea_callbacks.hooks.scalars import Doubtful, Value
from andrea_callbacks.numerics.host_transfer import widest

UNCLIPPED = 1.0 - 1e-6
"""Coefficients under this count as a clip."""

LAST = 100
"""Updates over which hard clips are counted."""


class ClipCounts:
    """Counts updates and their clips without waiting for the device."""

    def __init__(self) -> None:
        self._clipped: Tensor | float = 0.0
        self._counted: Tensor | float = 0.0
        self._coefficients: Tensor | float = 0.0
        self._unread: list[Tensor] = []
        self._recent: deque[float] = deque(maxlen=LAST)

    def add(self, norm: Tensor, coefficient: Tensor, doubt: Tensor | None) -> dict[str, Value]:
        """Count an update and return the scalars of its clip.

        Args:
            norm: Norm before clipping, 0-d.
            coefficient: Factor on the gradients, 0-d.
            doubt: 0-d bool, whether the norm may be wrong; None if it cannot be.
        """
        counts = torch.isfinite(norm) if doubt is None else torch.isfinite(norm) & ~doubt
        is_clipped = counts & (coefficient < UNCLIPPED)
        wide = widest(norm.device)
        self._clipped = self._clipped + is_clipped.to(wide)
        self._counted = self._counted + counts.to(wide)
        self._coefficients = self._coefficients + torch.where(is_clipped, coefficient, 0.0).to(wide)
        self._unread.append(torch.where(counts, coefficient, 1.0))
        mean = torch.where(self._clipped > 0, self._coefficients / self._clipped.clamp(min=1.0), 1.0)
        return {
            "train/grad_norm_clipped": trusted(norm * coefficient, doubt),
            "train/clip_coefficient": trusted(coefficient, doubt),
            "train/clip_coefficient_mean": mean,
            "train/clip_fraction": self._clipped / self._counted.clamp(min=1.0),
        }

    def hard_clips(self) -> int | None:
        """Return how many of the last `LAST` updates were clipped hard, or None between two readings.

        Waits for the device once per `LAST / 2` updates.
        """
        if len(self._unread) < LAST // 2:
            return None
        self._read()
        return None if len(self._recent) < LAST else sum(each < HARD_CLIP for each in self._recent)

    def _read(self) -> None:
        if self._unread:
            self._recent.extend(cast("list[float]", torch.stack(self._unread).tolist()))
            self._unread.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        self._read()
        return {
            "clipped": float(self._clipped),
            "counted": float(self._counted),
            "coefficients": float(self._coefficients),
            "recent": list(self._recent),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting."""
        self._clipped, self._counted = state["clipped"], state["counted"]
        self._coefficients = state.get("coefficients", 0.0)
        self._recent = deque(state.get("recent", ()), LAST)


def trusted(value: Tensor, doubt: Tensor | None) -> Value:
    """Return a value that is not written if its flag on the device turns out to be set."""
    return value if doubt is None else Doubtful(value.detach(), doubt)
