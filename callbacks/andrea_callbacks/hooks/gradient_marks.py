"""Marks of gradients: their tensors, how often each was written, and rough norms."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from andrea_callbacks.hooks.update_gradient import UpdateGradient
from andrea_callbacks.numerics.gradient_norm import is_sharded, optimizer_parameters, version_of

CHANGED = 1e-5
"""Relative difference of a gradient's norm above which it counts as changed. Rounding stays below this."""

Written = dict[int, tuple["ref[Tensor]", int]]
"""A gradient, and how often it was written, by the `id` of its parameter."""


@dataclass(slots=True, kw_only=True)
class Followed:
    """The state of an optimizer's gradients since its last step."""

    marks: Written = field(default_factory=Written)
    """Marks after the last backward pass that wrote the gradients, or after the last clip."""
    norms: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Rough norms, 0-d; empty after a clip."""
    scale: Tensor | float = 1.0
    """The loss scale in the gradients."""
    before: Written = field(default_factory=Written)
    """Marks at the start of the current backward pass."""
    rest: Tensor | None = None
    """0-d bool: whether a gradient at that moment was changed since its mark and not zero; None if there
    was none."""
    lost: Tensor | None = None
    """0-d bool: whether a backward pass added to changed gradients."""
    gradient: UpdateGradient | None = None
    step: int | None = None
    """`global_step` at the hook before the step; None before that hook."""
    idle: int = 0
    """Consecutive batches with gradients but without a step that callbacks could see."""
    had_gradients: bool = False
    """Whether a backward pass of this batch wrote gradients."""


def gradients_of(optimizer: Optimizer) -> dict[int, Tensor]:
    """Return the gradients of an optimizer by the `id` of their parameters."""
    return {id(each): each.grad for each in optimizer_parameters(optimizer) if each.grad is not None}


def mark(gradients: dict[int, Tensor]) -> Written:
    """Return marks of the gradients' current state."""
    return {key: (ref(each), version_of(each)) for key, each in gradients.items()}


def fits(followed: Followed, gradients: dict[int, Tensor]) -> bool:
    """Return whether every marked gradient is still the same tensor and was not written to since."""
    marked = [(each, followed.marks[key]) for key, each in gradients.items() if key in followed.marks]
    return all(is_as(each, mark) for each, mark in marked)


def is_as(gradient: Tensor, mark: "tuple[ref[Tensor], int] | None") -> bool:
    """Return whether a gradient is the marked tensor, not written to since; refs would compare by value."""
    return mark is not None and mark[0]() is gradient and mark[1] == version_of(gradient)


def rough_norms(gradients: Iterable[Tensor]) -> Tensor | None:
    """Return (P,) norms that are equal for equal gradients; None for sharded and non-strided ones."""
    values = [each.detach() for each in gradients]
    if not values or any(is_sharded(each) or each.layout != torch.strided for each in values):
        return None
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, each in enumerate(values):
        kinds.setdefault((each.device, each.dtype), []).append(place)
    norms: dict[int, Tensor] = {}
    with torch.no_grad(), torch.autocast(values[0].device.type, enabled=False):
        for (_, dtype), places in kinds.items():  # few launches, however many gradients
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
            found = torch._foreach_norm([values[place] for place in places], 2.0, wide)  # pyright: ignore
            norms.update(zip(places, found, strict=True))
        home = values[0].device
        return torch.stack([norms[place].to(home, torch.float32) for place in range(len(values))])


def doubt_of(followed: Followed, gradients: dict[int, Tensor], scale: Tensor | float) -> Tensor | None:
    """Return 0-d bool: whether the norms are lost, or differ from the marked ones; None if unknown."""
    known = {key: each for key, each in gradients.items() if key in followed.norms}
    now = rough_norms(known.values())
    lost = None if followed.lost is None or not gradients else followed.lost
    if now is None:
        return lost
    before = torch.stack([followed.norms[key] for key in known]) * scale
    now = now * followed.scale
    is_same = (before - now).abs() <= CHANGED * before.abs()
    is_changed = ~(is_same | ~torch.isfinite(before) & ~torch.isfinite(now)).all()
    return is_changed if lost is None else is_changed | lost.to(is_changed.device)
