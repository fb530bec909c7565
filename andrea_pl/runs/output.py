"""Keeps a closed pipe, a closed terminal or a full disk under the output from ending a run.

    print, warnings, logging, tqdm ─> sys.stdout, sys.stderr ─> _Console ─> descriptor 1, 2
                                                                  └ a write fails: the output is dropped

A descriptor whose reader is gone is redirected to `/dev/null`, so that streams opened earlier, libraries and
child processes can write to it too.
"""

import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF, errno.ECONNRESET, errno.ENOTCONN, errno.ESTALE)
"""Errors after which a descriptor will never have a reader again."""

STDERR = 2


def survive_dead_output() -> None:
    """Make `sys.stdout` and `sys.stderr` drop output that cannot be written, for the rest of the process.

    A standard descriptor that is closed at the start is opened on `/dev/null`, so that no file of the run
    gets its number. Replaced streams, such as a notebook's, are not changed. A second call changes nothing.
    """
    if os.name != "posix":
        return
    _open_closed_descriptors()
    for number, name in ((1, "stdout"), (STDERR, "stderr")):
        stream = cast("TextIO | None", getattr(sys, name))
        if stream is None:  # closed at the start; by now the number may be another file's
            setattr(sys, name, _stream(_Console(os.open(os.devnull, os.O_WRONLY)), line_buffering=True))
        elif type(stream) is io.TextIOWrapper and _is_plain(stream, number):
            with suppress(OSError):
                stream.flush()
            setattr(sys, name, _like(stream, number))


def say_at_once(text: str) -> None:
    """Write to standard error from a signal handler: without buffers, without waiting, without raising."""
    if sys.__stderr__ is None:  # closed at the start: another file may have the number by now
        return
    with suppress(OSError, ValueError):
        if select.select([], [STDERR], [], 0)[1]:
            os.write(STDERR, text.encode())


class _Console(io.RawIOBase):
    """A standard descriptor whose writes never fail."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    @property
    def name(self) -> str:
        """The name of the stream on this descriptor."""
        return {1: "<stdout>", STDERR: "<stderr>"}.get(self._descriptor, os.devnull)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, content: Any) -> int:
        """Write what can be written, and return the full size."""
        view = memoryview(content).cast("B")
        size = len(view)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # another process made the pipe non-blocking; its reader is slow
                select.select([], [self._descriptor], [])
            except OSError as error:
                if error.errno in GONE:
                    _point_at_nothing(self._descriptor)
                break  # after a full disk the next line is tried again
        return size


def _point_at_nothing(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    if nothing != descriptor:
        os.dup2(nothing, descriptor)
        os.close(nothing)


def _open_closed_descriptors() -> None:
    for number in (0, 1, STDERR):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)


def _is_plain(stream: TextIO, descriptor: int) -> bool:
    """Return whether a stream is Python's own on that descriptor."""
    raw = getattr(stream.buffer, "raw", stream.buffer)
    try:
        return type(raw) is io.FileIO and raw.fileno() == descriptor
    except ValueError:  # closed
        return False


def _like(stream: io.TextIOWrapper, descriptor: int) -> io.TextIOWrapper:
    is_buffered = isinstance(cast(Any, stream.buffer), io.BufferedWriter)
    return _stream(
        _Console(descriptor),
        is_buffered=is_buffered,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _stream(console: _Console, is_buffered: bool = True, **options: Any) -> io.TextIOWrapper:
    binary = io.BufferedWriter(console) if is_buffered else console
    options.setdefault("encoding", "utf-8")
    stream = io.TextIOWrapper(cast(Any, binary), newline="\n", **options)
    stream.mode = "w"  # pyright: ignore[reportAttributeAccessIssue]  as Python's own streams have it
    return stream
