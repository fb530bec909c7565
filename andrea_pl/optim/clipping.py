"""One clip over all gradients, by their global L2 norm."""

from collections.abc import Iterable

import torch
from torch import Tensor

from andrea_callbacks.gradients import distinct


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return min(1, max_norm / norm), exactly 1 where the norm is within bounds (Pascanu et al., 2013).

    Args:
        norm: 0-d, finite and at least 0.
        max_norm: More than 0.
    """
    return torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))


def scale_gradients(parameters: Iterable[Tensor], coefficient: Tensor) -> None:
    """Multiply every gradient by a coefficient, each once; on the CPU a coefficient of 1 writes nothing.

    Args:
        parameters: Those without a gradient are passed over; sparse gradients have their values scaled.
        coefficient: 0-d.
    """
    if coefficient.device.type == "cpu" and float(coefficient) == 1.0:
        return
    for parameter in distinct(parameters):
        if parameter.grad is not None:
            parameter.grad.mul_(coefficient.to(parameter.grad.device))
