"""Leaves the division of gradients, or skipping, to an optimizer's next step.

grad_scale   0-d float32: a fused step divides every gradient by it
found_inf    0-d float32: if it is 1, the step changes nothing
"""

from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from andrea_callbacks.numerics.gradient_norm import (
    GradientMoment,
    NormCache,
    optimizer_parameters,
    present_gradients,
)

SCALED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients that a fused step can divide by a float32 number without losing digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fold:
    """What was set for an optimizer's next step: for which gradients, and whether we set `found_inf`."""

    moment: GradientMoment
    skips: bool


class NextStep:
    """Sets a divisor and a skip flag for optimizers' next steps.

    Both are removed after the step, or when the gradients that they were meant for are gone.

    Args:
        norms: The cache that identifies these gradients.
    """

    def __init__(self, norms: NormCache) -> None:
        self._norms = norms
        self._folded: WeakKeyDictionary[Optimizer, _Fold] = WeakKeyDictionary()
        self._watched: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()

    def put(self, optimizer: Optimizer, divisor: Tensor | None, skip: Tensor | None) -> None:
        """Make the next step divide by `divisor`, and change nothing if `skip` is 1."""
        if divisor is None and skip is None:
            return
        folded = cast(Any, optimizer)
        folded.grad_scale = divisor
        if skip is not None:
            folded.found_inf = skip
        self._folded[optimizer] = _Fold(moment=self._norms.moment(optimizer), skips=skip is not None)

    def remove(self, optimizer: Optimizer) -> None:
        """Remove what was set for the optimizer's next step."""
        fold = self._folded.pop(optimizer, None)
        if fold is None:
            return
        folded = cast(Any, optimizer)
        if not fold.skips and hasattr(optimizer, "found_inf"):
            folded.grad_scale = None  # a GradScaler is at work, and deletes both after the step
            return
        del folded.grad_scale
        if fold.skips:
            del folded.found_inf

    def divisor_of(self, optimizer: Optimizer) -> Tensor | None:
        """Return the divisor of the next step, None if none is set."""
        return getattr(optimizer, "grad_scale", None) if optimizer in self._folded else None

    def skip_flag_of(self, optimizer: Optimizer) -> Tensor | None:
        """Return the next step's skip flag, if its gradients still exist."""
        fold = self._folded.get(optimizer)
        gradients = present_gradients(optimizer_parameters(optimizer))
        if fold is None or not fold.skips or not fold.moment.shares_one_with(gradients):
            return None
        return cast(Tensor, cast(Any, optimizer).found_inf)

    def watch(self, optimizer: Optimizer) -> None:
        """Register hooks that remove everything after the step it was meant for."""
        if optimizer not in self._watched:
            self._watched[optimizer] = True
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Drop a coefficient that an exception left behind, whose gradients are gone."""
        fold = self._folded.get(optimizer)
        gradients = present_gradients(optimizer_parameters(optimizer))
        if fold is not None and not fold.moment.shares_one_with(gradients):
            self.remove(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.remove(optimizer)
        self._norms.invalidate(optimizer)  # a fused step writes gradients without counting it


def supports_skip_flag(optimizer: Optimizer) -> bool:
    """Return whether the device can skip the optimizer's next step by `found_inf`.

    The first step of fused SGD with momentum cannot be skipped: torch 2.13 would leave its buffers
    uninitialized, and the second step would use them as momentum.
    """
    return supports_grad_scale(optimizer) and not any(
        isinstance(optimizer, torch.optim.SGD)
        and group["momentum"]
        and any(
            each.grad is not None and optimizer.state.get(each, {}).get("momentum_buffer") is None
            for each in group["params"]
        )
        for group in optimizer.param_groups
    )


def supports_grad_scale(optimizer: Optimizer) -> bool:
    """Return whether a step divides gradients by `grad_scale`, in float32, as it reads them."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") and all(each.dtype in SCALED_DTYPES for each in group["params"])
        for group in optimizer.param_groups
    )
