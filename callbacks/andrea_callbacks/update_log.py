"""Writes a module's update reports as scalars."""

import lightning.pytorch as pl
from typing_extensions import override

from andrea_callbacks.hooks.reports import ReportCallback, UpdateReport


class UpdateLog(ReportCallback):
    """Writes the figures of every update report, with the update's number as the step.

    `log_every_n_steps` has no effect.

    Metrics recorded:
        train/loss: Token mean of the update; absent without label tokens, NaN if it was not finite.
        train/tokens: Label tokens of the update, over all ranks.
        train/lr: Learning rate that this update used in the first parameter group.
        train/skipped: Updates so far that left the weights unchanged.
        train/loss_scale: The GradScaler's scale, if there is one.
    """

    KEYS = ("loss", "tokens", "lr", "skipped", "loss_scale")

    @override
    def on_report(self, trainer: pl.Trainer, report: UpdateReport) -> None:
        """Record the figures that are known."""
        values = {f"train/{key}": report[key] for key in self.KEYS if key in report}
        self.record(trainer, report.update, values)
