"""The schedule of a run whose length is known only once it starts."""

import math
from typing import Any, cast

import lightning.pytorch as pl

from andrea_pl.errors import UserError
from andrea_pl.optim.schedules import FactorLR, check_schedule, warmup_cosine


class WarmupCosine:
    """Linear warm-up, then half a cosine over all updates of the run.

    Args:
        warmup_updates: Updates of the warm-up.
        min_lr_ratio: Learning rate at the end, as a factor of the base rate.
    """

    def __init__(self, warmup_updates: int, min_lr_ratio: float) -> None:
        self.warmup_updates = warmup_updates
        self.min_lr_ratio = min_lr_ratio
        self.total_updates: int | None = None
        """Length of the run in updates, None before it starts."""

    def factor(self, index: int) -> float:
        """Return the factor of an update; the run's length matters, and is known, from the second on."""
        total = self.total_updates or max(index, self.warmup_updates) + 1
        return warmup_cosine(index, total, self.warmup_updates, self.min_lr_ratio)

    def begin(self, trainer: pl.Trainer) -> None:
        """Set the run's length, now that loops and loaders are restored. Without this schedule, do nothing.

        Raises:
            UserError: If the run has no length, or is no longer than the warm-up.
        """
        configs = trainer.lr_scheduler_configs
        scheduler = configs[0].scheduler if configs else None
        if any(map(self._is_own, (scheduler, *getattr(scheduler, "_schedulers", ())))):
            self.total_updates = _count_updates(trainer)
            check_schedule(self.total_updates, self.warmup_updates, self.min_lr_ratio)
        if self._is_own(scheduler):
            cast(FactorLR, scheduler).refresh()  # a checkpoint has the rate of the run that wrote it

    def _is_own(self, scheduler: Any) -> bool:
        return isinstance(scheduler, FactorLR) and scheduler.lr_lambdas[0] == self.factor


def _count_updates(trainer: pl.Trainer) -> int:
    """Return the updates of the run: windows an epoch times epochs, no more than `max_steps`."""
    limits = [trainer.max_steps] if trainer.max_steps > 0 else []
    windows, epochs = trainer.num_training_batches, trainer.max_epochs
    if epochs is not None and epochs > 0 and math.isfinite(windows):
        limits.append(int(windows) * epochs)
    if not limits:
        raise UserError(
            "the length of the cosine schedule is not known: set trainer.max_steps, or trainer.max_epochs "
            "with a loader that has a length, or `schedule`=constant"
        )
    return min(limits)
