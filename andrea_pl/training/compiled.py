"""What `torch.compile` changes of a module: whose code is traced, and what its parts are called.

    trainer.fit(torch.compile(module))                 Lightning keeps the options; the loss is compiled
    module.network.compile()                           the network's `__call__` is, by itself
    module.network = torch.compile(module.network)     wraps it: `network._orig_mod.…` in every name

The update itself is never traced: hooks of fused optimizers and dynamo do not mix.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import torch
from torch import nn

WRAPPER = "_orig_mod."
"""What a wrapper of `torch.compile` puts before the names of what it wraps."""

Function = TypeVar("Function", bound=Callable[..., Any])


def plain_name(name: str, prefix: str = "") -> str:
    """Return the name that a part has without `torch.compile`; what comes before it, `prefix`, stays.

    A name without the prefix is another module's, and stays too.
    """
    if not name.startswith(prefix):
        return name
    return prefix + f"{name[len(prefix) :]}.".replace(WRAPPER, "")[:-1]


def untraced(function: Function) -> Function:
    """Return a function that runs as it is within compiled code; what it calls may be compiled by itself."""
    return cast(Function, torch.compiler.disable(function))


def compile_like(module: pl.LightningModule, function: Function) -> Function:
    """Return a function compiled with the options of `torch.compile(module)`, itself where there was none."""
    context = cast(Any, module)._compiler_ctx
    return function if context is None else cast(Function, context["dynamo_ctx"](function))


def strip_wrappers(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Write a state without the names of wrappers, so that it loads compiled or not; a `state_dict` hook."""
    del module
    _rename(state, lambda name: plain_name(name, prefix))
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        _rename(metadata, lambda name: plain_name(name, prefix))


def match_wrappers(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give a state the names of this module, wrapped or not; a hook before `load_state_dict`."""
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
