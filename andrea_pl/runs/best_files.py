"""Keeps track of a run's best checkpoints by a logged metric."""

import math
from collections.abc import Iterable
from typing import Any, Literal

import lightning.pytorch as pl
from torch import Tensor

from andrea_pl.errors import UserError


class BestFiles:
    """Names of the best files and their scores.

    Args:
        monitor: The metric; None keeps nothing.
        mode: Whether the smallest (`min`) or the largest (`max`) value is best.
        keep: Number of files to keep.
    """

    def __init__(self, monitor: str | None, mode: Literal["min", "max"], keep: int) -> None:
        self.monitor = monitor
        self.mode = mode
        self.keep = keep
        self.scores: dict[str, float] = {}

    def read(self, trainer: pl.Trainer) -> float | None:
        """Return rank zero's metric if it is among the best, else None; NaN is never best.

        Raises:
            UserError: If the module has not logged it.
        """
        if self.monitor is None:
            return None
        value: Any = trainer.callback_metrics.get(self.monitor)
        if value is None:
            known = ", ".join(sorted(trainer.callback_metrics)) or "none"
            raise UserError(
                f"DurableCheckpoint: there is no metric {self.monitor!r} to monitor; known are {known}"
            )
        score = float(value.detach() if isinstance(value, Tensor) else value)
        score = float(trainer.strategy.broadcast(score))  # ranks that log without sync_dist have others
        return None if math.isnan(score) or not self._is_among(score) else score

    def add(self, name: str, score: float) -> None:
        """Add a file, and drop the worst of too many."""
        self.scores[name] = score
        self.scores = {each: self.scores[each] for each in self.ranked()[: self.keep]}

    def retain(self, names: Iterable[str]) -> None:
        """Drop the files that are not among these."""
        self.scores = {name: self.scores[name] for name in self.scores if name in set(names)}

    def ranked(self) -> list[str]:
        """Return the names, the best first."""
        sign = 1.0 if self.mode == "min" else -1.0
        return sorted(self.scores, key=lambda name: sign * self.scores[name])

    def _is_among(self, score: float) -> bool:
        if len(self.scores) < self.keep:
            return True
        last = self.scores[self.ranked()[-1]]
        return score < last if self.mode == "min" else score > last

    def state_dict(self) -> dict[str, Any]:
        """Return the scores and their metric."""
        return {"monitor": self.monitor, "mode": self.mode, "best": dict(self.scores)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the saved scores, unless they belong to another metric."""
        if (state["monitor"], state["mode"]) == (self.monitor, self.mode):
            self.scores = dict(state["best"])
