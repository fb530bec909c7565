"""Measures how far an update moved the weights, once for all callbacks."""

from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from andrea_callbacks.numerics.gradient_norm import (
    is_sharded,
    local_gradient,
    optimizer_parameters,
    real_values,
    squared_norms,
)
from andrea_callbacks.numerics.host_transfer import reduce_over_ranks, widest


@dataclass(slots=True, kw_only=True)
class _Snapshot:
    update: int
    before: dict[int, Tensor]
    squares: tuple[Tensor, Tensor] | None = None


_snapshots: "WeakKeyDictionary[pl.Trainer, dict[int, _Snapshot]]" = WeakKeyDictionary()


def group_names(optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's groups: their `name`, or their index."""
    return [str(group.get("name", place)) for place, group in enumerate(optimizer.param_groups)]


def remember_weights(trainer: pl.Trainer, optimizer: Optimizer, update: int) -> None:
    """Copy an optimizer's weights before its step. The copy lives until `weight_change`."""
    kept = _snapshots.setdefault(trainer, {})
    found = kept.get(id(optimizer))
    if found is None or found.update != update:
        before = {id(each): local_gradient(each.detach()).clone() for each in optimizer_parameters(optimizer)}
        kept[id(optimizer)] = _Snapshot(update=update, before=before)


def weight_change(trainer: pl.Trainer, optimizer: Optimizer, update: int) -> tuple[Tensor, Tensor] | None:
    """Return (G,) norms of the weights before an update and (G,) norms of their change, for the G groups.

    Returns None unless `remember_weights` was called for this update. Sharded weights are summed over their
    ranks, which must call this together. Nothing waits for an accelerator.
    """
    found = _snapshots.get(trainer, {}).get(id(optimizer))
    if found is None or found.update != update:
        return None
    if found.squares is None:
        found.squares = _squares(optimizer, found.before)
        found.before.clear()
    return found.squares[0].sqrt(), found.squares[1].sqrt()


def forget_weights(trainer: pl.Trainer) -> None:
    """Drop the copies of an update that was cut short."""
    _snapshots.pop(trainer, None)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


@torch.no_grad()
def _squares(optimizer: Optimizer, before: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    weights: list[Tensor] = []
    changes: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters = cast("list[Tensor]", group["params"])
        old = [real_values(before[id(each)]) for each in parameters if id(each) in before]
        new = [real_values(local_gradient(each.detach())) for each in parameters if id(each) in before]
        moved = [_wide(after) - _wide(kept) for after, kept in zip(new, old, strict=True)]
        device = parameters[0].device if parameters else torch.device("cpu")
        nothing = torch.zeros((), dtype=widest(device), device=device)
        weights.append(squared_norms(old)[:, 0].sum() if old else nothing)
        changes.append(squared_norms(moved)[:, 0].sum() if moved else nothing)
    home = next((each.device for each in optimizer_parameters(optimizer)), torch.device("cpu"))
    result = tuple(torch.stack([each.to(home, widest(home)) for each in part]) for part in (weights, changes))
    if any(map(is_sharded, optimizer_parameters(optimizer))):
        for each in result:
            reduce_over_ranks(each, "sum")
    return result[0], result[1]
