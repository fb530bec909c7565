"""The figures that a module reports of each update, as scalars."""

import lightning.pytorch as pl
from typing_extensions import override

from andrea_callbacks.hooks.reports import ReportCallback, UpdateReport


class UpdateLog(ReportCallback):
    """Writes what a module reports of each update, at the update's own number.

    `log_every_n_steps` has no influence.

    Metrics recorded:
        train/loss: Token mean of the update; absent where there was no token, NaN where it was not finite.
        train/tokens: Label tokens of the update, over all ranks.
        train/lr: Learning rate of the first parameter group, the one that this update used.
        train/skipped: Updates so far that changed no weight.
        train/loss_scale: The GradScaler's scale, where there is one.
    """

    KEYS = ("loss", "tokens", "lr", "skipped", "loss_scale")

    @override
    def on_report(self, trainer: pl.Trainer, report: UpdateReport) -> None:
        """Record the figures that are known."""
        values = {f"train/{key}": report[key] for key in self.KEYS if key in report}
        self.record(trainer, report.update, values)
