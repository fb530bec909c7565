"""Callbacks that follow a module's reports of its own updates: scalars, the epoch's summary."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from andrea_callbacks.protocols import SettlesUpdates, TakesReports
from andrea_callbacks.scalars import ScalarCallback


def publish_report(trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
    """Hand the report of an update to the datamodule, and then to every callback, that takes reports."""
    takers = [cast(Any, trainer).datamodule, *cast("list[Callback]", cast(Any, trainer).callbacks)]
    for taker in takers:
        if isinstance(taker, TakesReports):
            taker.take_report(trainer, report)


def settle(pl_module: pl.LightningModule) -> None:
    """Have a module publish the report of its last update, where its outcome was not known yet."""
    if isinstance(pl_module, SettlesUpdates):
        pl_module.settle_update()


class ReportCallback(ScalarCallback):
    """A callback that takes the report of every update once, that of an update which raised included."""

    def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
        """Do what there is to do with a report; `report["update"]` is its step."""
        raise NotImplementedError

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """See to it that the epoch's last update is known."""
        settle(pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """See to it that the last update is known, and write it."""
        settle(pl_module)
        super().on_train_end(trainer, pl_module)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the last update, if the device can still tell what became of it."""
        with suppress(Exception):
            settle(pl_module)
        super().on_exception(trainer, pl_module, exception)


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
    def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
        """Record the figures that are known."""
        values = {f"train/{key}": report[key] for key in self.KEYS if report.get(key) is not None}
        self.record(trainer, report["update"], values)


class EpochSummary(ReportCallback):
    """Says at the end of every epoch how it went, over the updates that changed weights.

    The five figures are in `last` too: `loss` (token mean), `tokens`, `updates`, `last_grad_norm` (before
    clipping), `last_used_lr`. They are continued when a run is resumed within an epoch.

    Args:
        name: Tells instances in the same trainer apart.

    Metrics recorded:
        epoch/loss: Token mean over the epoch.
        epoch/tokens: Label tokens of the epoch.
        epoch/updates: Updates that changed weights.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.reset()

    @override
    def reset(self) -> None:
        """Forget an earlier fit."""
        self.last: dict[str, float | int] = {}
        self._reports: list[tuple[Any, int]] = []
        self._loss_sum = 0.0
        self._tokens = 0
        self._updates = 0
        self._norm: Any = float("nan")
        self._lr = float("nan")

    @override
    def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
        """Add an update that changed weights; others have no part in the mean."""
        if report["outcome"] != "applied":
            return
        self._reports.append((report["loss"], report["tokens"]))
        self._norm, self._lr = report["grad_norm"], report.get("lr", float("nan"))
        if len(self._reports) >= 100:
            self._add_up()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say and record the figures, and start afresh."""
        super().on_train_epoch_end(trainer, pl_module)
        self._add_up()
        if not self._updates:
            return
        self.last = {
            "loss": self._loss_sum / self._tokens,
            "tokens": self._tokens,
            "updates": self._updates,
            "last_grad_norm": float(self._norm),
            "last_used_lr": self._lr,
        }
        rank_zero_info(
            f"epoch {trainer.current_epoch + 1}: loss {self.last['loss']:.4f} over {self._tokens:,} tokens "
            f"in {self._updates:,} updates, last norm {self.last['last_grad_norm']:.4f}, last lr "
            f"{self._lr:.2e}"
        )
        figures = {f"epoch/{key}": self.last[key] for key in ("loss", "tokens", "updates")}
        self.record(trainer, trainer.global_step, figures)
        self._loss_sum, self._tokens, self._updates = 0.0, 0, 0

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the unfinished epoch."""
        self._add_up()
        return {
            "loss_sum": self._loss_sum,
            "tokens": self._tokens,
            "updates": self._updates,
            "last_grad_norm": float(self._norm),
            "last_used_lr": self._lr,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the unfinished epoch."""
        self._loss_sum, self._tokens, self._updates = (
            state_dict[key] for key in ("loss_sum", "tokens", "updates")
        )
        self._norm, self._lr = state_dict["last_grad_norm"], state_dict["last_used_lr"]

    def _add_up(self) -> None:
        for loss, tokens in self._reports:
            self._loss_sum += float(loss) * tokens
            self._tokens += tokens
        self._updates += len(self._reports)
        self._reports.clear()
