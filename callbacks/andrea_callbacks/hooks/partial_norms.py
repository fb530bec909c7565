"""Norms of parameter groups and layers, and counts of gradients by kind."""

import re
from collections.abc import Sequence
from typing import cast

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from andrea_callbacks.hooks.measuring import optimizer_place
from andrea_callbacks.hooks.update_gradient import UpdateGradient
from andrea_callbacks.numerics.gradient_norm import GradientNorm, optimizer_parameters
from andrea_callbacks.numerics.weight_change import group_names

LAYERS = (r"^(?:\w+\.)*?\d+(?=\.)", r"^.*(?=\.)", r".*")
"""Match a numbered block, such as `network.blocks.3`, or else the parameter's module."""


class LayerNames:
    """Maps each parameter to its layer, by regular expressions on its name.

    Args:
        owner: Name of the callback with the option, for messages.
        layers: Expressions, tried in order. The text that the first one matches is the layer's name.

    Raises:
        ValueError: If an expression cannot be parsed.
    """

    def __init__(self, owner: str, layers: Sequence[str]) -> None:
        try:
            self._layers = [re.compile(each) for each in layers]
        except re.error as error:
            raise ValueError(f"{owner}: layers: {error.pattern!r} cannot be parsed: {error}") from error
        self._names: dict[int, str] = {}

    def learn(self, module: pl.LightningModule) -> None:
        """Look up the names of a module's parameters."""
        self._names = {id(each): name for name, each in module.named_parameters()}

    def clear(self) -> None:
        """Release the module."""
        self._names.clear()

    def __getitem__(self, parameter: Tensor) -> str | None:
        name = self._names.get(id(parameter), "?")
        return next((found.group() for each in self._layers if (found := each.search(name))), None)


def gradient_kinds(optimizer: Optimizer, norm: GradientNorm) -> dict[str, Tensor | int]:
    """Return numbers of parameters without a gradient, with zeros, with a finite one, and with NaN or Inf."""
    is_sound = norm.rows[:, 1] == 0
    zero = (is_sound & (norm.rows[:, 0] == 0)).sum()
    bad = (~is_sound).sum()
    with_gradient = len(norm.parameters)
    return {
        "gradients/none": len(optimizer_parameters(optimizer)) - with_gradient,
        "gradients/zero": zero,
        "gradients/nonfinite": bad,
        "gradients/finite": with_gradient - zero - bad,
    }


def partial_norms(
    trainer: pl.Trainer, optimizer: Optimizer, gradient: UpdateGradient, layer_of: LayerNames
) -> dict[str, Tensor]:
    """Return the norms of an optimizer's parameter groups and of layers, without a loss scale."""
    norm = gradient.norm
    squares = norm.rows[:, 0] / gradient.scale**2
    places = {id(each): place for place, each in enumerate(norm.parameters)}
    chosen: dict[str, list[int]] = {}
    for name, group in zip(placed_group_names(trainer, optimizer), optimizer.param_groups, strict=True):
        parameters = cast("list[Tensor]", group["params"])
        chosen[f"grad_norm_group/{name}"] = [places[id(each)] for each in parameters if id(each) in places]
    for place, each in enumerate(norm.parameters):
        layer = layer_of[each]
        if layer is not None:
            chosen.setdefault(f"grad_norm_layer/{layer}", []).append(place)
    return {
        name: squares[those].sum().sqrt() if those else torch.zeros_like(norm.total)
        for name, those in chosen.items()
    }


def placed_group_names(trainer: pl.Trainer, optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's groups, prefixed with its index if there are several optimizers."""
    names = group_names(optimizer)
    if len(trainer.optimizers) == 1:
        return names
    return [f"{optimizer_place(trainer, optimizer)}/{name}" for name in names]
