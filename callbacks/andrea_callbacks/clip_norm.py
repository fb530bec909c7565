"""The gradient's norm before clipping, and what the clip made of it."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from andrea_callbacks.gradients import GradientNorm, gradient_norm, optimizer_parameters
from andrea_callbacks.protocols import ClipsGradients, ReportsUpdates
from andrea_callbacks.updates import ReportCallback

UNCLIPPED = 1.0 - 1e-6
"""Coefficients under this count as a clip."""


class PreClipNorm(ReportCallback):
    """Records the global L2 norm of the gradient before clipping, after it, and how often the clip bites.

    With a module that reports its updates the figures are the module's. In any other module the norm is
    measured in `on_before_optimizer_step`, which Lightning calls after the gradients were unscaled and before
    it clips. What the clip made of it is known under automatic optimization, where Lightning clips by
    `gradient_clip_val`; where a module clips by value, in its own way, or under its own manual optimization,
    the last three metrics are absent.

    With a fused optimizer under a GradScaler, Lightning leaves the gradients scaled; the norm then is that of
    the scaled gradient divided by the scale.

    Metrics recorded:
        train/grad_norm: Norm before clipping.
        train/grad_norm_clipped: Norm after clipping.
        train/clip_coefficient: The second over the first.
        train/clipped_share: Share of updates so far that were clipped; those that are not finite do not
            count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clipped: Tensor | float = 0.0
        self._counted: Tensor | float = 0.0

    @override
    def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
        """Record what the module measured."""
        norm = report.get("grad_norm")
        if norm is not None:
            self._record(trainer, report["update"], norm, report.get("clip_coefficient"))

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Measure the norm where the module does not report it."""
        if isinstance(pl_module, ReportsUpdates):
            return
        norm = measured_norm(trainer, optimizer).total / _remaining_scale(trainer, optimizer)
        self._record(trainer, trainer.global_step + 1, norm, _automatic_coefficient(trainer, pl_module, norm))

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the counts behind the share."""
        return {"clipped": float(self._clipped), "counted": float(self._counted)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting."""
        self._clipped, self._counted = state_dict["clipped"], state_dict["counted"]

    def _record(self, trainer: pl.Trainer, step: int, norm: Tensor, coefficient: Tensor | None) -> None:
        values: dict[str, Tensor | float] = {"train/grad_norm": norm}
        if coefficient is not None:
            is_finite = torch.isfinite(norm)
            self._clipped = self._clipped + (is_finite & (coefficient < UNCLIPPED)).double()
            self._counted = self._counted + is_finite.double()
            values |= {
                "train/grad_norm_clipped": norm * coefficient,
                "train/clip_coefficient": coefficient,
                "train/clipped_share": self._clipped / self._counted.clamp(min=1.0),
            }
        self.record(trainer, step, values)


def measured_norm(trainer: pl.Trainer, optimizer: Optimizer) -> GradientNorm:
    """Return the norm of an optimizer's gradients, from the strategy where it has measured it already."""
    strategy = trainer.strategy
    if isinstance(strategy, ClipsGradients):
        return strategy.gradient_norm(optimizer)
    return gradient_norm(optimizer_parameters(optimizer))


def _automatic_coefficient(trainer: pl.Trainer, pl_module: pl.LightningModule, norm: Tensor) -> Tensor | None:
    """Return the coefficient that Lightning is about to apply, None where it cannot be known."""
    overridden = (
        type(pl_module).configure_gradient_clipping is not pl.LightningModule.configure_gradient_clipping
    )
    if not pl_module.automatic_optimization or overridden:
        return None
    max_norm = trainer.gradient_clip_val
    added = 0.0 if isinstance(trainer.strategy, ClipsGradients) else 1e-6  # by torch.nn.utils.clip_grad_norm_
    if not max_norm:
        return torch.ones_like(norm)
    if trainer.gradient_clip_algorithm not in (None, "norm"):
        return None
    return (max_norm / (norm + added)).clamp(max=1.0)


def _remaining_scale(trainer: pl.Trainer, optimizer: Optimizer) -> float:
    """Return the GradScaler's scale where the gradients still carry it."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    handles_unscaling = getattr(optimizer, "_step_supports_amp_scaling", False)
    return float(scaler.get_scale()) if scaler is not None and handles_unscaling else 1.0
