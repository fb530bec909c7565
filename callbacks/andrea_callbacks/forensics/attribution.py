"""Attributes an update's gradient to its sequences and sources.

With g the gradient of the update and g_i the part of sequence i, g = sum of g_i:

norm |g_i|    share g_i·g / |g|², all shares add up to 1    cosine g_i·g / |g_i||g|    without |g - g_i|
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import torch
from torch import Tensor

from andrea_callbacks.forensics.replay import LossFunction, gradients_of, run_again, undisturbed
from andrea_callbacks.forensics.sample_identity import (
    Identity,
    NameFunction,
    gather_rows,
    identity_of,
    row_names,
)
from andrea_callbacks.hooks.update_window import UpdateWindow
from andrea_callbacks.numerics.host_transfer import is_distributed, reduce_over_ranks, widest

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a gradient."""

    identity: Identity
    """Identity of the sequence, the micro-batch, or the source."""
    loss: float
    """Its summed loss, in the replay's unit."""
    norm: float
    share: float
    cosine: float
    without: float
    """Norm of the update's gradient without this part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """An update's gradient by parts, the largest share first."""

    sequences: list[Part]
    sources: list[Part]
    norm: float
    """Norm of the sum of the parts."""
    agreement: float | None
    """Cosine between the gradients of replay and update; None if the update's is gone already."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return asdict(self)


def attribute(
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
    window: UpdateWindow,
    losses_of: LossFunction,
    parameters: Sequence[Tensor],
    whole: Sequence[Tensor] | None,
    norm: float,
    identify: NameFunction | None = None,
) -> Attribution:
    """Run an update's micro-batches again, one backward pass per sequence, and compare with the gradient.

    One common factor scales the replayed parts to the gradient. All ranks must call this together. Random
    states, buffers, modes and `.grad` do not change.

    Args:
        trainer: The run's trainer.
        pl_module: The module, with the weights of the update.
        window: The update's micro-batches on this rank.
        losses_of: Returns a micro-batch's losses, (B,) or 0-d.
        parameters: The optimizer's parameters.
        whole: The update's gradient, the same on all ranks; None if it is gone.
        norm: The norm of the update's gradient.
        identify: Names the rows of a micro-batch.
    """
    parameters = [each for each in parameters if each.requires_grad]
    with undisturbed(trainer, pl_module), torch.no_grad():
        replayed = _replayed(pl_module, window, losses_of, parameters)
        squared = _dot(replayed, replayed)
        if whole is None:
            whole, agreement = replayed, None
            factor = norm / math.sqrt(squared) if squared else 0.0
            size = squared
        else:
            size = _dot(whole, whole)
            product = _dot(replayed, whole)
            factor = product / squared if squared else 0.0
            agreement = product / math.sqrt(squared * size) if squared and size else 0.0
        ruler = _Ruler(whole=whole, size=size, factor=factor, is_replayed=agreement is None)
        del replayed
        mine = together(
            lambda: _sequences(trainer, pl_module, window, losses_of, parameters, ruler, identify)
        )
        sequences = gather_rows(mine)
        sources = _sources(pl_module, window, losses_of, parameters, ruler, sequences)
    return Attribution(
        sequences=_largest_first(sequences), sources=_largest_first(sources), norm=norm, agreement=agreement
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ruler:
    """Measures parts against the whole."""

    whole: Sequence[Tensor]
    size: float
    factor: float
    is_replayed: bool

    def part(self, identity: Identity, loss: float, gradient: Sequence[Tensor]) -> Part:
        squared = _dot(gradient, gradient)
        product = _dot(gradient, self.whole)
        unit = self.factor if self.is_replayed else 1.0  # the whole carries the factor as well then
        part, whole = self.factor**2 * squared, unit**2 * self.size
        both = self.factor * unit * product
        return Part(
            identity=identity,
            loss=loss,
            norm=math.sqrt(part),
            share=both / whole if whole else 0.0,
            cosine=both / math.sqrt(part * whole) if part and whole else 0.0,
            without=math.sqrt(max(whole - 2 * both + part, 0.0)),
        )


def _replayed(
    pl_module: pl.LightningModule, window: UpdateWindow, losses_of: LossFunction, parameters: list[Tensor]
) -> list[Tensor]:
    """Return the gradient of the whole window, over all ranks."""
    total = [torch.zeros_like(each) for each in parameters]

    def add_up() -> None:
        for _, _, run in run_again(losses_of, window, pl_module.device):
            _add(total, _gradient(run, None, parameters))

    together(add_up)
    return _over_ranks(total)


def together(stage: Callable[[], T]) -> T:
    """Run one stage of each rank's own work. If it raises on one rank, it raises on all.

    All ranks must call this together. Afterwards they can safely enter the next reduction.
    """
    result: T | None = None
    fault: Exception | None = None
    try:
        result = stage()
    except Exception as error:  # whatever it is, the other ranks wait for this one's word
        fault = error
    faults = gather_rows([] if fault is None else [f"{type(fault).__name__}: {fault}"])
    if fault is not None:
        raise fault
    if faults:
        raise RuntimeError(f"on another rank, {faults[0]}")
    return cast(T, result)


def _sequences(
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
    window: UpdateWindow,
    losses_of: LossFunction,
    parameters: list[Tensor],
    ruler: _Ruler,
    identify: NameFunction | None,
) -> list[Part]:
    parts: list[Part] = []
    for number, micro_batch, run in run_again(losses_of, window, pl_module.device):
        with torch.enable_grad():
            losses = run()
            each_loss = losses.unbind() if losses.ndim else (losses,)
        if not losses.ndim:
            gradient = gradients_of(losses, parameters)
            identity = identity_of(trainer, micro_batch, number, None)
            parts.append(ruler.part(identity, float(losses.detach()), gradient))
            continue
        names = row_names(micro_batch, identify)
        for row, loss in enumerate(each_loss):
            gradient = gradients_of(loss, parameters, keep=row + 1 < len(losses))
            identity = identity_of(trainer, micro_batch, number, row, names)
            parts.append(ruler.part(identity, float(loss.detach()), gradient))
    return parts


def _sources(
    pl_module: pl.LightningModule,
    window: UpdateWindow,
    losses_of: LossFunction,
    parameters: list[Tensor],
    ruler: _Ruler,
    sequences: list[Part],
) -> list[Part]:
    """Return the parts of sources, with one pass over the window for each, to hold only one gradient."""
    names = sorted({part.identity["source"] for part in sequences if "source" in part.identity})
    parts: list[Part] = []
    rank = torch.distributed.get_rank() if is_distributed() else 0
    for name in names:
        rows: dict[int, list[int]] = {}
        for part in sequences:
            identity = part.identity
            if identity.get("source") == name and identity["rank"] == rank:
                rows.setdefault(identity["micro_batch"], []).append(identity["row"] - 1)
        total = [torch.zeros_like(each) for each in parameters]

        def add_up(total: list[Tensor] = total, rows: dict[int, list[int]] = rows) -> None:
            for number, _, run in run_again(losses_of, window, pl_module.device):
                if number in rows:
                    _add(total, _gradient(run, rows[number], parameters))

        together(add_up)
        loss = sum(part.loss for part in sequences if part.identity.get("source") == name)
        parts.append(ruler.part({"source": name}, loss, _over_ranks(total)))
    return parts


def _gradient(run: Any, rows: list[int] | None, parameters: list[Tensor]) -> list[Tensor]:
    with torch.enable_grad():
        losses = run()
        loss = losses.sum() if rows is None else losses[rows].sum()
    return gradients_of(loss, parameters)


def _add(total: list[Tensor], gradient: list[Tensor]) -> None:
    for mine, each in zip(total, gradient, strict=True):
        mine += each


def _over_ranks(total: list[Tensor]) -> list[Tensor]:
    for each in total:
        reduce_over_ranks(each, "sum")
    return total


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the real part of the inner product of two lists of tensors, summed in float64."""
    sums = [
        torch.dot(_flat(a).to(widest(a.device)), _flat(b).to(widest(b.device))).cpu()
        for a, b in zip(left, right, strict=True)
    ]
    return float(torch.stack(sums).double().sum()) if sums else 0.0


def _flat(values: Tensor) -> Tensor:
    return (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).flatten()


def _largest_first(parts: list[Part]) -> list[Part]:
    return sorted(parts, key=lambda part: -part.share)
