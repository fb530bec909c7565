"""Keeps old names working for one minor version, with a warning that gives the new name."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])
Target = TypeVar("Target", bound="type | Callable[..., Any]")


def old_name(name: str, function: Function) -> Function:
    """Return a function under an old name; calling it warns and names the new one."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        _warn(f"{name} is called {function.__name__} now")
        return function(*arguments, **options)

    return cast(Function, call)


def old_options(**renamed: str) -> Callable[[Target], Target]:
    """Make a class or a function accept options by old names too: `@old_options(lr_floor="min_lr_ratio")`.

    The command translates configurations with its own table, `andrea_pl.cli.renamed`.

    Raises:
        TypeError: In the call, if an option is given by both names.
    """

    def decorate(target: Target) -> Target:
        is_class = isinstance(target, type)
        function = cast("Callable[..., Any]", target.__init__ if is_class else target)
        name = cast(Any, target).__name__

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            for old in renamed.keys() & options.keys():
                new = renamed[old]
                if new in options:
                    raise TypeError(f"{name}: {old} is called {new} now, and both are given")
                _warn(f"{name}: the option {old} is called {new} now")
                options[new] = options.pop(old)
            return function(*arguments, **options)

        if not is_class:
            return cast(Target, call)
        cast(Any, target).__init__ = call
        return cast(Target, target)

    return decorate


def _warn(message: str) -> None:
    warnings.warn(f"{message}; the old name goes in the next minor version", FutureWarning, stacklevel=3)
