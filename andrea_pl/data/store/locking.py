"""Locks of the cache: who prepares a folder, and which stores are in use.

Where the file system has no locks, everything goes on without them: files are written under names of their
own and renamed, so that the loser of a race uses the winner's.
"""

import json
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from lightning.pytorch.utilities import rank_zero_info

from andrea_callbacks.numerics.file_lock import lock, this_holder, unlock

LOCK_NAME = ".lock"


@contextmanager
def preparing(folder: Path) -> Generator[bool]:
    """Be the only process that prepares a folder; wait for another one, and say once for which.

    Args:
        folder: A folder of the cache; it is made where it is missing.

    Yields:
        Whether nobody else can be writing there: False where the file system has no locks.

    Raises:
        OSError: If the folder cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = _open(folder / LOCK_NAME)
    if descriptor is None:
        yield False
        return
    try:
        try:
            obstacle = lock(descriptor)
        except BlockingIOError:
            rank_zero_info(f"waiting for {_holder(folder)}, which prepares {folder}")
            obstacle = lock(descriptor, wait=True)
        if obstacle is None:
            _say_who(descriptor)
        yield obstacle is None
    finally:
        _release(descriptor)


def hold(file: Path) -> int | None:
    """Hold a file of a store, together with others, so that `--prune` leaves the store alone.

    Returns:
        The descriptor, to be closed when the store is no longer used; None where it cannot be held.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    lock(descriptor, shared=True, wait=True)
    return descriptor


@contextmanager
def taken(file: Path) -> Generator[bool]:
    """Take a file for this process alone, without waiting.

    Yields:
        Whether nobody holds it: False too where that cannot be known.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    is_taken = False
    with suppress(BlockingIOError):
        is_taken = lock(descriptor) is None
    try:
        yield is_taken
    finally:
        _release(descriptor)


def _open(file: Path) -> int | None:
    """Open a lock file that others may use too; None in a folder where we may not."""
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
        with suppress(OSError):
            return os.open(file, flags | os.O_CLOEXEC, 0o666)
    return None


def _release(descriptor: int) -> None:
    unlock(descriptor)
    os.close(descriptor)


def _say_who(descriptor: int) -> None:
    with suppress(OSError):  # another user's file, or a full disk: only the words are missing
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(this_holder()).encode(), 0)


def _holder(folder: Path) -> str:
    try:
        read: Any = json.loads((folder / LOCK_NAME).read_text(encoding="utf-8"))
        holder = cast("dict[str, Any]", read)
        return f"process {holder['process']} on {holder['machine']} (since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
