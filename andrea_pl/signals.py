"""Signals that end a run: the first lets the current update finish, the second ends the process at once."""

import os
import signal
import subprocess
import threading
from types import FrameType
from typing import Any, cast

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from andrea_callbacks.packages import is_kind


class StoppedBySignal(SystemExit):
    """A run that a signal ended, after its update was finished and saved.

    Its exit code is 128 plus the signal's number: 143 for SIGTERM, 130 for SIGINT.

    Args:
        signum: The signal.
        update: The last update.
        saved: The checkpoint that has it, None where nothing is saved.
    """

    def __init__(self, signum: int, update: int, saved: str | None) -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.update = update
        self.saved = saved

    def __str__(self) -> str:
        place = f"saved in {self.saved}" if self.saved else "nothing is saved"
        return f"{signal.Signals(self.signum).name} after update {self.update}; {place}"


class StopSignals:
    """Notes SIGTERM, SIGINT and the signal by which SLURM asks for a requeue, for somebody to act on.

    Args:
        requeue: That signal, None where a requeue is not asked for.
    """

    def __init__(self, requeue: int | None = None) -> None:
        self.received: int | None = None
        """The first signal that came, None before."""
        self.requeue = requeue
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals, in the main thread; elsewhere Python has no handlers, which is said."""
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn("not the main thread: SIGTERM and SIGINT end this run without saving")
            return
        wanted = [signal.SIGTERM, signal.SIGINT] + ([] if self.requeue is None else [self.requeue])
        for each in wanted:
            self._before[each] = signal.signal(each, self._note)

    def restore(self) -> None:
        """Give the signals back to whom they were taken from."""
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before.clear()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(signum).name
        if self.received is not None:
            os.write(2, f"\n{name} once more: ending at once\n".encode())
            os._exit(128 + signum)
        self.received = signum
        os.write(2, f"\n{name}: finishing and saving this update; once more ends at once\n".encode())


def requeue_signal(trainer: pl.Trainer) -> int | None:
    """Return the signal by which SLURM asks for a requeue, None outside of SLURM or where that is off."""
    environment = getattr(getattr(trainer, "_accelerator_connector", None), "cluster_environment", None)
    if is_kind(environment, SLURMEnvironment) and cast(SLURMEnvironment, environment).auto_requeue:
        return cast(SLURMEnvironment, environment).requeue_signal
    return None


def requeue_job() -> None:
    """Have SLURM put this job back into its queue, as Lightning would."""
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
