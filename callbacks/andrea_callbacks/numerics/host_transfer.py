"""Moves numbers from a device to the host, and between ranks, without needless waiting."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor


class HostCopy:
    """An asynchronous copy of numbers from a device to the host.

    Args:
        values: (N,) on any device. Do not write to it before `read`.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._arrived: Any = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.current_stream(values.device).record_event()

    def read(self) -> list[float]:
        """Wait for the copy, but not for later work of the device, and return the numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return cast("list[float]", self._values.tolist())


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device: float64, float32 on MPS."""
    return torch.float32 if device.type == "mps" else torch.float64


_reads_late = False


def can_read_at_once(device: torch.device) -> bool:
    """Return whether the host can read a device's numbers without waiting for queued work: on a CPU."""
    return device.type == "cpu" and not _reads_late


@contextmanager
def late_reading(is_late: bool = True) -> Generator[None]:
    """Treat every device as an accelerator while the context is active, to test that code without one."""
    global _reads_late
    before, _reads_late = _reads_late, is_late
    try:
        yield
    finally:
        _reads_late = before


def stack_scalars(*figures: Tensor | float) -> Tensor:
    """Return the 0-d figures as (N,) on the first one's device, in its widest floating-point type."""
    device = cast(Tensor, figures[0]).device
    wide = widest(device)
    return torch.stack(
        [
            each.to(device, wide)
            if isinstance(each, Tensor)
            else torch.full((), each, dtype=wide, device=device)
            for each in figures
        ]
    )


def is_distributed() -> bool:
    """Return whether torch.distributed is initialized in this process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def reduce_over_ranks(figures: Tensor, operation: Literal["max", "sum", "mean"] = "max") -> Tensor:
    """Reduce figures over all ranks, in place; a single rank keeps its own.

    Lightning's own reduction makes the host wait at a barrier first; this one does not.

    Args:
        figures: (N,) on the rank's device. All ranks must call this together.
        operation: How to combine the ranks' figures.
    """
    if is_distributed():
        kinds = torch.distributed.ReduceOp
        torch.distributed.all_reduce(figures, kinds.MAX if operation == "max" else kinds.SUM)
        if operation == "mean":
            figures /= torch.distributed.get_world_size()
    return figures


def gather_objects(own: Any) -> list[Any]:
    """Return every rank's object, in rank order. All ranks must call this together."""
    if not is_distributed():
        return [own]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, own)
    return gathered
