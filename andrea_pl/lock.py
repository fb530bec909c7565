"""One run per folder: a lock that the kernel lets go of when its process ends, however it ends."""

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO, cast
from weakref import WeakSet

from andrea_pl.errors import UserError

LOCK_NAME = ".lock"


class FolderLock:
    """Holds a folder for this process.

    The lock is on an open file, and ends with the process; what the file says of its last holder is for
    people, and for finding a run again. A file left by a process that was killed is taken over.

    Args:
        folder: An existing folder.
        facts: What else the file is to say: plain values by name.

    Raises:
        UserError: If another run holds it; the message names process and machine.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any] | None = None) -> None:
        import fcntl  # not on Windows

        self._fcntl = fcntl
        self._file: TextIO | None = (folder / LOCK_NAME).open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._close()
            holder = read_holder(folder)
            raise UserError(
                f"{folder} is being written by another run (process {holder.get('process', '?')} on "
                f"{holder.get('machine', '?')}, since {holder.get('since', '?')}); wait for it, stop it, or "
                "give this one another folder"
            ) from error
        except OSError:  # a file system without locks: nothing can be promised there
            self._close()
            return
        holder = {
            "process": os.getpid(),
            "machine": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "job": os.environ.get("SLURM_JOB_ID"),
            **(facts or {}),
        }
        self._file.truncate(0)
        self._file.write(json.dumps(holder) + "\n")
        self._file.flush()
        _held.add(self)

    def release(self) -> None:
        """Let go of the folder; the file stays."""
        if self._file is not None:
            self._fcntl.flock(self._file, self._fcntl.LOCK_UN)
            self._close()

    def forget(self) -> None:
        """Close what a fork inherited, which would hold the folder for as long as the fork lives."""
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


_held: "WeakSet[FolderLock]" = WeakSet()


def _forget_in_a_fork() -> None:
    for lock in list(_held):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_a_fork)


def read_holder(folder: Path) -> dict[str, Any]:
    """Return who holds, or last held, a folder; empty where nobody did."""
    try:
        read: Any = json.loads((folder / LOCK_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", read) if isinstance(read, dict) else {}
