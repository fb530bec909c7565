"""Signals that end a run: after the first the current update finishes, the second ends the process at once.

A signal that is ignored when a run starts, as under `nohup`, stays ignored. A closed terminal may send SIGHUP
more than once, and a logout sends SIGTERM with it. So SIGHUP never counts as the first or second signal.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from andrea_callbacks.hooks.lightning_state import cluster_environment
from andrea_callbacks.hooks.packages import is_kind
from andrea_pl.runs.output import say_at_once

HANGUP: int | None = getattr(signal, "SIGHUP", None)
"""The signal of a closed terminal, None on Windows."""

_ignored_by_lightning: set[int] = set()
"""Signals that Lightning set to ignored after Ctrl-C ended a fit."""


class StoppedBySignal(SystemExit):
    """A signal ended the run, after its update was finished and saved.

    Its exit code is 128 plus the signal's number: 143 for SIGTERM, 130 for SIGINT, 129 for SIGHUP.

    Args:
        signum: The signal.
        update: The last update.
        saved: The checkpoint of that update, None if nothing was saved.
    """

    def __init__(self, signum: int, update: int, saved: str | None) -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.update = update
        self.saved = saved

    def __str__(self) -> str:
        place = f"saved in {self.saved}" if self.saved else "nothing is saved"
        return f"{signal.Signals(self.signum).name} after update {self.update}; {place}"


class EndedBySignal(SystemExit):
    """SIGTERM or SIGHUP ended the command outside of training, with nothing to save.

    Args:
        signum: The signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class StopSignals:
    """Records SIGTERM, SIGINT, SIGHUP and SLURM's requeue signal, for the caller to act on.

    Args:
        requeue: SLURM's requeue signal, or None.
        ignored: Signals that stay ignored; by default those that are ignored now.
    """

    def __init__(self, requeue: int | None = None, ignored: frozenset[int] | None = None) -> None:
        self.received: int | None = None
        """The first received signal, or None."""
        self.requeue = requeue
        self.ignored = ignored_signals() if ignored is None else ignored
        self._insisted = False
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handlers. Outside the main thread Python cannot; a warning says so."""
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn("not the main thread: SIGTERM, SIGINT and SIGHUP end this run without saving")
            return
        for each in [*_ending(), *([] if self.requeue is None else [self.requeue])]:
            is_ignored = each in self.ignored and each != self.requeue
            self._before[each] = signal.signal(each, signal.SIG_IGN if is_ignored else self._note)

    def restore(self) -> None:
        """Restore the earlier handlers. A handler that was not installed from Python becomes the default."""
        for each, handler in self._before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(signum).name
        if self._insisted and signum != HANGUP:
            say_at_once(f"\n{name} once more: ending at once\n")
            os._exit(128 + signum)
        self._insisted |= signum != HANGUP
        if self.received is None:
            self.received = signum
            say_at_once(f"\n{name}: finishing and saving this update; once more ends at once\n")


def ignored_signals() -> frozenset[int]:
    """Return the run-ending signals that are ignored, except those that only Lightning ignores."""
    ignored = {each for each in _ending() if signal.getsignal(each) == signal.SIG_IGN}
    return frozenset(ignored - _ignored_by_lightning)


def note_exception(exception: BaseException) -> None:
    """Remember that Lightning ignores Ctrl-C after this exception, so that the next fit still handles it."""
    if isinstance(exception, KeyboardInterrupt):
        _ignored_by_lightning.add(signal.SIGINT)


@contextmanager
def ending_in_order() -> Generator[None, None, None]:
    """Make SIGTERM and SIGHUP raise `EndedBySignal`, so that cleanup code runs.

    Only signals with their default action change: an ignored or handled signal stays so.
    """
    taken: list[int] = []

    def end(signum: int, frame: FrameType | None) -> None:
        del frame
        if signal.getsignal(signum) is not end:
            return  # Lightning has put its own handler around this one
        for each in taken:
            signal.signal(each, signal.SIG_IGN if each == HANGUP else signal.SIG_DFL)
        raise EndedBySignal(signum)

    if threading.current_thread() is threading.main_thread():
        taken += [
            each for each in _ending() if each != signal.SIGINT and signal.getsignal(each) == signal.SIG_DFL
        ]
    for each in taken:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)


def _ending() -> list[int]:
    return [signal.SIGTERM, signal.SIGINT, *([] if HANGUP is None else [HANGUP])]


def requeue_signal(trainer: pl.Trainer) -> int | None:
    """Return SLURM's requeue signal, None outside of SLURM or without automatic requeue."""
    environment = cluster_environment(trainer)
    if is_kind(environment, SLURMEnvironment) and cast(SLURMEnvironment, environment).auto_requeue:
        return cast(SLURMEnvironment, environment).requeue_signal
    return None


def requeue_job() -> None:
    """Requeue this SLURM job, as Lightning would."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not job.replace("_", "").isdigit():
        rank_zero_warn(f"SLURM_JOB_ID is {job!r}, which is no job; nothing was requeued")
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)  # noqa: S603, S607  the name is SLURM's
    except (OSError, subprocess.CalledProcessError) as error:
        rank_zero_warn(f"job {job} could not be requeued: {error}")
    else:
        rank_zero_info(f"job {job} is requeued")
