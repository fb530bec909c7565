"""One run per folder: a lock that the kernel lets go of when its process ends, however it ends."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any, TextIO, cast

from andrea_pl.errors import UserError

LOCK_NAME = ".lock"


class FolderLock:
    """Holds a folder for this process.

    The lock is on an open file, and ends with the process; what the file says of its last holder is for
    people, and for finding a job's own run again. A file left by a process that was killed is taken over.

    Args:
        folder: An existing folder.
        logs: The run's log folder, for a resume to find it again.

    Raises:
        UserError: If another run holds it; the message names process and machine.
    """

    def __init__(self, folder: Path, logs: str | None = None) -> None:
        import fcntl  # not on Windows

        self.path = folder / LOCK_NAME
        file: TextIO = self.path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = read_holder(folder)
            file.close()
            raise UserError(
                f"{folder} is being written by another run (process {holder.get('process', '?')} on "
                f"{holder.get('machine', '?')}, since {holder.get('since', '?')}); wait for it, stop it, or "
                "give this one another folder"
            ) from error
        except OSError:
            file.close()  # a file system without locks: nothing can be promised there
            self._file = None
            return
        self._file: TextIO | None = file
        holder = {
            "process": os.getpid(),
            "machine": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "job": os.environ.get("SLURM_JOB_ID"),
            "logs": logs,
        }
        file.truncate(0)
        file.write(json.dumps(holder) + "\n")
        file.flush()

    def release(self) -> None:
        """Let go of the folder; the file stays."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_holder(folder: Path) -> dict[str, Any]:
    """Return who holds, or last held, a folder; empty where nobody did."""
    try:
        read: Any = json.loads((folder / LOCK_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", read) if isinstance(read, dict) else {}
