"""When checkpoints are saved, which are kept, and what a signal does.

    update k ─┬─ a signal: save, stop
              ├─ due, and neither validation nor the end of the epoch follows: save
    validation┼─ the best so far, or due, and the epoch goes on: save
    epoch end ┼─ the best so far, or due: save
    the end   └─ the last update, before a callback replaces the weights; then what they were replaced by

Due is every n updates, every t minutes and the last update of the run. Never twice at the same update. All
ranks decide alike: by rank zero's clock and metric, and by the signals of all. Nothing is saved while a
callback has other weights in the module, such as an average during validation.
"""

import math
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from andrea_callbacks.curves import remove_opened_files
from andrea_callbacks.durable import make_folder_durably, synchronize_folder
from andrea_callbacks.full_disk import LogGuard
from andrea_callbacks.gradients import is_sharded
from andrea_callbacks.host import agree
from andrea_callbacks.packages import twin_of, with_twin
from andrea_callbacks.resume import ExactResume, awaits_validation, ends_epoch
from andrea_callbacks.scalars import refuse_climbing, without_module
from andrea_pl.checkpoint import FINAL, SUFFIX, DurableCheckpointIO, move_aside, sweep
from andrea_pl.errors import UserError
from andrea_pl.fingerprint import fingerprint
from andrea_pl.lock import FolderLock
from andrea_pl.signals import (
    StoppedBySignal,
    StopSignals,
    ignored_signals,
    note_exception,
    requeue_job,
    requeue_signal,
)
from andrea_pl.unasked import never_resume_unasked

PERIODIC, BEST = "update", "best"

never_resume_unasked()


class DurableCheckpoint(Checkpoint):
    """Saves checkpoints between updates: every n updates, every t minutes, the best, the last, on a signal.

    SIGTERM, SIGINT and SIGHUP, from the first update on, let the current update finish, save it and end the
    process with 143, 130 or 129; a second SIGTERM or SIGINT ends it at once. One that is ignored when the fit
    starts, as under `nohup`, stays ignored. SLURM's requeue signal does the same and requeues the job.
    A signal during validation breaks it off, on one rank; a resume runs it again. Where a callback has
    replaced the weights for validation, as averages do, the run stops after it, when they are back.

    Where the run ends with other weights than those of its last update, such as an average, and the last
    checkpoint does not have them, they are written into `final-<k>.ckpt`. It holds weights only: a resume
    continues from `update-<k>.ckpt`.

    Files are `update-<k>.ckpt` and `best-<k>.ckpt`, written by `DurableCheckpointIO`, which the trainer is
    given where it has Lightning's own. A file is removed only after a newer one is on the disk. One run at a
    time may use the folder; checkpoints of updates that it has not made, of an earlier run or damaged ones
    that a resume passed over, are moved to `earlier-1`, `earlier-2` … in it when training starts.

    Args:
        every: Updates between two saves; none by number when left out.
        minutes: Minutes between two saves; none by time when left out.
        monitor: The metric of which the best is kept, as a module logs it, such as `val/loss`; none when left
            out.
        mode: Whether the least (`min`) or the largest (`max`) is the best.
        keep: Newest files, the best ones counted, that are kept; 0 keeps all. The newest final file is kept
            besides.
        keep_best: Best files that are kept.
        dirpath: Folder; `checkpoints` in the log folder, or in the trainer's root without a logger, when left
            out. One of another file system (`s3://` …) is Lightning's IO's affair, without lock and manifest.
        name: Tells instances in the same trainer apart; each needs a folder of its own.

    Raises:
        UserError: If an option is out of range, or the folder cannot be written or is another run's; before
            the first update.
    """

    resumes_only_when_asked = True
    """Lightning looks for no checkpoint by itself in a Trainer that has this callback."""

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
        super().__init__()
        refuse_climbing(type(self).__name__, name)
        if every is not None and every < 1:
            raise UserError(f"DurableCheckpoint: every must be at least 1 update, got {every}")
        if minutes is not None and not minutes > 0:
            raise UserError(f"DurableCheckpoint: minutes must be more than 0, got {minutes}")
        if mode not in ("min", "max"):
            raise UserError(f"DurableCheckpoint: mode must be 'min' or 'max', got {mode!r}")
        for option, value, least in (("keep", keep, 0), ("keep_best", keep_best, 1)):
            if value < least:
                raise UserError(f"DurableCheckpoint: {option} must be at least {least}, got {value}")
        self.every = every
        self.minutes = minutes
        self.monitor = monitor
        self.mode = mode
        self.keep = keep
        self.keep_best = keep_best
        self.given_dirpath = dirpath
        self.dirpath: str | None = None
        """Where the files of this fit are."""
        self.name = name
        self.best: dict[str, float] = {}
        """Names of the best files and their scores."""
        self.last_path: str | None = None
        """The file that was saved last, in this fit."""
        self._best_of_worker = ""
        self._lock: FolderLock | None = None
        self._signals: StopSignals | None = None
        self._logs: LogGuard | None = None
        self._ahead: _Ahead | None = None
        self._forget()
        never_resume_unasked()  # of a package that was imported after this one
        self.__class__ = with_twin(type(self))  # pytorch_lightning would add a ModelCheckpoint otherwise

    def _forget(self) -> None:
        self._saved = self._seen = 0
        self._resumed: tuple[int, str] | None = None
        self._epochs: int | None = None
        self._trained: dict[str, int] | None = None
        self._kept: dict[str, int] | None = None
        self._written: dict[str, int] | None = None
        self._is_saving = self._is_due = self._is_late_told = False
        self._told: int | None = None
        self._ignored: frozenset[int] = frozenset()
        self._score: float | None = None
        self._since = time.monotonic()

    @property
    def best_model_path(self) -> str:
        """The best file so far, empty before there is one."""
        if not self.best or self.dirpath is None:
            return self._best_of_worker
        return _joined(self.dirpath, self._ranked()[0])

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        """Take the path from a worker process, whose files this process has not seen (`ddp_spawn`)."""
        self._best_of_worker = path

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to a fit: the folder's lock, the signals, the module's methods."""
        return without_module(self.__dict__) | {
            "_lock": None,
            "_signals": None,
            "_logs": None,
            "_ahead": None,
        }

    @property
    @override
    def state_key(self) -> str:
        """What the state goes by in a checkpoint."""
        return "DurableCheckpoint" if self.name is None else f"DurableCheckpoint[{self.name}]"

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the best scores, and the metric they are of."""
        return {"monitor": self.monitor, "mode": self.mode, "best": dict(self.best)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the best scores, unless they are of another metric."""
        if (state_dict["monitor"], state_dict["mode"]) == (self.monitor, self.mode):
            self.best = dict(state_dict["best"])

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the folder, lock it, sweep it; refuse one that cannot be written."""
        if stage != "fit":
            return  # the files of a fit stay known for what is validated or tested after it
        self.dirpath = None
        if getattr(trainer, "fast_dev_run", False):
            return
        _require_recognition(trainer, self)
        self._forget()
        self.best = {}
        self._best_of_worker = ""
        self._ignored = ignored_signals()  # before Lightning takes SIGTERM
        self._epochs = trainer.max_epochs
        self.dirpath = str(trainer.strategy.broadcast(self.resolve(trainer)))
        facts = run_facts(trainer, trainer.log_dir if trainer.loggers else None)  # all ranks must ask
        self._refuse_another(trainer, self.dirpath)
        if type(trainer.strategy.checkpoint_io) in (TorchCheckpointIO, twin_of(TorchCheckpointIO)):
            trainer.strategy.checkpoint_io = DurableCheckpointIO()
        elif not isinstance(trainer.strategy.checkpoint_io, DurableCheckpointIO):
            writer = type(trainer.strategy.checkpoint_io).__name__
            rank_zero_warn(
                f"checkpoints are written by {writer}, as safely as it does, and without a manifest, so that "
                "--resume does not take them"
            )
        if "://" in self.dirpath:
            rank_zero_info(
                f"checkpoints go to {self.dirpath} through Lightning's own IO: whether one appears whole or "
                "not is that storage's promise; there is no lock and no manifest, and --resume does not look "
                "there"
            )
        elif trainer.is_global_zero:
            try:
                self._take_folder(Path(self.dirpath), facts)
            except UserError:
                remove_opened_files(trainer)
                raise
        self._logs = LogGuard(trainer)
        self._ahead = _Ahead(self)
        # a new list, since the trainer is going through the old one
        cast(Any, trainer).callbacks = [self._ahead, *cast(Any, trainer).callbacks]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals, and start the clock; move aside what is not of this run."""
        if self.dirpath is None:
            return
        self._seen = trainer.global_step
        if trainer.ckpt_path is not None:
            self._resumed = trainer.global_step, str(trainer.ckpt_path)
        if trainer.is_global_zero and "://" not in self.dirpath:
            aside = move_aside(Path(self.dirpath), trainer.global_step)
            if aside is not None:
                rank_zero_info(f"later checkpoints, damaged or of an earlier run, are in {aside} now")
            there = {each.name for each in Path(self.dirpath).glob(f"{BEST}-*{SUFFIX}")}
            self.best = {name: score for name, score in self.best.items() if name in there}
        self.best = dict(trainer.strategy.broadcast(self.best))  # machines may share no disk
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
        """Stop on a signal; save what is due, unless validation or the end of the epoch comes first."""
        if self.dirpath is None or trainer.global_step == self._seen:
            return
        before, self._seen = self._seen, trainer.global_step
        self._report_logs()
        self._trained = None
        for each in cast(Any, trainer).callbacks:
            if isinstance(each, ExactResume):
                each.note_states(trainer, pl_module)
        self._note_due(trainer, before)
        self._stop_if_told(trainer)
        is_followed = ends_epoch(trainer) or awaits_validation(trainer) or _validates_to_stop(trainer)
        if self._is_due and not is_followed:
            self._save(trainer)

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Stop on a signal; on one rank, and while the weights are those of training.

        Several ranks may have different numbers of batches, and wait for the end of validation.
        """
        if trainer.state.fn != TrainerFn.FITTING or trainer.world_size > 1 or trainer.sanity_checking:
            return
        self._agree(trainer)
        if self._told is not None and not self._is_replaced(trainer):
            self._stop_if_told(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the best and what is due, unless the end of the epoch comes first; stop on a signal."""
        if self.dirpath is None or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        self._is_due |= trainer.should_stop
        score = self._read_metric(trainer)
        self._score = score if score is not None and self._is_among_best(score) else None
        if self._agree(trainer, self._is_replaced(trainer)):
            self._wait_for_weights(trainer, will_end_epoch=ends_epoch(trainer))
            return
        self._trained = None
        if not ends_epoch(trainer) and (self._is_due or self._score is not None):
            self._save(trainer)
        self._agree(trainer)
        self._stop_if_told(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save what is due; stop on a signal."""
        if self.dirpath is None:
            return
        if self._agree(trainer, self._is_replaced(trainer)):
            self._wait_for_weights(trainer)
            return
        self._trained = None
        is_due = self._is_due or self._score is not None or self._is_followed_by_replacement(trainer)
        if ends_epoch(trainer) and is_due:
            self._save(trainer)
        self._agree(trainer)
        self._stop_if_told(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save what callbacks have replaced the weights by; give the signals back."""
        if self.dirpath is not None:
            self._save(trainer)  # where the weights were not back before
            self._save_final(trainer, pl_module)
        self._let_go_of_signals()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save what the module itself has replaced its weights by, in its own `on_train_end`."""
        if self.dirpath is not None:
            self._save_final(trainer, pl_module)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Give signals and folder back; nothing is saved of an update that failed.

        What is done is saved where it is a disk that fails after an update, such as a logger's.
        """
        note_exception(exception)
        if isinstance(exception, OSError):
            self._save_what_is_done(trainer)
        self._let_go(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give signals and folder back."""
        if stage == "fit":
            self._let_go(trainer)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Have event files written up to here, so that no checkpoint is ahead of its curves."""
        if self._is_saving:
            self._written = fingerprint(pl_module, checkpoint["state_dict"])
        for logger in trainer.loggers if trainer.is_global_zero else []:
            flush = getattr(getattr(logger, "experiment", None), "flush", None)
            if callable(flush):
                with suppress(OSError):  # a full disk, which writing says
                    flush()
        self._report_logs()

    def _report_logs(self) -> None:
        if self._logs is not None:
            self._logs.report()

    def _save_what_is_done(self, trainer: pl.Trainer) -> None:
        """Save after a fault that came between two updates, on one rank; others would wait for it."""
        resumes = [each for each in cast(Any, trainer).callbacks if isinstance(each, ExactResume)]
        if self.dirpath is None or trainer.world_size > 1 or trainer.sanity_checking or not resumes:
            return
        if resumes[0].place(trainer) is None or self._is_replaced(trainer):
            return
        with suppress(UserError):  # the checkpoints' own disk is full too: the first fault is told
            self._save(trainer)
            rank_zero_info(f"saved in {self.last_path}")

    def _let_go(self, trainer: pl.Trainer) -> None:
        self._report_logs()
        self._logs = None
        self._let_go_of_signals()
        kept = [
            each for each in cast("list[Callback]", cast(Any, trainer).callbacks) if each is not self._ahead
        ]
        cast(Any, trainer).callbacks = kept
        self._ahead = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _let_go_of_signals(self) -> None:
        if self._signals is not None:
            self._signals.restore()
            self._signals = None

    def resolve(self, trainer: pl.Trainer) -> str:
        """Return where this trainer's files go."""
        if self.given_dirpath is not None:
            given = self.given_dirpath
            return given if "://" in given else str(Path(given).expanduser())
        if not trainer.loggers:
            return _joined(trainer.default_root_dir, "checkpoints")
        logger = trainer.loggers[0]
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folder = os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name), version)  # noqa: PTH118
        return _joined(folder, "checkpoints")

    def lock_early(self, trainer: pl.Trainer) -> None:
        """Lock a folder that is there before loggers open files beside it; `setup` is too late for that.

        Raises:
            UserError: If it is another run's.
        """
        is_fit = trainer.state.fn == TrainerFn.FITTING and not getattr(trainer, "fast_dev_run", False)
        if self._lock is not None or not is_fit or not trainer.is_global_zero:
            return
        place = self.resolve(trainer)
        self._refuse_another(trainer, place)
        if "://" not in place and Path(place).is_dir():
            self._lock = FolderLock(Path(place), announce=False)

    def _refuse_another(self, trainer: pl.Trainer, place: str) -> None:
        for each in cast(Any, trainer).callbacks:
            if isinstance(each, DurableCheckpoint) and each is not self and each.resolve(trainer) == place:
                raise UserError(
                    f"two DurableCheckpoint callbacks write into {place}; give one another dirpath"
                )

    def hand_over(self, lock: FolderLock) -> None:
        """Take the folder's lock from somebody who has it already."""
        self._lock = lock

    def _take_folder(self, folder: Path, facts: dict[str, Any]) -> None:
        """Lock and sweep the folder; a write is tried, so that one that cannot be is known now."""
        try:
            make_folder_durably(folder)
            _synchronize_parents(folder)
            trial = folder / f".trial-{time.monotonic_ns()}"
            trial.write_bytes(b"trial")
            trial.unlink()
        except OSError as error:
            raise unwritable(folder, error) from error
        if self._lock is not None and self._lock.folder != folder:
            self._lock.release()
            self._lock = None
        if self._lock is None:
            self._lock = FolderLock(folder, announce=False)
        self._lock.announce(facts)
        swept = sweep(folder)
        if swept:
            rank_zero_info(
                f"{folder}: removed what unfinished saves left: {', '.join(p.name for p in swept)}"
            )

    def _note_due(self, trainer: pl.Trainer, before: int) -> None:
        """Decide what is due after an update, the same on all ranks."""
        now = trainer.global_step
        if self.every is not None and before // self.every != now // self.every:
            self._is_due = True
        is_late = self.minutes is not None and time.monotonic() - self._since >= 60.0 * self.minutes
        is_late = self._agree(trainer, is_late and trainer.is_global_zero)
        is_last = 0 < trainer.max_steps <= now
        self._is_due |= is_late or is_last or trainer.should_stop

    def _agree(self, trainer: pl.Trainer, figure: bool = False) -> bool:
        """Have all ranks know of a signal that one of them got, and of a figure that one of them has.

        Called by all of them; within training, where Lightning itself waits for every rank once a batch.
        """
        received = (self._signals.received if self._signals is not None else None) or 0
        row = torch.tensor([float(figure), float(received)], device=trainer.strategy.root_device)
        agreed, received = cast("list[float]", agree(row).tolist())
        self._told = int(received) or None
        return bool(agreed)

    def _any_rank(self, trainer: pl.Trainer, figure: bool) -> bool:
        """Return whether a figure holds on one rank at least. Called by all of them."""
        return bool(agree(torch.tensor([float(figure)], device=trainer.strategy.root_device)).item())

    def _stop_if_told(self, trainer: pl.Trainer) -> None:
        signals, told = self._signals, self._told
        if signals is None or told is None:
            return
        for each in cast(Any, trainer).callbacks:
            if isinstance(each, DurableCheckpoint):
                each._save_for_signal(trainer)
        if told == signals.requeue and trainer.is_global_zero:
            requeue_job()
        stop = StoppedBySignal(told, trainer.global_step, self.last_path)
        rank_zero_info(str(stop))
        raise stop

    def _read_metric(self, trainer: pl.Trainer) -> float | None:
        """Return rank zero's monitored metric, None where there is none to monitor or it is NaN."""
        if self.monitor is None:
            return None
        value: Any = trainer.callback_metrics.get(self.monitor)
        if value is None:
            known = ", ".join(sorted(trainer.callback_metrics)) or "none"
            raise UserError(
                f"DurableCheckpoint: there is no metric {self.monitor!r} to monitor; known are {known}"
            )
        score = float(value.detach() if isinstance(value, Tensor) else value)
        score = float(trainer.strategy.broadcast(score))  # ranks that log without sync_dist have others
        return None if math.isnan(score) else score

    def _ranked(self) -> list[str]:
        sign = 1.0 if self.mode == "min" else -1.0
        return sorted(self.best, key=lambda name: sign * self.best[name])

    def _is_among_best(self, score: float) -> bool:
        if len(self.best) < self.keep_best:
            return True
        last = self.best[self._ranked()[-1]]
        return score < last if self.mode == "min" else score > last

    def begin_validation(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep a fingerprint of the weights that training has come to, before a callback replaces them."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._trained = fingerprint(pl_module)

    def begin_end(self, trainer: pl.Trainer) -> None:
        """Save the last update, unless that is done, before a callback replaces its weights."""
        if not self._any_rank(trainer, self._is_replaced(trainer)):
            self._save(trainer)

    def _is_replaced(self, trainer: pl.Trainer) -> bool:
        """Return whether the module has other weights than those that training has come to."""
        return self._trained is not None and fingerprint(trainer.lightning_module) != self._trained

    def _wait_for_weights(self, trainer: pl.Trainer, will_end_epoch: bool = False) -> None:
        """Leave saving and stopping to the end of the epoch, or to the next update."""
        if self._score is None or will_end_epoch:
            return
        self._score = None
        if not self._is_late_told:
            self._is_late_told = True
            rank_zero_warn(
                f"update {trainer.global_step} is the best so far, and is not saved: the weights were "
                "replaced for validation and are not back in the callbacks' on_validation_end. Put them back "
                "in on_validation_epoch_end"
            )

    def _is_followed_by_replacement(self, trainer: pl.Trainer) -> bool:
        """Return whether the last epoch asked for is over and another follows, in which weights are averaged.

        StochasticWeightAveraging adds an epoch without updates for batch norm.
        """
        loop = cast(Any, trainer.fit_loop)
        return self._epochs == loop.epoch_progress.current.processed < (loop.max_epochs or 0)

    def _save_for_signal(self, trainer: pl.Trainer) -> None:
        """Save, but never replace a checkpoint taken between updates by one taken within their validation."""
        update, path = self._resumed or (None, "")
        name = _joined(self.dirpath or "", f"{PERIODIC}-{trainer.global_step:06d}{SUFFIX}")
        is_within = trainer.validating and self._trained is not None
        if is_within and update == trainer.global_step and Path(path).resolve() == Path(name).resolve():
            self.last_path = path
            return
        self._save(trainer)

    def _save_final(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the weights that the run ends with, where the last checkpoint does not have them."""
        update, ended = trainer.global_step, fingerprint(pl_module)
        is_replaced = self._any_rank(trainer, self._kept is not None and ended != self._kept)
        self._kept = ended
        is_sharded_here = any(map(is_sharded, pl_module.parameters()))
        is_written = bool(trainer.strategy.broadcast(not is_sharded_here and ended == self._written))
        if not is_replaced or is_written or self.last_path is None:
            return
        folder = cast(str, self.dirpath)
        path = _joined(folder, f"{FINAL}-{update:06d}{SUFFIX}")
        trainer.save_checkpoint(path, weights_only=True)
        rank_zero_info(
            f"{path} holds the weights that the run ends with, which a callback or the module put in place "
            f"after the last update; {self.last_path} holds those of training, from which a resume continues"
        )
        if self.keep and trainer.is_global_zero and "://" not in folder:
            for each in Path(folder).glob(f"{FINAL}-*{SUFFIX}"):
                if 0 <= _update_of(each) < update:
                    trainer.strategy.remove_checkpoint(_joined(folder, each.name))

    def _save(self, trainer: pl.Trainer) -> None:
        """Save, unless this update is; then remove what need not be kept any more."""
        update = trainer.global_step
        if self.dirpath is None or update == self._saved:
            return
        if not any(isinstance(each, ExactResume) for each in cast(Any, trainer).callbacks):
            _warn_of_inexact_resume()
        score, self._score = self._score, None
        name = f"{PERIODIC if score is None else BEST}-{update:06d}{SUFFIX}"
        if score is not None:
            self.best[name] = score
            self.best = {each: self.best[each] for each in self._ranked()[: self.keep_best]}
        path = _joined(self.dirpath, name)
        self._is_saving = True
        try:
            trainer.save_checkpoint(path, weights_only=False)
        finally:
            self._is_saving = False
        self._kept = fingerprint(trainer.lightning_module)
        self.last_path = path
        self._saved = update
        self._is_due = False
        self._since = time.monotonic()
        if self.keep and trainer.is_global_zero:
            self._rotate(trainer, update)

    def _rotate(self, trainer: pl.Trainer, update: int) -> None:
        """Remove our files that are neither among the newest nor among the best."""
        folder = cast(str, self.dirpath)
        if "://" in folder:
            return
        files = [each for kind in (PERIODIC, BEST) for each in Path(folder).glob(f"{kind}-*{SUFFIX}")]
        made = sorted((each for each in files if 0 <= _update_of(each) <= update), key=_update_of)
        for each in made[: -self.keep]:
            if each.name not in self.best:
                trainer.strategy.remove_checkpoint(_joined(folder, each.name))


class _Ahead(Callback):
    """Stands before all callbacks of a fit, and shows a DurableCheckpoint the weights as training left them.

    The DurableCheckpoint itself comes after them, so that it saves what they have done.
    """

    def __init__(self, saving: DurableCheckpoint) -> None:
        super().__init__()
        self._saving = saving

    @property
    @override
    def state_key(self) -> str:
        """What a state would go by; there is none."""
        return f"{self._saving.state_key}.ahead"

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell of a validation that begins."""
        self._saving.begin_validation(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell of the end of training."""
        self._saving.begin_end(trainer)


def _require_recognition(trainer: pl.Trainer, saving: DurableCheckpoint) -> None:
    """Refuse a trainer that does not know a DurableCheckpoint for a checkpoint callback, and adds its own.

    Raises:
        UserError: If it was made before its trainer's package was imported.
    """
    if not any(each is saving for each in trainer.checkpoint_callbacks):
        package = type(trainer).__module__.partition(".")[0]
        raise UserError(
            f"DurableCheckpoint was made before {package} was imported, whose Trainer does not take it for a "
            f"checkpoint callback therefore; import {package} first"
        )


def _validates_to_stop(trainer: pl.Trainer) -> bool:
    """Say whether validation follows because the run is about to stop."""
    loop = cast(Any, trainer.fit_loop)
    return trainer.should_stop and bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def unwritable(folder: Path, error: OSError) -> UserError:
    """Return the error for a folder that checkpoints cannot be written to."""
    return UserError(
        f"{folder}: checkpoints cannot be written there ({error.strerror or error}); give another "
        "dirpath, or mend its permissions"
    )


def run_facts(trainer: pl.Trainer, logs: str | None) -> dict[str, Any]:
    """Return what a run's lock says of it, by which a resume finds its logs.

    Args:
        trainer: Its loggers are named.
        logs: The log folder, None where there is none.
    """
    return {"logs": logs, "loggers": [_named(each) for each in trainer.loggers]}


def _synchronize_parents(folder: Path) -> None:
    """Have the disk keep the names of a folder, its log folder and the folder of runs, whoever made them."""
    for each in list(folder.parents)[:4]:
        with suppress(OSError):  # a folder that may be entered and not read
            synchronize_folder(each)


def _named(logger: Logger) -> list[str]:
    """Return what a logger is called, and which version of its folders it writes, to find it again."""
    return [type(logger).__name__, str(getattr(logger, "root_dir", None)), str(logger.version)]


def _update_of(path: Path) -> int:
    digits = path.name.removesuffix(SUFFIX).rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1


def _joined(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def _warn_of_inexact_resume() -> None:
    rank_zero_warn(
        "DurableCheckpoint without ExactResume: random states are not saved; add andrea_callbacks.ExactResume"
    )
