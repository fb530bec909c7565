"""Undoes moves of a learning-rate scheduler."""

import copy
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer


class ScheduleMove:
    """Remembers a scheduler's state, so that its next move can be undone.

    `undo` restores the scheduler's state, and the rates, momenta and betas that it wrote between construction
    and `end`. Later writes of other code to the optimizer stay.

    Args:
        scheduler: Any with `state_dict`, `load_state_dict` and `optimizer`.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._state = copy.deepcopy(scheduler.state_dict())
        self._before = self._values()
        self._changes: list[dict[str, tuple[Any, Any]]] = [{} for _ in self._before]

    def end(self) -> "ScheduleMove":
        """Record what the scheduler has written."""
        self._changes = [
            {key: (old[key], new[key]) for key in old if key in new and old[key] != new[key]}
            for old, new in zip(self._before, self._values(), strict=True)
        ]
        return self

    def undo(self) -> None:
        """Restore the state and the values from before the move."""
        self._scheduler.load_state_dict(self._state)
        groups = cast(Optimizer, self._scheduler.optimizer).param_groups
        for group, changes in zip(groups, self._changes, strict=False):
            for key, (old, new) in changes.items():
                if group[key] != new:
                    continue
                if isinstance(group[key], Tensor):
                    group[key].copy_(old)
                else:
                    group[key] = old

    def _values(self) -> list[dict[str, Any]]:
        """Return copies of all values that a scheduler may write: numbers, tensors and tuples."""
        return [
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if isinstance(value, (int, float, tuple, Tensor))
            }
            for group in cast(Optimizer, self._scheduler.optimizer).param_groups
        ]
