"""Supports `torch.compile`: decides which code is traced, and keeps names of parameters unchanged.

    trainer.fit(torch.compile(module))                 compiles the loss, with the same options
    module.network.compile()                           compiles the network's `__call__`
    module.network = torch.compile(module.network)     wraps the network: `network._orig_mod.…` in every name

The update itself is never traced, since dynamo does not support hooks of fused optimizers.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import torch
from torch import nn

WRAPPER = "_orig_mod."
"""The part that a `torch.compile` wrapper adds to names."""

Function = TypeVar("Function", bound=Callable[..., Any])


def plain_name(name: str, prefix: str = "") -> str:
    """Return a name without what `torch.compile` added after `prefix`.

    A name without the prefix belongs to another module and does not change.
    """
    if not name.startswith(prefix):
        return name
    return prefix + f"{name[len(prefix) :]}.".replace(WRAPPER, "")[:-1]


def untraced(function: Function) -> Function:
    """Return a function that is not traced within compiled code. Functions that it calls may be compiled."""
    return cast(Function, torch.compiler.disable(function))


def compile_like(module: pl.LightningModule, function: Function) -> Function:
    """Return a function compiled with the options of `torch.compile(module)`, unchanged without any."""
    context = cast(Any, module)._compiler_ctx
    return function if context is None else cast(Function, context["dynamo_ctx"](function))


def strip_wrappers(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Remove wrappers' names from a state, so that it loads compiled or not. A `state_dict` hook."""
    del module
    _rename(state, lambda name: plain_name(name, prefix))
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        _rename(metadata, lambda name: plain_name(name, prefix))


def match_wrappers(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give a state this module's names, with or without wrappers. A hook before `load_state_dict`."""
    names = [name for name, _ in cast("Iterable[tuple[str, Any]]", nn.Module.named_modules(module))]
    wrapped = {plain_name(name): name for name in names}  # the last of one name is the innermost

    def rename(name: str) -> str:
        if not name.startswith(prefix):
            return name
        owner, dot, leaf = plain_name(name[len(prefix) :]).rpartition(".")
        return f"{prefix}{wrapped.get(owner, owner)}{dot}{leaf}"

    _rename(state, rename)


def _rename(entries: dict[str, Any], rename: Callable[[str], str]) -> None:
    """Rename the keys of a dict in place, in their order, where any changes."""
    renamed = {rename(name): value for name, value in entries.items()}
    if list(renamed) != list(entries):
        entries.clear()
        entries.update(renamed)
