"""When checkpoints are saved, which are kept, and what a signal does.

    update k ─┬─ a signal: save, stop
              ├─ due, and neither validation nor the end of the epoch follows: save
    validation┼─ the best so far, or due, and the epoch goes on: save
    epoch end ┼─ the best so far, or due: save
    the end   └─ the last update, before a callback replaces the weights; then what they were replaced by

A save is due every n updates, every t minutes and at the run's last update, but never twice at one update.
All ranks decide alike, by rank zero's clock and metric and by the signals of all ranks. Nothing is saved
while a callback has other weights in the module, such as an average during validation.
"""

import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from andrea_callbacks import ExactResume
from andrea_callbacks.hooks.lightning_state import (
    adds_epoch,
    awaits_validation,
    ends_epoch,
    validates_to_stop,
)
from andrea_callbacks.hooks.packages import with_twin
from andrea_callbacks.numerics.host_transfer import reduce_over_ranks
from andrea_pl.errors import UserError
from andrea_pl.runs.checkpoint_folder import (
    PERIODIC,
)
from andrea_pl.runs.checkpoint_writer import CheckpointWriter, require_recognition
from andrea_pl.runs.signals import (
    StoppedBySignal,
    StopSignals,
    ignored_signals,
    note_exception,
    requeue_job,
    requeue_signal,
)
from andrea_pl.runs.unasked import never_resume_unasked

never_resume_unasked()


class DurableCheckpoint(CheckpointWriter):
    """Saves checkpoints between updates: every n updates, every t minutes, the best, the last, on a signal.

    On SIGTERM, SIGINT or SIGHUP the run finishes and saves the current update, and the process exits with
    143, 130 or 129. A second SIGTERM or SIGINT ends it at once. A signal that is ignored when the fit starts,
    as under `nohup`, stays ignored. SLURM's requeue signal also saves, and requeues the job. On one rank, a
    signal during validation interrupts it, and a resume runs that validation again. If a callback has
    replaced the weights for validation, as averages do, the run stops after it, when they are restored.

    If the run ends with other weights than those of its last update, such as an average, and the last
    checkpoint does not hold them, they are saved in `final-<k>.ckpt`. That file holds only weights: a resume
    continues from `update-<k>.ckpt`.

    `DurableCheckpointIO` writes the files `update-<k>.ckpt` and `best-<k>.ckpt`; it replaces Lightning's own
    IO in the trainer. A file is removed only after a newer one is on the disk. Only one run at a time may use
    the folder. When training starts, checkpoints of later updates, from an earlier run or damaged ones that a
    resume skipped, are moved to subfolders `earlier-1`, `earlier-2` …

    Args:
        every: Updates between two saves; None for none by number.
        minutes: Minutes between two saves; None for none by time.
        monitor: Logged metric that decides which files are best, such as `val/loss`; None for no best files.
        mode: Whether the smallest (`min`) or the largest (`max`) value is best.
        keep: Number of newest files to keep, including best ones; 0 keeps all. The newest final file is kept
            in addition.
        keep_best: Number of best files to keep.
        dirpath: Folder. The default is `checkpoints` in the log folder, or in the trainer's root without a
            logger. A folder on another file system (`s3://` …) is written by Lightning's IO, without lock and
            manifest.
        name: Tells instances in the same trainer apart; each needs its own folder.

    Raises:
        UserError: Before the first update, if an option is out of range, or the folder cannot be written or
            belongs to another run.
    """

    resumes_only_when_asked = True
    """Keeps Lightning from resuming a checkpoint that nobody asked for; see `runs.unasked`."""

    def __init__(
        self,
        every: int | None = None,
        minutes: float | None = 10.0,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        keep: int = 2,
        keep_best: int = 1,
        dirpath: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(monitor, mode, keep, keep_best, dirpath, name)
        if every is not None and every < 1:
            raise UserError(f"DurableCheckpoint: every must be at least 1 update, got {every}")
        if minutes is not None and not minutes > 0:
            raise UserError(f"DurableCheckpoint: minutes must be more than 0, got {minutes}")
        self.every = every
        self.minutes = minutes
        self._signals: StopSignals | None = None
        self._ahead: _Ahead | None = None
        self._reset_timing()
        never_resume_unasked()  # of a package that was imported after this one
        self.__class__ = with_twin(type(self))  # pytorch_lightning would add a ModelCheckpoint otherwise

    def _reset_timing(self) -> None:
        """Reset what an earlier fit left."""
        self._seen = 0
        self._resumed: tuple[int, str] | None = None
        self._epochs: int | None = None
        self._is_due = self._is_late_told = False
        self._told: int | None = None
        self._ignored: frozenset[int] = frozenset()
        self._score: float | None = None
        self._since = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one fit: the folder's lock, the signals, the module's methods."""
        return super().__getstate__() | {"_signals": None, "_ahead": None}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find, lock and clean up the folder; refuse one that cannot be written."""
        if stage != "fit":
            return  # the files of a fit stay known for what is validated or tested after it
        self.dirpath = None
        if getattr(trainer, "fast_dev_run", False):
            return
        require_recognition(trainer, self)
        self._reset_files()
        self._reset_timing()
        self._ignored = ignored_signals()  # before Lightning takes SIGTERM
        self._epochs = trainer.max_epochs
        self._take_folder(trainer)
        self._ahead = _Ahead(self)
        # a new list, since the trainer is going through the old one
        cast(Any, trainer).callbacks = [self._ahead, *cast(Any, trainer).callbacks]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install signal handlers, start the clock, and move aside checkpoints of other runs."""
        if self.dirpath is None:
            return
        self._seen = trainer.global_step
        if trainer.ckpt_path is not None:
            self._resumed = trainer.global_step, str(trainer.ckpt_path)
        self._tidy_folder(trainer)
        self._since = time.monotonic()
        others = [each for each in cast(Any, trainer).callbacks if isinstance(each, DurableCheckpoint)]
        if others[-1] is self:  # the last one saves after the others have
            self._signals = StopSignals(requeue_signal(trainer), self._ignored)
            self._signals.install()
            if trainer.received_sigterm and signal.SIGTERM not in self._ignored:
                self._signals.received = signal.SIGTERM

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop on a signal; save if due, unless validation or the end of the epoch comes first."""
        if self.dirpath is None or trainer.global_step == self._seen:
            return
        before, self._seen = self._seen, trainer.global_step
        self._report_logs()
        self._weights.end_validation()
        for each in cast(Any, trainer).callbacks:
            if isinstance(each, ExactResume):
                each.note_states(trainer, pl_module)
        self._note_due(trainer, before)
        self._stop_if_told(trainer)
        is_followed = ends_epoch(trainer) or awaits_validation(trainer) or validates_to_stop(trainer)
        if self._is_due and not is_followed:
            self._save(trainer)

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Stop on a signal, on one rank only, and only while the module has the training weights.

        Several ranks wait for the end of validation, since they may have different numbers of batches.
        """
        if trainer.state.fn != TrainerFn.FITTING or trainer.world_size > 1 or trainer.sanity_checking:
            return
        self._agree(trainer)
        if self._told is not None and not self._weights.is_replaced(trainer.lightning_module):
            self._stop_if_told(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if best or due, unless the end of the epoch comes first; stop on a signal."""
        if self.dirpath is None or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        self._is_due |= trainer.should_stop
        self._score = self._best.read(trainer)
        if self._agree(trainer, self._weights.is_replaced(trainer.lightning_module)):
            self._wait_for_weights(trainer, will_end_epoch=ends_epoch(trainer))
            return
        self._weights.end_validation()
        if not ends_epoch(trainer) and (self._is_due or self._score is not None):
            self._save(trainer)
        self._agree(trainer)
        self._stop_if_told(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if due; stop on a signal."""
        if self.dirpath is None:
            return
        if self._agree(trainer, self._weights.is_replaced(trainer.lightning_module)):
            self._wait_for_weights(trainer)
            return
        self._weights.end_validation()
        is_due = self._is_due or self._score is not None or adds_epoch(trainer, self._epochs)
        if ends_epoch(trainer) and is_due:
            self._save(trainer)
        self._agree(trainer)
        self._stop_if_told(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save weights that callbacks put in place at the end; restore the signal handlers."""
        if self.dirpath is not None:
            self._save(trainer)  # where the weights were not back before
            self._save_final(trainer, pl_module)
        self._let_go_of_signals()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save weights that the module put in place in its own `on_train_end`."""
        if self.dirpath is not None:
            self._save_final(trainer, pl_module)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Restore signal handlers and release the folder. A failed update is not saved.

        If a disk failed after an update, such as a logger's, that update is saved first.
        """
        note_exception(exception)
        if isinstance(exception, OSError):
            self._save_what_is_done(trainer)
        self._let_go(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore signal handlers and release the folder."""
        if stage == "fit":
            self._let_go(trainer)

    def _save_what_is_done(self, trainer: pl.Trainer) -> None:
        """Save after an error between two updates, on one rank only: others would wait for each other."""
        resumes = [each for each in cast(Any, trainer).callbacks if isinstance(each, ExactResume)]
        if self.dirpath is None or trainer.world_size > 1 or trainer.sanity_checking or not resumes:
            return
        if resumes[0].place(trainer) is None or self._weights.is_replaced(trainer.lightning_module):
            return
        with suppress(UserError):  # the checkpoints' own disk is full too: the first fault is told
            self._save(trainer)
            rank_zero_info(f"saved in {self.last_path}")

    def _let_go(self, trainer: pl.Trainer) -> None:
        self._let_go_of_signals()
        callbacks = cast("list[Callback]", cast(Any, trainer).callbacks)
        cast(Any, trainer).callbacks = [each for each in callbacks if each is not self._ahead]
        self._ahead = None
        self._close_files()

    def _let_go_of_signals(self) -> None:
        if self._signals is not None:
            self._signals.restore()
            self._signals = None

    def _note_due(self, trainer: pl.Trainer, before: int) -> None:
        """Decide what is due after an update, the same on all ranks."""
        now = trainer.global_step
        if self.every is not None and before // self.every != now // self.every:
            self._is_due = True
        is_late = self.minutes is not None and time.monotonic() - self._since >= 60.0 * self.minutes
        is_late = self._agree(trainer, is_late and trainer.is_global_zero)
        self._is_due |= is_late or 0 < trainer.max_steps <= now or trainer.should_stop

    def _agree(self, trainer: pl.Trainer, figure: bool = False) -> bool:
        """Share a signal that one rank received with all ranks, and reduce a flag over them.

        All ranks must call this together, during training, where Lightning synchronises once per batch
        anyway.
        """
        received = (self._signals.received if self._signals is not None else None) or 0
        row = torch.tensor([float(figure), float(received)], device=trainer.strategy.root_device)
        agreed, received = cast("list[float]", reduce_over_ranks(row).tolist())
        self._told = int(received) or None
        return bool(agreed)

    def _stop_if_told(self, trainer: pl.Trainer) -> None:
        if (signals := self._signals) is None or (told := self._told) is None:
            return
        for each in cast(Any, trainer).callbacks:
            if isinstance(each, DurableCheckpoint):
                each._save_for_signal(trainer)
        if told == signals.requeue and trainer.is_global_zero:
            requeue_job()
        stop = StoppedBySignal(told, trainer.global_step, self.last_path)
        rank_zero_info(str(stop))
        raise stop

    def begin_validation(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep a fingerprint of the training weights before a callback replaces them."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._weights.begin_validation(pl_module)

    def begin_end(self, trainer: pl.Trainer) -> None:
        """Save the last update, unless it is saved, before a callback replaces its weights."""
        if not self._any_rank(trainer, self._weights.is_replaced(trainer.lightning_module)):
            self._save(trainer)

    def _wait_for_weights(self, trainer: pl.Trainer, will_end_epoch: bool = False) -> None:
        """Postpone saving and stopping to the end of the epoch, or to the next update."""
        if self._score is None or will_end_epoch:
            return
        self._score = None
        if not self._is_late_told:
            self._is_late_told = True
            _warn_of_late_weights(trainer.global_step)

    def _save_for_signal(self, trainer: pl.Trainer) -> None:
        """Save, but never replace a checkpoint from between updates with one from within a validation."""
        update, path = self._resumed or (None, "")
        name = self.open_folder(trainer).file(PERIODIC, trainer.global_step)
        is_within = trainer.validating and self._weights.is_within_validation
        if is_within and update == trainer.global_step and Path(path).resolve() == Path(name).resolve():
            self.last_path = path
            return
        self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        """Save, unless this update is saved already."""
        if self.dirpath is None or trainer.global_step == self._saved:
            return
        score, self._score = self._score, None
        self._write(trainer, score)
        self._is_due = False
        self._since = time.monotonic()


class _Ahead(Callback):
    """Runs before all other callbacks of a fit, to show a DurableCheckpoint the training weights.

    The DurableCheckpoint itself runs after them, so that it saves what they did.
    """

    def __init__(self, saving: DurableCheckpoint) -> None:
        super().__init__()
        self._saving = saving

    @property
    @override
    def state_key(self) -> str:
        """The state's key in checkpoints; this callback has no state."""
        return f"{self._saving.state_key}.ahead"

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Announce the start of a validation."""
        self._saving.begin_validation(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Announce the end of training."""
        self._saving.begin_end(trainer)


def _warn_of_late_weights(update: int) -> None:
    rank_zero_warn(
        f"update {update} is the best so far, and is not saved: the weights were replaced for validation and "
        "are not back in the callbacks' on_validation_end. Put them back in on_validation_epoch_end"
    )
