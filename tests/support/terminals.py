"""Commands before pipes and terminals that somebody closes; a script that commands.py forks uses it."""

import contextlib
import ctypes
import fcntl
import os
import pty
import signal
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Running:
    """A command in a session of its own."""

    pid: int
    updates: int
    """A pipe with a line for every update that is done."""
    screen: int
    """What reads its output: the master of a terminal, or the reading end of a pipe."""
    done: int = 0
    shown: bytes = b""
    is_open: bool = field(default=True)

    def wait_for(self, update: int) -> None:
        """Read along until so many updates are done."""
        rest = b""
        while self.done < update:
            self.look()
            try:
                told = os.read(self.updates, 1 << 16)
            except BlockingIOError:
                time.sleep(0.001)
                continue
            if not told:
                raise EOFError(f"ended before update {update}: {self.shown[-2000:]!r}")
            *lines, rest = (rest + told).split(b"\n")
            self.done = max([self.done, *map(int, lines)])

    def look(self) -> None:
        """Take what the command has written."""
        if self.is_open:
            with contextlib.suppress(OSError):
                self.shown += os.read(self.screen, 1 << 16)

    def close(self) -> None:
        """Be gone, as a `tee` that Ctrl-C ended, or a connection that broke."""
        os.close(self.screen)
        self.is_open = False

    def send(self, signum: int) -> None:
        """Send a signal to all its processes."""
        os.killpg(self.pid, signum)

    def end(self) -> int:
        """Wait for its end, reading along, and return the exit code."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            self.look()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.look()
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.killpg(self.pid, signal.SIGKILL)
        raise TimeoutError(self.shown[-2000:])


def start(
    arguments: list[str],
    terminal: bool = False,
    before: Callable[[], Any] | None = None,
    pace: float = 0.02,
) -> Running:
    """Fork the command; it ends as an interpreter does, with its last flush of the streams."""
    reading, writing = os.pipe()
    screen, output = pty.openpty() if terminal else os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.close(screen)
        os.setsid()
        if terminal:
            fcntl.ioctl(output, termios.TIOCSCTTY, 0)
        for number in (1, 2):
            os.dup2(output, number)
        _be(arguments, writing, before, pace)
    os.close(writing)
    os.close(output)
    os.set_blocking(reading, False)
    os.set_blocking(screen, False)
    return Running(pid, reading, screen)


def _be(arguments: list[str], updates: int, before: Callable[[], Any] | None, pace: float) -> None:
    import andrea_pl.cli.app
    import andrea_pl.cli.main

    def tell(self: Any, trainer: Any, *_: Any) -> None:
        os.write(updates, f"{trainer.global_step}\n".encode())
        time.sleep(pace)

    code: Any = 1
    try:
        andrea_pl.cli.app.StopReason.on_train_batch_end = tell
        if before is not None:
            before()
        code = andrea_pl.cli.main.main(arguments)
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    ctypes.pythonapi.Py_Exit(int(code or 0))
