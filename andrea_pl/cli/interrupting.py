"""Handles Ctrl-C while the command imports torch and Lightning for seconds: no traceback, exit code 130.

This file imports nothing slow. `andrea_pl` itself calls `quieten_interrupts` before its other imports, since
the package is already imported when the command's first line runs.
"""

import contextlib
import os
import signal
import sys
import threading
from pathlib import PurePath
from types import FrameType

EXIT_INTERRUPTED = 130


def quieten_interrupts() -> None:
    """Make Ctrl-C end this process at once, if it is the command and the signal has no other handler."""
    if not _is_command() or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def give_interrupts_back() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again, if `quieten_interrupts` changed that."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    """Return whether this process is `andrea`, or `python -m andrea_pl` before Python has set its path."""
    name = PurePath(sys.argv[0]).name if getattr(sys, "argv", None) else ""
    return name in ("andrea", "andrea.exe", "-m")


def _end(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, b"andrea: interrupted while starting\n")
    os._exit(EXIT_INTERRUPTED)
