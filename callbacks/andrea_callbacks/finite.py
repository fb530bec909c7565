"""NaN and Inf, flagged at the update in which they appear, with the name of the tensor."""

from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from andrea_callbacks.clip_norm import measured_norm
from andrea_callbacks.protocols import ReportsUpdates
from andrea_callbacks.updates import ReportCallback


class FiniteGuard(ReportCallback):
    """Flags NaN and Inf in the loss and in the gradients, before they reach the weights.

    With a module that reports its updates the verdict is the module's, which also decides what to do. In any
    other module every loss and the gradients before each optimizer step are looked at, which reads two flags
    an update on the host. A GradScaler's own overflow (finite loss, Inf gradient) is normal operation and not
    flagged.

    Args:
        action: In modules that do not decide themselves: `flag` warns and goes on; `raise` stops before the
            step, with weights and optimizer state as they were.

    Raises:
        ValueError: If `action` is neither.

    Metrics recorded:
        train/nonfinite: Updates so far with a NaN or Inf.
    """

    def __init__(self, action: Literal["flag", "raise"] = "flag") -> None:
        super().__init__()
        if action not in ("flag", "raise"):
            raise ValueError(f"FiniteGuard: action must be 'flag' or 'raise', got {action!r}")
        self.action = action
        self.flagged: int = 0
        """Updates so far with a NaN or Inf."""
        self._bad_loss: Tensor | None = None

    @override
    def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
        """Flag what the module found."""
        if report.get("nonfinite") is not None and report["outcome"] != "scaler_skip":
            self._flag(report["update"], report["nonfinite"])
        self.record(trainer, report["update"], {"train/nonfinite": self.flagged})

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget a loss whose update broke off."""
        self._bad_loss = None

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Look at a loss, without waiting for it."""
        if not isinstance(pl_module, ReportsUpdates):
            bad = ~torch.isfinite(loss.detach()).all()
            self._bad_loss = bad if self._bad_loss is None else self._bad_loss | bad

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Look at the gradients, and at what was seen of the losses."""
        if isinstance(pl_module, ReportsUpdates):
            return
        update = trainer.global_step + 1
        bad_loss = self._bad_loss is not None and bool(self._bad_loss)
        self._bad_loss = None
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        norm = measured_norm(trainer, optimizer)
        bad_gradient = not bool(torch.isfinite(norm.total))
        if bad_loss or (bad_gradient and not scaled):
            parts = ["the loss"] if bad_loss else []
            name = norm.first_nonfinite(pl_module) if bad_gradient else None
            parts += [f"the gradient of {name}"] if name else []
            what = " and ".join(parts) or "the norm of the gradients"
            self._flag(update, what)
            self.record(trainer, update, {"train/nonfinite": self.flagged})
            if self.action == "raise":
                raise RuntimeError(
                    f"update {update}: {what} is not finite; weights and optimizer state are as before it"
                )
        else:
            self.record(trainer, update, {"train/nonfinite": self.flagged})

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the count."""
        return {"flagged": self.flagged}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting."""
        self.flagged = state_dict["flagged"]

    def _flag(self, update: int, what: str) -> None:
        self.flagged += 1
        rank_zero_warn(f"update {update}: {what} is not finite", category=NonFiniteWarning)


class NonFiniteWarning(UserWarning):
    """A NaN or Inf was seen in a loss or a gradient."""
