"""The files of a source, looked up once while a run starts: a folder of a network disk may take seconds."""

from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar, cast

Listing = TypeVar("Listing")

_found: ContextVar[dict[Hashable, object] | None] = ContextVar("found", default=None)


@contextmanager
def listed_once() -> Generator[None]:
    """Have every source look its files up once within this; within another of these, that one counts."""
    if _found.get() is not None:
        yield
        return
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def listed(source: Hashable, look_up: Callable[[], Listing]) -> Listing:
    """Return what a source's paths name, looked up now unless `listed_once` holds it.

    Args:
        source: What it depends on.
        look_up: Finds it. What it returns is shared: do not change it.
    """
    found = _found.get()
    if found is None:
        return look_up()
    if source not in found:
        found[source] = look_up()
    return cast(Listing, found[source])
