"""When checkpoints are saved, which are kept, and what a signal does.

    update k ─┬─ a signal: save, stop
              ├─ due, and neither validation nor the end of the epoch follows: save
    validation┼─ the best so far, or due, and the epoch goes on: save
    epoch end ┴─ the best so far, or due: save

Due is every n updates, every t minutes and the last update of the run. Never twice at the same update. All
ranks decide alike: by rank zero's clock and metric, and by the signals of all.
"""

import math
import os
import signal
import time
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from andrea_callbacks.resume import ExactResume, awaits_validation, ends_epoch
from andrea_callbacks.scalars import refuse_climbing
from andrea_pl.checkpoint import SUFFIX, DurableCheckpointIO, move_aside, sweep
from andrea_pl.errors import UserError
from andrea_pl.lock import FolderLock
from andrea_pl.signals import StoppedBySignal, StopSignals, requeue_job, requeue_signal

PERIODIC, BEST = "update", "best"


class DurableCheckpoint(Checkpoint):
    """Saves checkpoints between updates: every n updates, every t minutes, the best, the last, on a signal.

    SIGTERM and SIGINT, from the first update on, let the current update finish, save it and end the process
    with 143 or 130; a second one ends it at once. SLURM's requeue signal does the same and requeues the job.
    A signal during validation breaks it off, on one rank; a resume runs it again.

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
        keep: Newest files, the best ones counted, that are kept; 0 keeps all.
        keep_best: Best files that are kept.
        dirpath: Folder; `checkpoints` in the log folder, or in the trainer's root without a logger, when left
            out. One of another file system (`s3://` …) is Lightning's IO's affair, without lock and manifest.
        name: Tells instances in the same trainer apart; each needs a folder of its own.

    Raises:
        UserError: If an option is out of range, or the folder cannot be written or is another run's; before
            the first update.
    """

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
        self._lock: FolderLock | None = None
        self._signals: StopSignals | None = None
        self._forget()

    def _forget(self) -> None:
        self._saved = self._seen = 0
        self._is_due = False
        self._told: int | None = None
        self._score: float | None = None
        self._since = time.monotonic()

    @property
    def best_model_path(self) -> str:
        """The best file so far, empty before there is one."""
        if not self.best or self.dirpath is None:
            return ""
        return _joined(self.dirpath, self._ranked()[0])

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
        self.dirpath = None
        if stage != "fit" or getattr(trainer, "fast_dev_run", False):
            return
        self._forget()
        self.best = {}
        self.dirpath = str(trainer.strategy.broadcast(self._resolve(trainer)))
        logs = trainer.log_dir if trainer.loggers else None  # all ranks must ask
        facts = {"logs": logs, "loggers": [_named(each) for each in trainer.loggers]}
        others = [each for each in cast(Any, trainer).callbacks if isinstance(each, DurableCheckpoint)]
        for each in others:
            if each is not self and each.dirpath == self.dirpath:
                raise UserError(
                    f"two DurableCheckpoint callbacks write into {self.dirpath}; give one another dirpath"
                )
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
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
            self._take_folder(Path(self.dirpath), facts)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals, and start the clock; move aside what is not of this run."""
        if self.dirpath is None:
            return
        self._seen = trainer.global_step
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
            self._signals = StopSignals(requeue_signal(trainer))
            self._signals.install()
            if trainer.received_sigterm:
                self._signals.received = signal.SIGTERM

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop on a signal; save what is due, unless validation or the end of the epoch comes first."""
        if self.dirpath is None or trainer.global_step == self._seen:
            return
        before, self._seen = self._seen, trainer.global_step
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
        """Stop on a signal; several ranks may have different numbers of batches, and wait for the end."""
        if trainer.state.fn == TrainerFn.FITTING and trainer.world_size == 1 and not trainer.sanity_checking:
            self._agree(trainer)
            self._stop_if_told(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the best and what is due, unless the end of the epoch comes first; stop on a signal."""
        if self.dirpath is None or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        self._is_due |= trainer.should_stop
        score = self._read_metric(trainer)
        self._score = score if score is not None and self._is_among_best(score) else None
        if not ends_epoch(trainer) and (self._is_due or self._score is not None):
            self._save(trainer)
        self._agree(trainer)
        self._stop_if_told(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save what is due; stop on a signal."""
        if self.dirpath is None:
            return
        if ends_epoch(trainer) and (self._is_due or self._score is not None):
            self._save(trainer)
        self._agree(trainer)
        self._stop_if_told(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last update, unless that is done; give the signals back."""
        if self.dirpath is not None:
            self._save(trainer)
        self._let_go_of_signals()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Give signals and folder back; nothing is saved of an update that failed."""
        self._let_go()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give signals and folder back."""
        self._let_go()

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Have event files written up to here, so that no checkpoint is ahead of its curves."""
        for logger in trainer.loggers if trainer.is_global_zero else []:
            flush = getattr(getattr(logger, "experiment", None), "flush", None)
            if callable(flush):
                flush()

    def _let_go(self) -> None:
        self._let_go_of_signals()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _let_go_of_signals(self) -> None:
        if self._signals is not None:
            self._signals.restore()
            self._signals = None

    def _resolve(self, trainer: pl.Trainer) -> str:
        if self.given_dirpath is not None:
            given = self.given_dirpath
            return given if "://" in given else str(Path(given).expanduser())
        if not trainer.loggers:
            return _joined(trainer.default_root_dir, "checkpoints")
        logger = trainer.loggers[0]
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folder = os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name), version)  # noqa: PTH118
        return _joined(folder, "checkpoints")

    def _take_folder(self, folder: Path, facts: dict[str, Any]) -> None:
        """Lock and sweep the folder; a write is tried, so that one that cannot be is known now."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trial = folder / f".trial-{time.monotonic_ns()}"
            trial.write_bytes(b"trial")
            trial.unlink()
        except OSError as error:
            raise UserError(
                f"{folder}: checkpoints cannot be written there ({error.strerror or error}); give another "
                "dirpath, or mend its permissions"
            ) from error
        self._lock = FolderLock(folder, facts)
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
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            row = torch.tensor([float(figure), float(received)], device=trainer.strategy.root_device)
            torch.distributed.all_reduce(row, torch.distributed.ReduceOp.MAX)
            agreed, received = cast("list[float]", row.tolist())
            figure = bool(agreed)
        self._told = int(received) or None
        return figure

    def _stop_if_told(self, trainer: pl.Trainer) -> None:
        signals, told = self._signals, self._told
        if signals is None or told is None:
            return
        for each in cast(Any, trainer).callbacks:
            if isinstance(each, DurableCheckpoint):
                each._save(trainer)
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
        trainer.save_checkpoint(path, weights_only=False)
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


def _validates_to_stop(trainer: pl.Trainer) -> bool:
    """Say whether validation follows because the run is about to stop."""
    loop = cast(Any, trainer.fit_loop)
    return trainer.should_stop and bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


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
