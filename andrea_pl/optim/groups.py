"""Parameter groups with and without weight decay, and optimizers over them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from andrea_pl.errors import UserError

FUSED_DEVICES = {"cpu", "cuda", "mps", "xpu"}
"""Device types on which torch has fused AdamW kernels."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters by number of dimensions: matrices and larger decay, vectors do not.

    Args:
        model: A model; shared parameters count once.
        weight_decay: Weight decay of the first group.

    Returns:
        Groups named `decay` and `no_decay`, without empty ones.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"name": "decay", "params": [each for each in trainable if each.ndim >= 2]},
        {"name": "no_decay", "params": [each for each in trainable if each.ndim < 2]},
    ]
    for group, decay in zip(groups, (weight_decay, 0.0), strict=True):
        group["weight_decay"] = decay
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module,
    lr: float = 3e-4,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter, 2019) over `parameter_groups`, fused if torch has a kernel.

    Args:
        model: The model, on its final device.
        lr: Base learning rate.
        weight_decay: Decoupled decay of matrices, as a factor of the learning rate.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.

    Raises:
        UserError: If no parameter is trainable, or a value is out of range.
    """
    if lr < 0 or weight_decay < 0:
        raise UserError(f"lr and weight_decay must be at least 0, got {lr} and {weight_decay}")
    if not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"betas must lie in [0, 1), got {betas}")
    groups = parameter_groups(model, weight_decay)
    if not groups:
        raise UserError("the model has no trainable parameter: set requires_grad on those to be trained")
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=can_fuse(groups))


def can_fuse(groups: list[Mapping[str, Any]] | list[dict[str, Any]]) -> bool:
    """Return whether fused kernels support every parameter of these groups."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return all(each.is_floating_point() and each.device.type in FUSED_DEVICES for each in parameters)


def build_named_optimizer(
    build: Callable[[Iterable[Any]], Optimizer], parameters: Iterable[nn.Parameter]
) -> Optimizer:
    """Return an optimizer of a given class with its options, over the trainable parameters.

    Raises:
        UserError: If the class refuses its options or the parameters.
    """
    try:
        return build([each for each in parameters if each.requires_grad])
    except ValueError as error:
        hint = ""
        if "2D" in str(error):
            hint = "; `network.norm_weight`=false and bias=false leave matrices alone, as Muon asks"
        raise UserError(f"`optimizer` refuses its options or parameters: {error}{hint}") from error
