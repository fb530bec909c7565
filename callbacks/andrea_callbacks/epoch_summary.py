"""A summary of each epoch, over the updates that changed weights."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from andrea_callbacks.hooks.reports import ReportCallback, UpdateReport


class EpochSummary(ReportCallback):
    """Prints a summary at the end of every epoch, over the updates that changed weights.

    Five figures are also in `last`: `loss` (token mean), `tokens`, `updates`, `last_grad_norm` (before
    clipping) and `last_used_lr`. A resume within an epoch continues them.

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
        """Reset what an earlier fit left."""
        self.last: dict[str, float | int] = {}
        self._reports: list[tuple[Any, int]] = []
        self._loss_sum = 0.0
        self._tokens = 0
        self._updates = 0
        self._norm: Any = float("nan")
        self._lr = float("nan")

    @override
    def on_report(self, trainer: pl.Trainer, report: UpdateReport) -> None:
        """Add an update to the mean if it changed weights."""
        if not report.is_applied:
            return
        self._reports.append((report.loss, int(report.tokens)))
        self._norm, self._lr = report.grad_norm, float("nan") if report.lr is None else report.lr
        if len(self._reports) >= 100:
            self._add_up()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print and record the figures, then start over."""
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
