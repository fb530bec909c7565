"""Finds what `andrea fit --resume` continues: the run, its newest valid checkpoint, its logs."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from andrea_callbacks.hooks.lightning_state import given_version, set_version
from andrea_pl.data.module import TextDataModule
from andrea_pl.data.store.tokenizer import TextTokenizer
from andrea_pl.errors import UserError
from andrea_pl.runs.checkpoint_callback import DurableCheckpoint
from andrea_pl.runs.lock import read_holder
from andrea_pl.runs.manifest import Found, has_checkpoints, newest_valid, say_passed_over

NEWEST = "newest"
"""The value of `--resume` without a folder."""

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A run to continue."""

    folder: Path | None
    """Its log folder, None without a logger."""
    checkpoints: Path
    checkpoint: Found


Lock = Callable[[Path], None]
"""Locks a run's folder of checkpoints before one is chosen, since a running process may add another."""


def find_run(trainer: pl.Trainer, given: str, lock: Lock | None = None) -> Continuation:
    """Find the run that `--resume` means, and its newest valid checkpoint.

    Args:
        trainer: Its loggers and checkpoint callback determine where runs are.
        given: A run's log folder, or `NEWEST`.
        lock: Refuses a run that another process is writing.

    Raises:
        UserError: If there is no run with a checkpoint, or none of its checkpoints verifies.
    """
    if given != NEWEST:
        return _continue(_given_run(trainer, Path(given)), lock)
    passed: list[str] = []
    places = _places(trainer)
    for place in places:
        if has_checkpoints(place.checkpoints):
            if passed:
                rank_zero_info(f"passed over, without a checkpoint: {', '.join(passed)}")
            return _continue(place, lock)
        passed.append(str(place.folder or place.checkpoints))
    where = _root_of_runs(trainer) or (places[0].checkpoints if places else trainer.default_root_dir)
    raise UserError(f"{where}: no run with a checkpoint is there to go on with; start without --resume")


def requeued_run(trainer: pl.Trainer, lock: Lock | None = None) -> Continuation | None:
    """Return the run of a requeued SLURM job; None for a job that was not requeued or has saved nothing.

    Args:
        trainer: Its loggers and checkpoint callback determine where runs are.
        lock: Refuses a run that another process is writing.

    Raises:
        UserError: If the job's run exists, but none of its checkpoints verifies.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or not int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        return None
    for place in _places(trainer):
        if read_holder(place.checkpoints).get("job") == job and has_checkpoints(place.checkpoints):
            return _continue(place, lock)
    rank_zero_warn(f"job {job} was requeued, and no checkpoint of it is found: its run starts afresh")
    return None


def continue_logs(trainer: pl.Trainer, run: Continuation) -> list[tuple[Path, Path]]:
    """Make loggers continue in the run's folders.

    `ExactResume` later discards what TensorBoard's event files hold of updates after the checkpoint, once the
    run is sure to start. A CSV file, which its logger would delete, is renamed. Other loggers are not
    changed.

    Returns:
        Old and new names of renamed files.
    """
    renamed: list[tuple[Path, Path]] = []
    known = cast("list[list[str]]", read_holder(run.checkpoints).get("loggers") or [])
    versions = {(kind, root): version for kind, root, version in known}
    update = run.checkpoint.update
    for number, logger in enumerate(trainer.loggers):
        if not isinstance(logger, (TensorBoardLogger, CSVLogger)):
            continue
        version = versions.get((type(logger).__name__, str(logger.root_dir)))
        if number == 0 and run.folder is not None:
            version = run.folder.name
        if version is None:
            continue
        set_version(logger, version)
        if isinstance(logger, TensorBoardLogger):
            continue
        file = Path(logger.log_dir) / "metrics.csv"
        if trainer.is_global_zero and file.exists():
            name = _free_name(file.with_name(f"metrics-until-{update:06d}.csv"))
            file.rename(name)
            renamed.append((file, name))
    return renamed


def choose_text(
    data: TextDataModule,
    checkpoint: Mapping[str, Any],
    path: str,
    tokenizer: TextTokenizer | None,
    is_resume: bool,
) -> None:
    """Make a datamodule use a checkpoint's tokenizer and, for a resume, the text its run began with.

    Args:
        data: The datamodule.
        checkpoint: The checkpoint.
        path: The checkpoint's path.
        tokenizer: The checkpoint's tokenizer.
        is_resume: Whether to use the text named in the checkpoint, in place of the current text.
    """
    if is_resume:
        data.keep_text_of(checkpoint, path)
    if tokenizer is not None:
        data.use_tokenizer(tokenizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A possible location of a run."""

    folder: Path | None
    """Its log folder, None without a logger or if unknown."""
    checkpoints: Path


def _places(trainer: pl.Trainer) -> list[_Place]:
    """Return the locations of this configuration's runs, newest first."""
    saving = [each for each in trainer.checkpoint_callbacks if isinstance(each, DurableCheckpoint)]
    fixed = saving[0].given_dirpath if saving else None
    if fixed is not None:
        if "://" in fixed:
            raise UserError(f"--resume does not look into {fixed}; give the checkpoint with --ckpt_path")
        fixed = str(Path(fixed).expanduser())
        logs = read_holder(Path(fixed)).get("logs")
        return [_Place(folder=Path(logs) if logs else None, checkpoints=Path(fixed))]
    if not trainer.loggers:
        return [_Place(folder=None, checkpoints=Path(trainer.default_root_dir) / CHECKPOINTS)]
    root = _root_of_runs(trainer)
    if root is None:
        raise UserError(
            f"--resume: {type(trainer.loggers[0]).__name__} has no folder of runs to look into; give the "
            "checkpoint with --ckpt_path"
        )
    version = given_version(trainer.loggers[0])
    if version is not None:
        named = version if isinstance(version, str) else f"version_{version}"
        return [_Place(folder=root / named, checkpoints=root / named / CHECKPOINTS)]
    return [_Place(folder=each, checkpoints=each / CHECKPOINTS) for each in _newest_runs(root)]


def _given_run(trainer: pl.Trainer, folder: Path) -> _Place:
    """Return the location of a given run, if it belongs to this configuration."""
    if folder.is_file():
        raise UserError(f"--resume {folder}: a file; --ckpt_path takes that, --resume its run's log folder")
    if not folder.is_dir():
        raise UserError(f"--resume {folder}: no such folder; give the log folder of a run")
    root = _root_of_runs(trainer)
    if root is not None and folder.resolve().parent != root.resolve():
        raise UserError(
            f"--resume {folder}: this configuration's runs are in {root}; give one of those, move that "
            "one there, or resume into a new folder with --ckpt_path"
        )
    return _Place(folder=None if root is None else folder, checkpoints=folder / CHECKPOINTS)


def _continue(place: _Place, lock: Lock | None) -> Continuation:
    if lock is not None:
        lock(place.checkpoints)
    found = newest_valid(place.checkpoints)
    say_passed_over(found)
    rank_zero_info(f"resuming after update {found.update}, from {found.path}")
    return Continuation(folder=place.folder, checkpoints=place.checkpoints, checkpoint=found)


def _root_of_runs(trainer: pl.Trainer) -> Path | None:
    """Return the folder that contains the log folders of all runs, None without such a logger."""
    logger = trainer.loggers[0] if trainer.loggers else None
    root = getattr(logger, "root_dir", None)
    return None if root is None else Path(root)


def _newest_runs(root: Path) -> list[Path]:
    """Return the folders `version_<n>`, newest first."""
    numbered = [(re.fullmatch(r"version_(\d+)", each.name), each) for each in root.glob("version_*")]
    runs = [(int(found[1]), each) for found, each in numbered if found and each.is_dir()]
    return [each for _, each in sorted(runs, reverse=True)]


def _free_name(path: Path) -> Path:
    number = 0
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free
