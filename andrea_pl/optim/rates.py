"""Adjusts a restored scheduler to changed options of the optimizer."""

from typing import Any, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from andrea_pl.errors import UserError
from andrea_pl.optim.schedules import FactorLR, set_rate

LINEAR = {
    FactorLR,
    LambdaLR,
    MultiplicativeLR,
    StepLR,
    MultiStepLR,
    ExponentialLR,
    ConstantLR,
    LinearLR,
    PolynomialLR,
}
"""Schedulers whose rate is the base rate times a factor. Subclasses may differ."""

ANNEALING = {CosineAnnealingLR, CosineAnnealingWarmRestarts}
"""Schedulers whose rate is the base rate times a factor if they end at 0."""


SIZED = (
    LambdaLR,
    MultiplicativeLR,
    CosineAnnealingWarmRestarts,
    OneCycleLR,
    CyclicLR,
    SequentialLR,
    ChainedScheduler,
)
"""Schedulers with a value per parameter group, which raise if a group was added."""


def can_take_new_groups(scheduler: Any) -> bool:
    """Return whether a scheduler can move after a parameter group was added to its optimizer."""
    known = scheduler
    while isinstance(known, SequentialLR | ChainedScheduler):
        known = cast(Any, known)._schedulers[0]
    count = len(getattr(known, "base_lrs", None) or known.optimizer.param_groups)
    return count >= len(known.optimizer.param_groups) or not isinstance(scheduler, SIZED)


def follows_base_rate(scheduler: Any) -> bool:
    """Return whether a scheduler's rate is linear in the base rate."""
    kind = scheduler.__class__
    return kind in LINEAR or (kind in ANNEALING and not scheduler.eta_min)


def change_base_rate(
    optimizer: Optimizer, scheduler: Any | None, number: int, before: float, now: float
) -> None:
    """Scale the rate of a parameter group, in the optimizer and in its scheduler, to another base rate.

    Args:
        optimizer: The restored optimizer.
        scheduler: The restored scheduler, or None.
        number: The group's index.
        before: The base rate in the run that wrote the checkpoint.
        now: The base rate in this run.

    Raises:
        UserError: If the scheduler's rate is not linear in the base rate.
    """
    if scheduler is not None and not follows_base_rate(scheduler):
        raise _refusal(scheduler, f"lr {before:g}", f"lr {now:g}")
    group = optimizer.param_groups[number]
    rate = group["lr"] * now / before if before else None
    if "initial_lr" in group:
        group["initial_lr"] = now
    if scheduler is not None:
        scheduler.base_lrs[number] = now
    set_rate(group, _rate_from_zero(scheduler, number, now) if rate is None else rate)
    if scheduler is not None:
        scheduler._last_lr[number] = group["lr"]


def keep_cycled_values(scheduler: Any | None, group: dict[str, Any], name: str, there: Any, here: Any) -> Any:
    """Return the new value of a group's option that a scheduler may cycle.

    Args:
        scheduler: The restored scheduler. OneCycleLR and CyclicLR may cycle momentum, or AdamW's first beta.
        group: The restored group.
        name: The option.
        there: Its value in the run that wrote the checkpoint.
        here: Its value in this run.

    Raises:
        UserError: If the scheduler cycles the changed value.
    """
    value = tuple(cast("list[Any]", here)) if isinstance(here, list) else here
    if not isinstance(scheduler, OneCycleLR | CyclicLR) or not getattr(scheduler, "cycle_momentum", False):
        return value
    if name == "momentum" or (name == "betas" and there[0] != here[0]):
        raise _refusal(scheduler, f"{name} {there}", f"{name} {here}")
    return (group["betas"][0], *value[1:]) if name == "betas" else value


def _rate_from_zero(scheduler: Any | None, number: int, now: float) -> Any:
    """Return a group's current rate if the old base rate is 0, so that its factor is unknown."""
    if scheduler is None:
        return now
    if isinstance(scheduler, LambdaLR):
        return now * scheduler.lr_lambdas[number](scheduler.last_epoch)
    closed_form = getattr(scheduler, "_get_closed_form_lr", None)
    if closed_form is None:
        raise _refusal(scheduler, "lr 0", f"lr {now:g}")
    return closed_form()[number]


def _refusal(scheduler: Any, there: str, here: str) -> UserError:
    return UserError(
        f"the checkpoint was written with {there} and this run has {here}, which {type(scheduler).__name__} "
        f"cannot follow, because its values are not proportional to it. Resume with {there}, or start from "
        "the weights only (`init_from`)"
    )
