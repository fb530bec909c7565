"""Kernel locks (`flock`) on open files. They end with their process, however it ends."""

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
"""Error numbers that mean that another process holds the lock; NFS may use the second."""


def lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> str | None:
    """Lock an open file.

    Args:
        descriptor: The file.
        shared: Whether other processes may hold the lock too.
        wait: Whether to wait for the current holders.

    Returns:
        None, or the reason in words if the file system or the machine has no locks.

    Raises:
        BlockingIOError: If another process holds the lock, and `wait` is false.
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
    """Release a file's lock, also for forks that inherited it. An unlocked file is no error."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def this_holder() -> dict[str, int | str]:
    """Return the contents of a lock file about the current process."""
    return {
        "process": os.getpid(),
        "machine": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
