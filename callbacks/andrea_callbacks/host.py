"""Numbers on their way from a device to the host, so that nobody waits for longer than must be."""

from typing import Any, cast

import torch
from torch import Tensor


class HostCopy:
    """Numbers on their way from a device to the host.

    Args:
        values: (N,) on any device, its own: not written to before `read`.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._arrived: Any = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.current_stream(values.device).record_event()

    def read(self) -> list[float]:
        """Return the numbers as soon as they have arrived, whatever the device does after them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return cast("list[float]", self._values.tolist())


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device: float64, float32 on MPS."""
    return torch.float32 if device.type == "mps" else torch.float64


def side_by_side(*figures: Tensor | float) -> Tensor:
    """Return (N,) the 0-d figures on the first one's device, in the widest type that it has."""
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


def agree(figures: Tensor, operation: str = "max") -> Tensor:
    """Reduce, in place, figures of all ranks to the same on each; nothing happens on one rank alone.

    Lightning's own reduction has the host wait at a barrier first.

    Args:
        figures: (N,) on the rank's device. All ranks must call this together.
        operation: `max`, `sum` or `mean`.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        kinds = torch.distributed.ReduceOp
        torch.distributed.all_reduce(figures, kinds.MAX if operation == "max" else kinds.SUM)
        if operation == "mean":
            figures /= torch.distributed.get_world_size()
    return figures
