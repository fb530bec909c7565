"""Locks of the cache: for preparing a folder, and for stores in use.

On a file system without locks everything works without them: files are written under unique names and then
renamed, so that the loser of a race uses the winner's files.
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
    """Hold the lock for preparing a folder; wait for another process, and print once which one.

    Args:
        folder: A folder of the cache; it is made if missing.

    Yields:
        Whether no other process can be writing there: False if the file system has no locks.

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
    """Hold a shared lock on a file of a store, so that `--prune` does not remove the store.

    Returns:
        The descriptor, to be closed when the store is no longer used; None if it cannot be locked.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    lock(descriptor, shared=True, wait=True)
    return descriptor


@contextmanager
def taken(file: Path) -> Generator[bool]:
    """Try to lock a file exclusively, without waiting.

    Yields:
        Whether no other process holds it; False if that is unknown.
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
    """Open a lock file that other users may use too; None in a folder that we cannot write."""
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
