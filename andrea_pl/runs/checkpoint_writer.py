"""Writes the files of a DurableCheckpoint: of updates, of the best updates, and of a run's final weights."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from andrea_callbacks import ExactResume
from andrea_callbacks.hooks.event_files import remove_opened_files
from andrea_callbacks.hooks.log_guard import LogGuard
from andrea_callbacks.hooks.scalars import refuse_climbing, without_module
from andrea_callbacks.numerics.host_transfer import reduce_over_ranks
from andrea_pl.errors import UserError
from andrea_pl.runs.best_files import BestFiles
from andrea_pl.runs.checkpoint_folder import BEST, PERIODIC, CheckpointFolder, folder_of, joined, run_facts
from andrea_pl.runs.checkpoint_io import use_durable_io
from andrea_pl.runs.manifest import FINAL, move_aside
from andrea_pl.runs.seen_weights import SeenWeights


class CheckpointWriter(Checkpoint):
    """The base of `DurableCheckpoint`: its folder, files and state, but not the decision when to save."""

    def __init__(
        self,
        monitor: str | None,
        mode: Literal["min", "max"],
        keep: int,
        keep_best: int,
        dirpath: str | None,
        name: str | None,
    ) -> None:
        super().__init__()
        refuse_climbing(type(self).__name__, name)
        if mode not in ("min", "max"):
            raise UserError(f"DurableCheckpoint: mode must be 'min' or 'max', got {mode!r}")
        for option, value, least in (("keep", keep, 0), ("keep_best", keep_best, 1)):
            if value < least:
                raise UserError(f"DurableCheckpoint: {option} must be at least {least}, got {value}")
        self.monitor = monitor
        self.mode = mode
        self.keep = keep
        self.given_dirpath = dirpath
        self.dirpath: str | None = None
        """The folder of this fit's files."""
        self.name = name
        self.last_path: str | None = None
        """The last file saved in this fit."""
        self._best = BestFiles(monitor, mode, keep_best)
        self._best_of_worker = ""
        self._folder: CheckpointFolder | None = None
        self._logs: LogGuard | None = None
        self._reset_files()

    def _reset_files(self) -> None:
        """Reset what an earlier fit left."""
        self._best.scores = {}
        self._best_of_worker = ""
        self._weights = SeenWeights()
        self._saved = 0
        self._is_saving = False

    @property
    def best(self) -> dict[str, float]:
        """Names of the best files and their scores."""
        return self._best.scores

    @property
    def best_model_path(self) -> str:
        """The best file so far, empty before there is one."""
        if not self.best or self.dirpath is None:
            return self._best_of_worker
        return joined(self.dirpath, self._best.ranked()[0])

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        """Set the path from a worker process whose files this process has not seen (`ddp_spawn`)."""
        self._best_of_worker = path

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one fit: the folder's lock, the signals, the module's methods."""
        return without_module(self.__dict__) | {
            "_folder": None,
            "_logs": None,
        }

    @property
    @override
    def state_key(self) -> str:
        """The state's key in a checkpoint."""
        return "DurableCheckpoint" if self.name is None else f"DurableCheckpoint[{self.name}]"

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the best scores and their metric."""
        return self._best.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the saved scores, unless they belong to another metric."""
        self._best.load_state_dict(state_dict)

    def resolve(self, trainer: pl.Trainer) -> str:
        """Return the path of this trainer's checkpoint folder."""
        return folder_of(trainer, self.given_dirpath)

    def open_folder(self, trainer: pl.Trainer) -> CheckpointFolder:
        """Return this trainer's checkpoint folder, reusing one that is already open."""
        path = self.resolve(trainer)
        if self._folder is None or self._folder.path != path:
            if self._folder is not None:
                self._folder.release()
            self._folder = CheckpointFolder(path)
        return self._folder

    def lock_early(self, trainer: pl.Trainer) -> None:
        """Lock an existing folder before loggers open files beside it; `setup` would be too late.

        Raises:
            UserError: If it belongs to another run.
        """
        is_fit = trainer.state.fn == TrainerFn.FITTING and not getattr(trainer, "fast_dev_run", False)
        if is_fit and trainer.is_global_zero:
            folder = self.open_folder(trainer)
            self._refuse_another(trainer, folder.path)
            folder.lock_early()

    def _refuse_another(self, trainer: pl.Trainer, place: str) -> None:
        for each in cast(Any, trainer).callbacks:
            if isinstance(each, CheckpointWriter) and each is not self and each.resolve(trainer) == place:
                raise UserError(
                    f"two DurableCheckpoint callbacks write into {place}; give one another dirpath"
                )

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Flush event files, so that no checkpoint is ahead of its curves."""
        if self._is_saving:
            self._weights.note_written(pl_module, checkpoint["state_dict"])
        for logger in trainer.loggers if trainer.is_global_zero else []:
            flush = getattr(getattr(logger, "experiment", None), "flush", None)
            if callable(flush):
                with suppress(OSError):  # a full disk, which writing says
                    flush()
        self._report_logs()

    def _close_files(self) -> None:
        """Release the folder; report logs that could not be written."""
        self._report_logs()
        self._logs = None
        if self._folder is not None:
            self._folder.release()
            self._folder = None

    def _report_logs(self) -> None:
        if self._logs is not None:
            self._logs.report()

    def _take_folder(self, trainer: pl.Trainer) -> None:
        """Find, lock and clean up the folder of a new fit; install the durable checkpoint IO.

        Raises:
            UserError: If the folder cannot be written, or belongs to another run.
        """
        self.dirpath = str(trainer.strategy.broadcast(self.resolve(trainer)))
        facts = run_facts(trainer, trainer.log_dir if trainer.loggers else None)  # all ranks must ask
        self._refuse_another(trainer, self.dirpath)
        use_durable_io(trainer)
        folder = self.open_folder(trainer)
        if not folder.is_local:
            rank_zero_info(
                f"checkpoints go to {self.dirpath} through Lightning's own IO: whether one appears whole or "
                "not is that storage's promise; there is no lock and no manifest, and --resume does not look "
                "there"
            )
        elif trainer.is_global_zero:
            try:
                folder.take(facts)
            except UserError:
                remove_opened_files(trainer)
                raise
        self._logs = LogGuard(trainer)

    def _tidy_folder(self, trainer: pl.Trainer) -> None:
        """Move aside checkpoints of updates that this run has not made; drop missing best files."""
        if trainer.is_global_zero and self.open_folder(trainer).is_local:
            aside = move_aside(Path(self.open_folder(trainer).path), trainer.global_step)
            if aside is not None:
                rank_zero_info(f"later checkpoints, damaged or of an earlier run, are in {aside} now")
            self._best.retain(self.open_folder(trainer).best_files())
        self._best.scores = dict(trainer.strategy.broadcast(self.best))  # machines may share no disk

    def _any_rank(self, trainer: pl.Trainer, figure: bool) -> bool:
        """Return whether a flag is set on at least one rank. All ranks must call this together."""
        return bool(
            reduce_over_ranks(torch.tensor([float(figure)], device=trainer.strategy.root_device)).item()
        )

    def _write(self, trainer: pl.Trainer, score: float | None) -> None:
        """Write the file of this update, then remove files that need not be kept.

        Args:
            trainer: The trainer at this update.
            score: The update's metric if it is among the best.
        """
        if not any(isinstance(each, ExactResume) for each in cast(Any, trainer).callbacks):
            rank_zero_warn(
                "DurableCheckpoint without ExactResume: random states are not saved; add "
                "andrea_callbacks.ExactResume"
            )
        update, folder = trainer.global_step, self.open_folder(trainer)
        path = folder.file(PERIODIC if score is None else BEST, update)
        if score is not None:
            self._best.add(path.rpartition("/")[2], score)
        self._is_saving = True
        try:
            trainer.save_checkpoint(path, weights_only=False)
        finally:
            self._is_saving = False
        self._weights.note_saved(trainer.lightning_module)
        self.last_path = path
        self._saved = update
        if self.keep and trainer.is_global_zero and folder.is_local:
            for each in folder.surplus(update, self.keep, self.best):
                trainer.strategy.remove_checkpoint(each)

    def _save_final(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the final weights if the last checkpoint does not hold them."""
        update = trainer.global_step
        is_replaced, is_written = self._weights.note_end(pl_module)
        is_replaced = self._any_rank(trainer, is_replaced)
        is_written = bool(trainer.strategy.broadcast(is_written))
        if not is_replaced or is_written or self.last_path is None:
            return
        folder = self.open_folder(trainer)
        path = folder.file(FINAL, update)
        trainer.save_checkpoint(path, weights_only=True)
        rank_zero_info(
            f"{path} holds the weights that the run ends with, which a callback or the module put in place "
            f"after the last update; {self.last_path} holds those of training, from which a resume continues"
        )
        if self.keep and trainer.is_global_zero and folder.is_local:
            for each in folder.earlier_finals(update):
                trainer.strategy.remove_checkpoint(each)


def require_recognition(trainer: pl.Trainer, saving: CheckpointWriter) -> None:
    """Refuse a trainer that does not recognise a DurableCheckpoint as a checkpoint callback.

    Raises:
        UserError: If the callback was made before the trainer's package was imported.
    """
    if not any(each is saving for each in trainer.checkpoint_callbacks):
        package = type(trainer).__module__.partition(".")[0]
        raise UserError(
            f"DurableCheckpoint was made before {package} was imported, whose Trainer does not take it for a "
            f"checkpoint callback therefore; import {package} first"
        )
