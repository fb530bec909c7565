"""Marks on gradients: which tensors they were, how often written, and roughly which norms they had."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from andrea_callbacks.hooks.update_gradient import UpdateGradient
from andrea_callbacks.numerics.gradient_norm import is_sharded, optimizer_parameters, version_of

CHANGED = 1e-5
"""Relative difference of a gradient's norm from which on it counts as changed; rounding is under this."""

Written = dict[int, tuple["ref[Tensor]", int]]
"""By the `id` of a parameter: its gradient, and how often that was written."""


@dataclass(slots=True, kw_only=True)
class Followed:
    """What is known of an optimizer's gradients since its last step."""

    marks: Written = field(default_factory=Written)
    """As the last backward pass that wrote them, or the last clip, left them."""
    norms: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Their rough norms, 0-d; none after a clip."""
    scale: Tensor | float = 1.0
    """The loss scale in them."""
    before: Written = field(default_factory=Written)
    """As they were when the backward pass that is under way began."""
    rest: Tensor | None = None
    """0-d bool: whether anything but zeros was there then, changed since its mark; None where nothing was."""
    lost: Tensor | None = None
    """0-d bool: whether a backward pass added to gradients that had been changed."""
    gradient: UpdateGradient | None = None
    step: int | None = None
    """`global_step` when the hook before the step came; None before it."""
    idle: int = 0
    """Batches in a row that gave it gradients, without a step that callbacks were told of."""
    had_gradients: bool = False
    """Whether a backward pass of this batch wrote its gradients."""


def gradients_of(optimizer: Optimizer) -> dict[int, Tensor]:
    """Return the gradients of an optimizer by the `id` of their parameters."""
    return {id(each): each.grad for each in optimizer_parameters(optimizer) if each.grad is not None}


def mark(gradients: dict[int, Tensor]) -> Written:
    """Return marks of gradients as they are."""
    return {key: (ref(each), version_of(each)) for key, each in gradients.items()}


def fits(followed: Followed, gradients: dict[int, Tensor]) -> bool:
    """Say whether gradients are the tensors that were marked, not written to since; or were never marked."""
    marked = [(each, followed.marks[key]) for key, each in gradients.items() if key in followed.marks]
    return all(is_as(each, mark) for each, mark in marked)


def is_as(gradient: Tensor, mark: "tuple[ref[Tensor], int] | None") -> bool:
    """Say whether a gradient is the tensor of a mark, not written to since; refs would compare by value."""
    return mark is not None and mark[0]() is gradient and mark[1] == version_of(gradient)


def rough_norms(gradients: Iterable[Tensor]) -> Tensor | None:
    """Return (P,) norms that are equal for equal gradients, None for kinds that are not looked at."""
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
    """Return whether the norms of gradients are lost, or others than those that were marked, 0-d.

    None where that cannot be told.
    """
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
