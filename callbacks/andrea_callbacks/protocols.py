"""What a module or a strategy may offer to these callbacks. All of it is optional and found by name alone."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer


@runtime_checkable
class ReportsUpdates(Protocol):
    """A module that measures its own updates; callbacks read its figures instead of computing them again."""

    update_report: Mapping[str, Any] | None
    """What became of the last update attempted, None before the first. The module's `training_step` returns
    the same.

    Keys: `update` int, from 1; `loss` token mean, 0-d tensor; `tokens` int; `grad_norm` before clipping,
    `grad_norm_clipped` and `clip_coefficient`, 0-d tensors; `lr` float; `outcome`, one of `applied`, `empty`,
    `nonfinite_skip`, `scaler_skip`, `nonfinite_raise`; `skipped` int, updates so far that changed no weight;
    `loss_scale` float, with a GradScaler; `nonfinite` str or None, which tensor was at fault. What is not
    known is absent.
    """


@runtime_checkable
class ClipsGradients(Protocol):
    """A strategy that measures and clips gradients itself."""

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Return the global L2 norm of the gradients, 0-d."""
        ...

    def clip_gradients(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Scale the gradients to a norm of at most `max_norm` and return the coefficient, 0-d."""
        ...


@runtime_checkable
class GeneratesText(Protocol):
    """A module that continues text."""

    def generate(
        self, prompts: list[str], max_new_tokens: int, generator: torch.Generator | None = None
    ) -> list[str]:
        """Return a continuation of each prompt; an empty prompt starts a document."""
        ...
