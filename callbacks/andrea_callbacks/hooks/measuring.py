"""Facts before an optimizer's step: the norm of its gradients, a coming clip, the loss scale."""

from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from andrea_callbacks.hooks.packages import overrides
from andrea_callbacks.hooks.protocols import ClipsGradients, MeasuresGradients, reports_updates
from andrea_callbacks.numerics.gradient_norm import GradientNorm, NormCache

HARD_CLIP = 0.5
"""Coefficients below this count as a hard clip: the norm was more than twice the threshold."""

FALLING_SCALE_UPDATES = 5
"""Consecutive overflows after which a falling loss scale is worth a warning."""

_norms = NormCache()


def measured_norm(trainer: pl.Trainer, optimizer: Optimizer) -> GradientNorm:
    """Return the norm of an optimizer's current gradients, measured once for all callers.

    The module or the strategy measures if it can. Otherwise the norm is measured here and cached until a
    gradient is replaced or written to.
    """
    module = trainer.lightning_module
    for source in (module if reports_updates(module) else None, trainer.strategy):
        if isinstance(source, MeasuresGradients):
            return source.gradient_norm(optimizer)
    return _norms.norm(optimizer)


def optimizer_place(trainer: pl.Trainer, optimizer: Optimizer) -> str:
    """Return an optimizer's index among the trainer's, as a string key."""
    return next((str(at) for at, each in enumerate(trainer.optimizers) if each is optimizer), "0")


def scaler_of(trainer: pl.Trainer) -> torch.amp.GradScaler | None:
    """Return the trainer's GradScaler, or None."""
    return getattr(trainer.precision_plugin, "scaler", None)


def remaining_scale(trainer: pl.Trainer, optimizer: Optimizer) -> float:
    """Return the GradScaler's scale if the gradients still carry it before the step, else 1.

    Lightning leaves the gradients of a fused optimizer scaled, unless the module unscales them itself.
    """
    scaler = scaler_of(trainer)
    if scaler is None or is_unscaled(scaler, optimizer):
        return 1.0
    return float(scaler.get_scale())


def loss_scale(trainer: pl.Trainer, optimizer: Optimizer) -> Tensor | float:
    """Return the scale that the gradients carry now, 1 if none, without waiting for the device."""
    scaler = scaler_of(trainer)
    if scaler is None or is_unscaled(scaler, optimizer):
        return 1.0
    scale: Any = getattr(scaler, "_scale", None)  # what get_scale reads, and waits for
    return scale if isinstance(scale, Tensor) else float(scaler.get_scale())


def is_unscaled(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Return whether a GradScaler has unscaled the gradients for the step to come."""
    states = cast("dict[int, dict[str, Any]]", getattr(scaler, "_per_optimizer_states", {}))
    stage = states[id(optimizer)].get("stage") if id(optimizer) in states else None
    return getattr(stage, "name", "READY") != "READY"


def clip_threshold(trainer: pl.Trainer, pl_module: pl.LightningModule) -> float | None:
    """Return the global norm that the module or Lightning is about to clip gradients to.

    `inf` means no clipping. None means that it is unknown: under other manual optimization, if the module
    overrides `configure_gradient_clipping` or `on_before_optimizer_step`, or when clipping by value.
    """
    if reports_updates(pl_module):
        bound = cast(Any, getattr(pl_module, "max_norm", None))
        return float(bound) if bound is not None else float("inf")
    if not pl_module.automatic_optimization or overrides(pl_module, "configure_gradient_clipping"):
        return None
    if not trainer.gradient_clip_val:  # the module's hook comes after the callbacks', and may clip
        return None if overrides(pl_module, "on_before_optimizer_step") else float("inf")
    return float(trainer.gradient_clip_val) if trainer.gradient_clip_algorithm in (None, "norm") else None


def automatic_coefficient(trainer: pl.Trainer, pl_module: pl.LightningModule, norm: Tensor) -> Tensor | None:
    """Return the coefficient that Lightning is about to apply, None if it is unknown."""
    max_norm = clip_threshold(trainer, pl_module)
    if max_norm is None:
        return None
    if max_norm == float("inf"):
        return torch.ones_like(norm)
    added = 0.0 if isinstance(trainer.strategy, ClipsGradients) else 1e-6  # by torch.nn.utils.clip_grad_norm_
    return (max_norm / (norm + added)).clamp(max=1.0)
