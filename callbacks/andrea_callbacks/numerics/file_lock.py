"""Locks of the kernel (`flock`) on open files: they end with the process that holds them, however it ends."""

import errno
import os
import socket
import time
from contextlib import suppress

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

HELD = (errno.EAGAIN, errno.EACCES)
"""Errors by which a file system says that another process has the lock; NFS may use the second."""


def lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> str | None:
    """Lock an open file, for this process alone or together with others.

    Args:
        descriptor: The file.
        shared: Whether others may hold it too.
        wait: Whether to wait for those who hold it.

    Returns:
        None; why not where the file system or the machine has no locks, in words.

    Raises:
        BlockingIOError: If another process has it and this one does not wait.
    """
    if fcntl is None:
        return "this system has no flock"
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in HELD and not wait:
            raise BlockingIOError(errno.EAGAIN, reason) from error
        return reason
    return None


def unlock(descriptor: int) -> None:
    """Let go of a file, also where a fork has inherited it; nothing where it was not locked."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def this_holder() -> dict[str, int | str]:
    """Return what a lock file says of the process that holds it."""
    return {
        "process": os.getpid(),
        "machine": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
