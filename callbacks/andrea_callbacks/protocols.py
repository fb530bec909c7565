"""What a module, a strategy or a callback may offer here. All of it is optional and found by name alone."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from andrea_callbacks.gradients import GradientNorm


@runtime_checkable
class ReportsUpdates(Protocol):
    """A module that measures its own updates; callbacks take its figures instead of computing them again.

    It hands every report to `publish_report`, in the order of updates, each once its outcome is known.
    """

    update_report: Mapping[str, Any] | None
    """The last report published, None before the first.

    Keys: `update` int, from 1; `loss` token mean, 0-d tensor; `tokens` int; `grad_norm` before clipping,
    `grad_norm_clipped` and `clip_coefficient`, 0-d tensors; `lr` float; `outcome`, one of `applied`, `empty`,
    `nonfinite_skip`, `scaler_skip`, `nonfinite_raise`; `skipped` int, updates so far that changed no weight;
    `loss_scale` float, with a GradScaler; `nonfinite` str or None, which tensor was at fault. What is not
    known is absent. What `training_step` returns has the same keys; there the outcome is `pending` where the
    module learns of it only during the next update.
    """


@runtime_checkable
class SettlesUpdates(Protocol):
    """A module that may learn of an update's outcome after its training step."""

    def settle_update(self) -> None:
        """Wait for the outcome of the last update, and publish its report."""
        ...


@runtime_checkable
class TakesReports(Protocol):
    """A callback that follows a module's updates."""

    def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
        """Do what there is to do with a report; `report["update"]` is its step."""
        ...


@runtime_checkable
class ClipsGradients(Protocol):
    """A strategy that measures and clips gradients itself."""

    def gradient_norm(self, optimizer: Optimizer) -> GradientNorm:
        """Return norms and non-finite counts of the gradients; kept until a gradient changes."""
        ...

    def clip_gradients(self, optimizer: Optimizer, max_norm: float, hold: Tensor | None = None) -> Tensor:
        """Clip the gradients, at the latest in the optimizer's next step, and return the coefficient, 0-d.

        With `hold`, 0-d float32, the device holds that step where it is 1: nothing changes.
        """
        ...


@runtime_checkable
class GeneratesText(Protocol):
    """A module that continues text."""

    def generate(
        self, prompts: list[str], max_new_tokens: int, generator: torch.Generator | None = None
    ) -> list[str]:
        """Return a continuation of each prompt; an empty prompt starts a document."""
        ...
