"""A progress bar that counts updates."""

import time
from collections.abc import Mapping
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override

from andrea_callbacks.hooks.packages import with_twin
from andrea_callbacks.hooks.reports import UpdateReport
from andrea_callbacks.hooks.scalars import without_module


class UpdateProgressBar(TQDMProgressBar):
    """Lightning's bar with loss, norm before clipping, learning rate and tokens per second.

    Args:
        refresh_rate: Updates between two refreshes.
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._tokens = 0
        self._since = time.perf_counter()
        self._rate = 0.0
        self._report: UpdateReport | None = None
        self.__class__ = with_twin(type(self))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the module and its trainer out."""
        return without_module(cast("dict[str, Any]", super().__getstate__())) | {"_trainer": None}

    def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
        """Count the tokens."""
        del trainer
        self._report = report = UpdateReport.of(report)
        self._tokens += int(report.tokens)
        elapsed = time.perf_counter() - self._since
        if elapsed >= 1.0 or not self._rate:
            self._rate = self._tokens / elapsed
            if elapsed >= 1.0:
                self._tokens, self._since = 0, time.perf_counter()

    @override
    def on_train_start(self, *_: Any) -> None:
        """Start counting."""
        self._tokens, self._since, self._rate = 0, time.perf_counter(), 0.0
        self._report = None
        super().on_train_start(*_)

    @override
    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the figures in display order."""
        report = self._report
        if report is None:
            return super().get_metrics(trainer, pl_module)
        shown: dict[str, int | str | float | dict[str, float]] = {}
        if report.loss is not None:
            shown["loss"] = f"{float(report.loss):.3f}"
        if report.grad_norm is not None:
            shown["norm"] = f"{float(report.grad_norm):.2f}"
        if report.lr is not None:
            shown["lr"] = f"{report.lr:.1e}"
        shown["tokens/s"] = f"{self._rate:,.0f}"
        if report.skipped:
            shown["skipped"] = report.skipped
        return shown

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """End the bar's line, so that the error message starts on its own line."""
        for bar in cast("list[Any]", [self._train_progress_bar, self._val_progress_bar]):
            if bar is not None:
                bar.close()
