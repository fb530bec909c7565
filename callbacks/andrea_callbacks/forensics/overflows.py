"""Counts overflows of a GradScaler, which are normal unless they never end."""

import lightning.pytorch as pl

from andrea_callbacks.forensics.investigation import NonFiniteError, NonFiniteWarning
from andrea_callbacks.hooks.measuring import FALLING_SCALE_UPDATES, scaler_of
from andrea_callbacks.hooks.terminal import warn


class Overflows:
    """Counts the consecutive overflows of each optimizer.

    Args:
        limit: Consecutive overflows above which an error is raised; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.in_a_row: dict[str, int] = {}
        """By the optimizer's place."""

    def follow(self, trainer: pl.Trainer, place: str, overflows: bool) -> float | None:
        """Count an update of an optimizer and return the loss scale, None without a GradScaler.

        Raises:
            NonFiniteError: If there were more than `limit` consecutive overflows.
        """
        scaler = scaler_of(trainer)
        if scaler is None:
            return None
        scale = float(scaler.get_scale())
        self.in_a_row[place] = count = self.in_a_row.get(place, 0) + 1 if overflows else 0
        update = trainer.global_step + 1
        told = f"update {update}: {count} overflows in a row, the loss scale is down to {scale:g}"
        if self.limit is not None and count > self.limit:
            raise NonFiniteError(
                f"{told}: the gradients are not finite whatever it is; weights and optimizer state are as "
                "before. FiniteGuard's max_consecutive bears more"
            )
        if count == FALLING_SCALE_UPDATES:
            warn(f"{told}; check the learning rate, or use bf16-mixed", category=NonFiniteWarning)
        return scale
