"""What is left to an optimizer's next step: to divide its gradients as it reads them, or to change nothing.

grad_scale   0-d float32: a fused step divides every gradient by it
found_inf    0-d float32: where it is 1 the step changes nothing
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
"""Gradients that a fused step may divide by a float32 number without losing digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fold:
    """What was put into an optimizer's next step: for which gradients, and whether `found_inf` is ours."""

    moment: GradientMoment
    skips: bool


class NextStep:
    """Puts a divisor and a skip flag into optimizers' next steps.

    Both are removed after the step, or with the gradients that they were meant for.

    Args:
        norms: Knows for which gradients they are.
    """

    def __init__(self, norms: NormCache) -> None:
        self._norms = norms
        self._folded: WeakKeyDictionary[Optimizer, _Fold] = WeakKeyDictionary()
        self._watched: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()

    def put(self, optimizer: Optimizer, divisor: Tensor | None, skip: Tensor | None) -> None:
        """Have the next step divide by `divisor`, and change nothing where `skip` is 1."""
        if divisor is None and skip is None:
            return
        folded = cast(Any, optimizer)
        folded.grad_scale = divisor
        if skip is not None:
            folded.found_inf = skip
        self._folded[optimizer] = _Fold(moment=self._norms.moment(optimizer), skips=skip is not None)

    def remove(self, optimizer: Optimizer) -> None:
        """Remove what was put into the optimizer's next step."""
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
        """Return what the next step divides by, None where nothing was put in."""
        return getattr(optimizer, "grad_scale", None) if optimizer in self._folded else None

    def skip_flag_of(self, optimizer: Optimizer) -> Tensor | None:
        """Return the flag that skips the next step, if it was set for gradients that are there still."""
        fold = self._folded.get(optimizer)
        gradients = present_gradients(optimizer_parameters(optimizer))
        if fold is None or not fold.skips or not fold.moment.shares_one_with(gradients):
            return None
        return cast(Tensor, cast(Any, optimizer).found_inf)

    def watch(self, optimizer: Optimizer) -> None:
        """Make sure that nothing outlives the step, or the gradients, that it was meant for."""
        if optimizer not in self._watched:
            self._watched[optimizer] = True
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Drop a coefficient that an exception left behind: none of its gradients is one of this step."""
        fold = self._folded.get(optimizer)
        gradients = present_gradients(optimizer_parameters(optimizer))
        if fold is not None and not fold.moment.shares_one_with(gradients):
            self.remove(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.remove(optimizer)
        self._norms.invalidate(optimizer)  # a fused step writes gradients without counting it


def supports_skip_flag(optimizer: Optimizer) -> bool:
    """Say whether a device can make the next step change nothing, by `found_inf`.

    Fused SGD with momentum cannot on its first step: skipped, torch 2.13 leaves its buffers as they were
    allocated, and the second step takes them for momentum.
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
    """Say whether a step divides gradients by `grad_scale`, in float32, as it reads them."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") and all(each.dtype in SCALED_DTYPES for each in group["params"])
        for group in optimizer.param_groups
    )
