"""Learning-rate schedules as pure functions of the update, and the schedulers made of them."""

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
        total_updates: Length of the whole run, warm-up included; the factor stays at `min_lr_ratio`
        afterwards.
        warmup_updates: Updates of the warm-up; the first takes 1 / warmup_updates, the last the whole rate.
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

    A group that is added later follows too: its own `lr` is its base rate. `take_new_groups` gives it the
    factor before its first update, as `TokenWeightedModule` does; elsewhere it follows from its second update
    on.

    Args:
        optimizer: Its groups' rates are the base rates.
        factor: Maps the number of moves so far to the factor.

    Raises:
        UserError: If a group's `lr` is None, because the optimizer sets its rate itself.
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
        """Return the next rate of every group, those added since the last move included."""
        self._learn_base_rates()
        return super().get_lr()

    def take_new_groups(self) -> None:
        """Set the rates of groups that were added since the last move to the factor of this moment."""
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
        """Load a state, that of a plain `LambdaLR` included; the factor stays this run's."""
        self.__dict__.update({key: value for key, value in state_dict.items() if key != "lr_lambdas"})
        self.base_lrs = list(self.base_lrs)
        self._spread_factor()

    def refresh(self) -> None:
        """Write the rates of this moment to the optimizer, as a factor that has changed would give them.

        A group that was added since the last move keeps its own rate.
        """
        factor = self.lr_lambdas[0](self.last_epoch)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=False):
            if group["lr"] != base * factor:
                set_rate(group, base * factor)

    def _spread_factor(self) -> None:
        self.lr_lambdas = self.lr_lambdas[:1] * len(self.base_lrs)


def set_rate(group: dict[str, Any], rate: float | Tensor) -> None:
    """Set the rate of a parameter group; one that is a tensor stays that tensor."""
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
        optimizer: Its groups' rates are the base rates; groups added later follow.
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
