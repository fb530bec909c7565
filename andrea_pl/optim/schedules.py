"""Learning-rate schedules as pure functions of the update, and schedulers based on them."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from andrea_pl.deprecation import old_options
from andrea_pl.errors import UserError


def warmup_cosine(index: int, total_updates: int, warmup_updates: int, min_lr_ratio: float = 0.0) -> float:
    """Return the factor of the base rate: linear warm-up, then half a cosine (Loshchilov and Hutter, 2017).

    Args:
        index: Updates that changed weights so far; 0 for the first.
        total_updates: Length of the whole run including the warm-up; afterwards the factor stays at
            `min_lr_ratio`.
        warmup_updates: Updates of the warm-up. The first uses 1 / warmup_updates of the rate, the last all.
        min_lr_ratio: Factor at the end.

    Returns:
        A factor in [min_lr_ratio, 1], or below `min_lr_ratio` during the warm-up.
    """
    if index < warmup_updates:
        return (index + 1) / warmup_updates
    progress = min((index - warmup_updates) / (total_updates - warmup_updates), 1.0)
    return min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def check_schedule(total_updates: int, warmup_updates: int, min_lr_ratio: float = 0.0) -> None:
    """Raise `UserError` unless 0 <= warmup_updates < total_updates and 0 <= min_lr_ratio <= 1."""
    if not 0 <= warmup_updates < total_updates:
        raise UserError(
            f"0 <= warmup_updates < total_updates is needed, got warmup_updates={warmup_updates} and "
            f"total_updates={total_updates}; shorten the warm-up (`warmup_updates`) or train longer"
        )
    if not 0.0 <= min_lr_ratio <= 1.0:
        raise UserError(f"`min_lr_ratio` must lie in [0, 1], got {min_lr_ratio}")


class FactorLR(LambdaLR):
    """Sets the rate of every parameter group to one factor of its base rate.

    Groups added later follow too, with their own `lr` as base rate. `take_new_groups` applies the factor
    before a new group's first update; `TokenWeightedModule` calls it. Otherwise a new group follows from its
    second update on.

    Args:
        optimizer: An optimizer whose groups' rates are the base rates.
        factor: Maps the number of moves so far to the factor.

    Raises:
        UserError: If a group's `lr` is None because the optimizer sets its rate itself.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        if any(group["lr"] is None for group in optimizer.param_groups):
            raise UserError(
                f"{type(optimizer).__name__} has lr=None and sets its rate itself, so that no schedule can "
                "scale it; set `schedule`=constant, or give the optimizer an lr"
            )
        super().__init__(optimizer, factor)

    @override
    def get_lr(self) -> list[float | Tensor]:
        """Return the next rate of every group, including groups added since the last move."""
        self._learn_base_rates()
        return super().get_lr()

    def take_new_groups(self) -> None:
        """Apply the current factor to groups added since the last move."""
        known = len(self.base_lrs)
        self._learn_base_rates()
        for group, base in zip(self.optimizer.param_groups[known:], self.base_lrs[known:], strict=True):
            set_rate(group, base * self.lr_lambdas[0](self.last_epoch))

    def _learn_base_rates(self) -> None:
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            lr = group["lr"]
            self.base_lrs.append(group.setdefault("initial_lr", lr.clone() if isinstance(lr, Tensor) else lr))
        self._spread_factor()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also that of a plain `LambdaLR`. The factor stays this run's."""
        self.__dict__.update({key: value for key, value in state_dict.items() if key != "lr_lambdas"})
        self.base_lrs = list(self.base_lrs)
        self._spread_factor()

    def refresh(self) -> None:
        """Write the current rates to the optimizer after a change of the factor.

        A group added since the last move keeps its own rate.
        """
        factor = self.lr_lambdas[0](self.last_epoch)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=False):
            if group["lr"] != base * factor:
                set_rate(group, base * factor)

    def _spread_factor(self) -> None:
        self.lr_lambdas = self.lr_lambdas[:1] * len(self.base_lrs)


def set_rate(group: dict[str, Any], rate: float | Tensor) -> None:
    """Set the rate of a parameter group. A tensor is changed in place."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = float(rate)


@old_options(floor="min_lr_ratio")
def build_scheduler(
    optimizer: Optimizer, total_updates: int, warmup_updates: int, min_lr_ratio: float = 0.0
) -> FactorLR:
    """Return a scheduler over `warmup_cosine`, to be stepped once after every update that changed weights.

    Args:
        optimizer: An optimizer whose groups' rates are the base rates; groups added later follow.
        total_updates: Length of the run in updates.
        warmup_updates: Length of the warm-up.
        min_lr_ratio: Factor of the base rate at the end.

    Raises:
        UserError: Unless 0 <= warmup_updates < total_updates.
    """
    check_schedule(total_updates, warmup_updates, min_lr_ratio)
    return FactorLR(
        optimizer, lambda index: warmup_cosine(index, total_updates, warmup_updates, min_lr_ratio)
    )
