"""Finds where a NaN or Inf came from: the first micro-batch, module, parameter and sequences that had it.

each micro-batch again ──> a forward hook on every module: the first bad output
                       ──> losses (B,): which sequences
                       ──> gradients in the order of the backward pass: the first bad one,
                           then sequence by sequence: which of them caused it
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from andrea_callbacks.forensics.batch_faults import is_mask, kind_of, real_view, tensors_in
from andrea_callbacks.forensics.replay import LossFunction, gradients_of, run_again, trainable, undisturbed
from andrea_callbacks.hooks.update_window import UpdateWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a fault appeared first."""

    phase: Literal["forward", "loss", "backward"]
    micro_batch: int
    """The micro-batch's number on this rank, from 1."""
    value: str
    """`NaN` or `Inf`."""
    rows: tuple[int, ...] = ()
    """Bad sequences of the micro-batch, from 0; empty if the losses do not tell them apart."""
    module: str | None = None
    """The first module whose output was bad, in the forward pass."""
    parameter: str | None = None
    """The first parameter whose gradient was bad, in the backward pass."""
    negative: str | None = None
    """A module before `module` whose output had -Inf, which may be a mask or the cause."""
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The bad output or gradient."""

    def spell(self) -> str:
        """Return it in words."""
        if self.phase == "forward":
            where = f"first in the output of {self.module}"
            if self.negative is not None:
                where += f" ({self.negative} had -Inf before it)"
            return f"{self.value} {where}"
        if self.phase == "loss":
            return f"{self.value} first in the loss itself, after sound outputs of every module"
        return f"{self.value} first in the backward pass, in the gradient of {self.parameter}"


def find_origin(
    trainer: pl.Trainer, pl_module: pl.LightningModule, window: UpdateWindow, losses_of: LossFunction
) -> Origin | None:
    """Run an update's micro-batches again until the fault appears; return None if it does not.

    The weights must be those of the update. Random states, buffers, modes and `.grad` do not change.
    """
    with undisturbed(trainer, pl_module):
        for number, _, run in run_again(losses_of, window, pl_module.device):
            origin = _search(pl_module, number, run)
            if origin is not None:
                return origin
    return None


def _search(pl_module: pl.LightningModule, number: int, run: Callable[[], Tensor]) -> Origin | None:
    probe = _ForwardProbe()
    with probe.watching(pl_module):
        losses = run()
    rows = _bad_rows(losses.detach())
    if rows is None:
        found = _search_backward(pl_module, number, losses)
        if found is None or probe.first is None:
            return found
        rows = found.rows  # the loss did not see the bad output, the backward pass did
    chosen = probe.first or probe.negative
    if chosen is None:
        return Origin(
            phase="loss",
            micro_batch=number,
            value=kind_of(losses) or "NaN",
            rows=rows,
            tensors={"losses": losses.detach()},
        )
    name, output = chosen
    return Origin(
        phase="forward",
        micro_batch=number,
        value=kind_of(output) or "NaN",
        rows=rows,
        module=name or type(pl_module).__name__,
        negative=probe.negative[0] if probe.first and probe.negative else None,
        tensors={"output": _rows_of(output, rows, len(losses) if losses.ndim else 0)},
    )


def _search_backward(pl_module: pl.LightningModule, number: int, losses: Tensor) -> Origin | None:
    if not losses.requires_grad:
        return None
    names, parameters = trainable(pl_module)
    per_row = losses.ndim == 1 and len(losses) > 1
    with _arrivals(names, parameters) as order:
        gradients = gradients_of(losses.sum(), parameters, keep=per_row)
    bad = {name: each for name, each in zip(names, gradients, strict=True) if kind_of(each)}
    if not bad:
        return None
    first = next((name for name in order if name in bad), next(iter(bad)))
    rows: tuple[int, ...] = (0,) if losses.ndim == 1 else ()
    if per_row:
        rows = tuple(
            row
            for row in range(len(losses))
            if any(map(kind_of, gradients_of(losses[row], parameters, keep=True)))
        )
    return Origin(
        phase="backward",
        micro_batch=number,
        value=kind_of(bad[first]) or "NaN",
        rows=rows,
        parameter=first,
        tensors={"gradient": bad[first]},
    )


class _ForwardProbe:
    """Remembers the first output with NaN or Inf, and the first with -Inf that is not a mask."""

    def __init__(self) -> None:
        self.first: tuple[str, Tensor] | None = None
        self.negative: tuple[str, Tensor] | None = None

    @contextmanager
    def watching(self, module: nn.Module) -> Generator[None, None, None]:
        """Hook every module while the context is active."""
        handles: list[Any] = []
        try:
            for name, part in cast("Iterator[tuple[str, nn.Module]]", module.named_modules()):
                handles.append(part.register_forward_hook(self._hook(name)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, arguments: Any, output: Any) -> None:
            del module, arguments
            for tensor in tensors_in(output):
                self._look_at(name, tensor)

        return look

    def _look_at(self, name: str, tensor: Tensor) -> None:
        if self.first is not None:
            return
        if kind_of(tensor, with_negative=False) is not None:
            self.first = (name, tensor.detach().clone())
        elif self.negative is None and _has_negative_infinity(tensor):
            self.negative = (name, tensor.detach().clone())


@contextmanager
def _arrivals(names: list[str], parameters: list[Tensor]) -> Generator[list[str], None, None]:
    """Record the order in which the backward pass makes the parameters' gradients."""
    order: list[str] = []
    handles: list[Any] = []

    def note(name: str) -> Callable[[Tensor], None]:
        return lambda _: order.append(name)

    try:
        for name, parameter in zip(names, parameters, strict=True):
            handles.append(parameter.register_hook(note(name)))
        yield order
    finally:
        for handle in handles:
            handle.remove()


def _has_negative_infinity(tensor: Tensor) -> bool:
    """Return whether a tensor has -Inf and is not an additive mask."""
    values = real_view(tensor)
    return values is not None and bool((values == float("-inf")).any()) and not is_mask(values)


def _bad_rows(losses: Tensor) -> tuple[int, ...] | None:
    """Return the rows of losses that are not finite: none for a bad 0-d loss, None if all are finite."""
    bad = ~torch.isfinite(losses)
    if not bool(bad.any()):
        return None
    return tuple(cast("list[int]", bad.nonzero().flatten().tolist())) if losses.ndim == 1 else ()


def _rows_of(output: Tensor, rows: tuple[int, ...], count: int) -> Tensor:
    """Return the bad sequences' part of an output if its first dimension is the batch."""
    return output[list(rows)] if rows and output.ndim and len(output) == count else output
