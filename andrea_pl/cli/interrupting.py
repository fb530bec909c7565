"""Ctrl-C while the command imports torch and Lightning, which takes seconds: no traceback, exit code 130.

Imports nothing that takes time. `andrea_pl` calls `quieten_interrupts` before it imports anything else, which
the command cannot do itself: by the time its first line runs, the package is imported.
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
    """Have Ctrl-C end this process at once, if it is the command and nobody else has taken the signal."""
    if not _is_command() or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def give_interrupts_back() -> None:
    """Have Ctrl-C raise KeyboardInterrupt again, where `quieten_interrupts` changed that."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    """Say whether this process is `andrea`, or `python -m andrea_pl` before it has found that."""
    name = PurePath(sys.argv[0]).name if getattr(sys, "argv", None) else ""
    return name in ("andrea", "andrea.exe", "-m")


def _end(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, b"andrea: interrupted while starting\n")
    os._exit(EXIT_INTERRUPTED)
