"""One run per folder: a lock that the kernel releases when its process ends, however it ends."""

import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

from lightning.pytorch.utilities import rank_zero_warn

from andrea_callbacks.numerics.atomic_write import write_all
from andrea_callbacks.numerics.file_lock import lock, this_holder, unlock
from andrea_pl.errors import UserError

LOCK_NAME = ".lock"


class FolderLock:
    """Holds a folder for this process.

    The lock is on an open file and ends with the process. The file's contents name the last holder, for
    people and for finding a run again. The lock file of a killed process is reused. On a file system without
    locks the holder is written all the same, and a warning says that a second run cannot be refused.

    Args:
        folder: An existing folder.
        facts: More contents of the file: plain values by name.
        announce: Whether to write this process into the file at once, or later by `announce()`.

    Raises:
        UserError: If another run holds it; the message names process and machine.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any] | None = None, announce: bool = True) -> None:
        self.folder = folder
        path = folder / LOCK_NAME
        self.is_new = not path.exists()
        """Whether there was no file before."""
        self._file: FileIO | None = None
        self.hold()
        self.before = cast(FileIO, self._file).readall()
        """The file's earlier contents."""
        if announce:
            self.announce(facts)

    def hold(self) -> None:
        """Lock the folder, unless this object does already.

        Raises:
            UserError: If another run holds it.
        """
        while self._file is None:
            self._file = self._take(self.folder / LOCK_NAME)
        _held.add(self)

    def announce(self, facts: Mapping[str, Any] | None = None) -> None:
        """Write this process into the file as the holder.

        Raises:
            UserError: If the file cannot be written.
        """
        holder = {**this_holder(), "job": os.environ.get("SLURM_JOB_ID"), **(facts or {})}
        self._rewrite(json.dumps(holder).encode() + b"\n")

    def withdraw(self) -> None:
        """Release the folder and restore the file, for a run that did not start."""
        if self._file is None:
            return
        if self.is_new:
            (self.folder / LOCK_NAME).unlink(missing_ok=True)
        else:
            self._rewrite(self.before)
        self.release()

    def release(self) -> None:
        """Release the folder; the file stays."""
        if self._file is not None:
            unlock(self._file.fileno())
            self.forget()

    def forget(self) -> None:
        """Close the descriptor that a fork inherited, which would hold the lock as long as the fork lives."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take(self, path: Path) -> FileIO | None:
        """Return the locked file, None if it was removed in the meantime."""
        file = FileIO(path, "r+", opener=lambda name, _: os.open(name, os.O_RDWR | os.O_CREAT, 0o666))
        try:
            obstacle = lock(file.fileno())
        except BlockingIOError as error:
            file.close()
            holder = read_holder(self.folder)
            raise UserError(
                f"{self.folder} is being written by another run (process {holder.get('process', '?')} on "
                f"{holder.get('machine', '?')}, since {holder.get('since', '?')}); wait for it, stop it, or "
                "give this one another folder"
            ) from error
        try:
            is_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except FileNotFoundError:
            is_there = False
        if not is_there:
            file.close()
            return None
        if obstacle is not None:
            rank_zero_warn(
                f"{self.folder}: its file system cannot lock files ({obstacle}), so that a second run in "
                "this folder cannot be refused. Take care that only one writes there"
            )
        return file

    def _rewrite(self, content: bytes) -> None:
        file = cast(FileIO, self._file)
        try:
            file.seek(0)
            write_all(file.fileno(), content)
            file.truncate(len(content))
        except OSError as error:
            raise UserError(
                f"{self.folder / LOCK_NAME} could not be written: {error.strerror or error}; free some "
                "space, or mend the folder's permissions"
            ) from error


_held: "WeakSet[FolderLock]" = WeakSet()


def _forget_in_a_fork() -> None:
    for each in list(_held):
        each.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_a_fork)


def read_holder(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder's lock file: its current or last holder; empty without one."""
    try:
        read: Any = json.loads((folder / LOCK_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    facts = cast("dict[str, Any]", read) if isinstance(read, dict) else {}
    return {name: value for name, value in facts.items() if _is_plausible(name, value)}


def _is_plausible(name: str, value: Any) -> bool:
    """Return whether a value has the expected type, since the file may have been edited."""
    if name in ("logs", "job"):
        return value is None or isinstance(value, str)
    if name != "loggers":
        return True
    rows = cast("list[Any]", value) if isinstance(value, list) else [None]
    return all(
        isinstance(row, list) and [type(each) for each in cast("list[Any]", row)] == [str] * 3 for row in rows
    )
