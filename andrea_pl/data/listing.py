"""The files of a source, looked up once while a run starts: a folder of a network disk may take seconds."""

from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_found: ContextVar[dict[Hashable, list[Path]] | None] = ContextVar("found", default=None)


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


def listed(source: Hashable, look_up: Callable[[], list[Path]]) -> list[Path]:
    """Return the files of a source, looked up now unless `listed_once` holds them.

    Args:
        source: What they depend on.
        look_up: Finds them.
    """
    found = _found.get()
    if found is None:
        return look_up()
    if source not in found:
        found[source] = look_up()
    return list(found[source])
