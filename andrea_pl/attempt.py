"""What is known of an update while it is made, and until it is known what became of it."""

import copy
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from andrea_callbacks.gradients import GradientNorm

Outcome = Literal["applied", "empty", "nonfinite_skip", "scaler_skip", "nonfinite_raise"]


@dataclass(slots=True, kw_only=True)
class Attempt:
    """An update being made, from its loss to its outcome."""

    number: int
    lr: float
    tokens: int | Tensor
    loss_sum: Tensor
    micro_losses: list[Tensor] = field(default_factory=list[Tensor])
    loss: Tensor | None = None
    norm: GradientNorm | None = None
    coefficient: Tensor | None = None
    outcome: Outcome = "applied"
    nonfinite: str | None = None
    verdict: "HostCopy | None" = None
    """Loss, norm, tokens and coefficient on their way to the host, where the device judges the update."""
    schedule: "ScheduleMove | None" = None
    """How this update moved the schedule."""

    @property
    def is_pending(self) -> bool:
        """Whether the host does not know yet what became of the update."""
        return self.verdict is not None


class HostCopy:
    """Numbers on their way from a device to the host.

    Args:
        values: (N,) on any device; what is written to it later is not seen.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._arrived: Any = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.current_stream(values.device).record_event()

    def read(self) -> list[float]:
        """Return the numbers as soon as they have arrived, whatever the device does after them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return cast("list[float]", self._values.tolist())


class ScheduleMove:
    """Steps a scheduler, so that it can be taken back: its state, and the rates, momenta and betas it wrote.

    What others have written to the optimizer since then stays.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._state = copy.deepcopy(scheduler.state_dict())
        before = [_values_of(group) for group in cast(Optimizer, scheduler.optimizer).param_groups]
        scheduler.step()
        after = [_values_of(group) for group in cast(Optimizer, scheduler.optimizer).param_groups]
        self._changes = [
            {key: (old[key], new[key]) for key in old if key in new and old[key] != new[key]}
            for old, new in zip(before, after, strict=True)
        ]

    def take_back(self) -> None:
        """Put back what was."""
        self._scheduler.load_state_dict(self._state)
        groups = cast(Optimizer, self._scheduler.optimizer).param_groups
        for group, changes in zip(groups, self._changes, strict=True):
            for key, (old, new) in changes.items():
                if group[key] != new:
                    continue
                if isinstance(group[key], Tensor):
                    group[key].copy_(old)
                else:
                    group[key] = old


def _values_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return copies of what a scheduler may write: numbers, also in tensors and tuples."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if isinstance(value, (int, float, tuple, Tensor))
    }
