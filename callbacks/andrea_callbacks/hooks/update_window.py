"""Keeps the micro-batches of the current update, so that reports can name what went into it.

on_train_batch_start ──> micro-batches, random state      those of a Window, or one batch after the other if
on_before_backward   ──> losses                            Lightning or a training_step accumulates
on_train_batch_end   ──> the update is over if global_step moved
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from andrea_callbacks.hooks.measuring import scaler_of
from andrea_callbacks.hooks.optimizer_steps import StepCallback
from andrea_callbacks.hooks.protocols import micro_batches_of
from andrea_callbacks.numerics.host_transfer import widest
from andrea_callbacks.numerics.rng_state import RandomState

MOST_BATCHES = 64
"""Batches kept while no optimizer steps, unless Lightning accumulates more."""

MOST_LOSSES = 4096
"""Losses kept while no optimizer steps."""


@dataclass(slots=True, kw_only=True)
class UpdateWindow:
    """The inputs of an update."""

    number: int = 0
    """The update's number, from 1."""
    micro_batches: list[Any] = field(default_factory=list[Any])
    """On the module's device."""
    states: list[RandomState | None] = field(default_factory=list[RandomState | None])
    """The random state before each micro-batch; None if the previous micro-batch left it."""
    losses: list[Tensor] = field(default_factory=list[Tensor])
    """Losses that backward passes started from, 0-d, on the device; with a GradScaler still scaled."""
    modes: list[tuple[nn.Module, bool]] = field(default_factory=list[tuple[nn.Module, bool]])
    """Every module, and whether it was in training mode."""
    is_whole: bool = True
    """Whether all micro-batches were kept."""


class WindowCallback(StepCallback):
    """The base of callbacks that need the micro-batches of the current update.

    Args:
        keeps_batches: Whether to keep micro-batches and random states, or only losses.
        name: Tells instances in the same trainer apart.
    """

    def __init__(self, keeps_batches: bool = True, name: str | None = None) -> None:
        super().__init__(name)
        self._keeps_batches = keeps_batches
        self.window = UpdateWindow()
        """The current update."""
        self.previous = UpdateWindow()
        """The previous update, whose outcome may still be pending."""
        self._step = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drop the state of an update that was cut short."""
        super().on_train_start(trainer, pl_module)
        self.window, self.previous = UpdateWindow(), UpdateWindow()
        self._step = trainer.global_step

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the micro-batches and the random state before them."""
        window = self.window
        window.number = trainer.global_step + 1
        if not self._keeps_batches:
            return
        parts = micro_batches_of(batch)
        most = max(MOST_BATCHES, trainer.accumulate_grad_batches, len(parts))
        if len(window.micro_batches) + len(parts) > most:  # somebody steps where nobody can see it
            window.micro_batches.clear()
            window.states.clear()
            window.losses.clear()
            window.is_whole = False
        window.micro_batches += [_kept(part) for part in parts]
        window.modes = [(module, module.training) for module in pl_module.modules()]
        window.states += [RandomState(pl_module.device), *[None] * (len(parts) - 1)]

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Keep a loss, without waiting for it."""
        if len(self.window.losses) >= MOST_LOSSES:
            self.window.losses.clear()
        self.window.losses.append(loss.detach())

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start a new update if an optimizer stepped."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self.previous, self.window = self.window, UpdateWindow()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Release the micro-batches."""
        super().on_train_end(trainer, pl_module)
        self.window, self.previous = UpdateWindow(), UpdateWindow()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Release the micro-batches."""
        super().on_exception(trainer, pl_module, exception)
        self.window, self.previous = UpdateWindow(), UpdateWindow()

    def window_loss(self, trainer: pl.Trainer) -> Tensor | None:
        """Return the sum of this rank's losses since the last step, unscaled; None without a loss."""
        losses = [each.to(widest(each.device)) for each in self.window.losses if not each.ndim]
        scaler = scaler_of(trainer)
        if not losses:
            return None
        total = torch.stack(losses).sum()
        return total if scaler is None else total / scaler.get_scale()

    def window_of(self, update: int) -> UpdateWindow | None:
        """Return the window of an update, None if it is gone or was never complete."""
        for window in (self.window, self.previous):
            first = window.number
            if window.micro_batches and window.is_whole and first <= update:
                return window
        return None


def _kept(micro_batch: Any) -> Any:
    """Return a copy of a dict, so that a training step may remove keys; other batches as they are."""
    return dict(cast("Mapping[Any, Any]", micro_batch)) if type(micro_batch) is dict else micro_batch
