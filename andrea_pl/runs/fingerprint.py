"""Fingerprints of weights, which tell whether they are the same bit for bit, without a copy."""

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from andrea_callbacks.numerics.gradient_norm import local_gradient

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type for each width in bytes."""


def fingerprint(module: nn.Module, state: Mapping[str, object] | None = None) -> dict[str, int]:
    """Return a number for every parameter of a module: a sum of its bits, weighted by their positions.

    Unlike a sum of floating-point numbers it is exact, and a NaN equals itself. For a sharded parameter only
    this rank's part counts. Waits for the device once.

    Args:
        module: Its parameters give the names.
        state: Contents by name, such as a checkpoint's `state_dict`; the module's own by default. Missing
            names are left out.
    """
    own = {name: each for name, each in module.named_parameters() if not is_lazy(each)}
    found = own if state is None else {name: state[name] for name in own if name in state}
    tensors = {name: each for name, each in found.items() if isinstance(each, Tensor) and not each.is_meta}
    return dict(zip(tensors, _numbers(map(_sum_of_bits, tensors.values())), strict=True))


@torch.no_grad()
def _sum_of_bits(tensor: Tensor) -> Tensor:
    values = local_gradient(tensor.detach())
    if values.layout != torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.is_quantized:
        values = values.int_repr()
    bits = values.contiguous().view(INTEGERS[values.element_size()]).flatten().long()
    return (bits * (torch.arange(len(bits), device=bits.device) | 1)).sum()  # odd factors lose no bit


def _numbers(sums: Iterable[Tensor]) -> list[int]:
    """Return 0-d tensors as numbers, with one transfer where all are on one device."""
    kept = list(sums)
    if len({each.device for each in kept}) == 1:
        return cast("list[int]", torch.stack(kept).tolist())
    return [int(each) for each in kept]
