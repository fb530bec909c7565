"""Learning-rate schedules as pure functions of the update, and the schedulers made of them."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from andrea_pl.errors import UserError


def warmup_cosine(index: int, total_updates: int, warmup_updates: int, floor: float = 0.0) -> float:
    """Return the factor of the base rate: linear warm-up, then half a cosine (Loshchilov and Hutter, 2017).

    Args:
        index: Updates that changed weights so far; 0 for the first.
        total_updates: Length of the whole run, warm-up included; the factor stays at `floor` afterwards.
        warmup_updates: Updates of the warm-up; the first takes 1 / warmup_updates, the last the whole rate.
        floor: Factor at the end.

    Returns:
        A factor in [floor, 1], or below `floor` during the warm-up.
    """
    if index < warmup_updates:
        return (index + 1) / warmup_updates
    progress = min((index - warmup_updates) / (total_updates - warmup_updates), 1.0)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def check_schedule(total_updates: int, warmup_updates: int, floor: float = 0.0) -> None:
    """Raise `UserError`, a `ValueError`, unless 0 <= warmup_updates < total_updates and 0 <= floor <= 1."""
    if not 0 <= warmup_updates < total_updates:
        raise UserError(
            f"0 <= warmup_updates < total_updates is needed, got warmup_updates={warmup_updates} and "
            f"total_updates={total_updates}; shorten the warm-up (model.warmup_updates) or train longer"
        )
    if not 0.0 <= floor <= 1.0:
        raise UserError(f"the floor must lie in [0, 1] (a factor of the base rate), got {floor}")


def build_scheduler(
    optimizer: Optimizer, total_updates: int, warmup_updates: int, floor: float = 0.0
) -> LambdaLR:
    """Return a scheduler over `warmup_cosine`, to be stepped once after every update that changed weights.

    Args:
        optimizer: Its groups' rates are the base rates.
        total_updates: Length of the run in updates.
        warmup_updates: Length of the warm-up.
        floor: Factor of the base rate at the end.

    Raises:
        UserError: Unless 0 <= warmup_updates < total_updates.
    """
    check_schedule(total_updates, warmup_updates, floor)
    return LambdaLR(optimizer, lambda index: warmup_cosine(index, total_updates, warmup_updates, floor))
