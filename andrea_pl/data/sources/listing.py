"""Looks up each source's files only once while a run starts: a folder on a network disk may take seconds."""

from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar, cast

Listing = TypeVar("Listing")

_found: ContextVar[dict[Hashable, object] | None] = ContextVar("found", default=None)


@contextmanager
def listed_once() -> Generator[None]:
    """Look up every source's files only once within this context. Nested contexts share the outer one."""
    if _found.get() is not None:
        yield
        return
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def listed(source: Hashable, look_up: Callable[[], Listing]) -> Listing:
    """Return the files of a source's paths, from `listed_once` if it has them.

    Args:
        source: The key of the lookup.
        look_up: Finds the files. Its result is shared: do not change it.
    """
    found = _found.get()
    if found is None:
        return look_up()
    if source not in found:
        found[source] = look_up()
    return cast(Listing, found[source])
