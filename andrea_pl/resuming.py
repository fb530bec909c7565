"""What `andrea fit --resume` does: find the run, go on in its logs, stop where settings differ."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from andrea_pl.checkpoint import Found, has_checkpoints, newest_valid, say_passed_over
from andrea_pl.errors import UserError
from andrea_pl.lock import read_holder
from andrea_pl.saving import DurableCheckpoint

KEY = "andrea_config"
"""Where a checkpoint has the settings that it was written by."""

NEWEST = "newest"
"""What `--resume` without a folder means."""

ONLY_THIS_CALL = ("config", "ckpt_path", "init_from", "resume", "allow_drift")
"""Options of a call, and of no run."""

FREE = (
    "trainer.logger",
    "trainer.default_root_dir",
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    "trainer.enable_checkpointing",
    "trainer.log_every_n_steps",
    "trainer.num_sanity_val_steps",
    "trainer.profiler",
    "trainer.max_time",
    "data.cache_dir",
    "data.num_workers",
    "data.prefetch_factor",
    "data.tokenizer",
)
"""Settings that decide where a run is written and how long it takes, and nothing of what is trained. The
tokenizer is compared with the checkpoint's own elsewhere."""

FIXED = ("model.optimizer", "model.schedule", "model.network")
"""Settings that a resume cannot change: their state in the checkpoint is theirs alone."""

ABSENT = "not set"


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A run that is gone on with."""

    folder: Path | None
    """Its log folder, None where it had no logger."""
    checkpoint: Found


def find_run(trainer: pl.Trainer, given: str) -> Continuation:
    """Find the run that `--resume` means, and its newest checkpoint that verifies.

    Args:
        trainer: Its loggers and checkpoint callback tell where runs are.
        given: A run's log folder, or `NEWEST`.

    Raises:
        UserError: If there is no run with a checkpoint, or none of its checkpoints verifies.
    """
    root = _root_of_runs(trainer)
    if root is None and trainer.loggers and given == NEWEST:
        raise UserError(
            f"--resume: {type(trainer.loggers[0]).__name__} has no folder of runs to look into; give the "
            "checkpoint with --ckpt_path"
        )
    saving = next(
        (each for each in trainer.checkpoint_callbacks if isinstance(each, DurableCheckpoint)), None
    )
    fixed = None if saving is None else saving.given_dirpath
    if fixed is not None and given == NEWEST:
        logs = read_holder(Path(fixed)).get("logs")
        return _continue(Path(logs) if logs and root is not None else None, Path(fixed))
    if root is None:
        folder = Path(trainer.default_root_dir if given == NEWEST else given)
        return _continue(None, folder / "checkpoints")
    if given != NEWEST:
        folder = Path(given)
        if not folder.is_dir():
            raise UserError(f"--resume {given}: no such folder; give the log folder of a run")
        if folder.absolute().parent != root.absolute():
            raise UserError(
                f"--resume {given}: this configuration's runs are in {root}; give one of those, or the "
                "configuration of that run"
            )
        return _continue(folder, folder / "checkpoints")
    passed: list[str] = []
    for folder in _newest_runs(root):
        if has_checkpoints(folder / "checkpoints"):
            if passed:
                rank_zero_info(f"passed over, without a checkpoint: {', '.join(passed)}")
            return _continue(folder, folder / "checkpoints")
        passed.append(str(folder))
    raise UserError(f"{root}: no run with a checkpoint is there to go on with; start without --resume")


def requeued_run(trainer: pl.Trainer) -> str | None:
    """Return the log folder of this SLURM job's own run, None for a job that was never requeued."""
    job = os.environ.get("SLURM_JOB_ID")
    root = _root_of_runs(trainer)
    if job is None or root is None or not int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        return None
    for folder in _newest_runs(root):
        if read_holder(folder / "checkpoints").get("job") == job and has_checkpoints(folder / "checkpoints"):
            return str(folder)
    rank_zero_info(f"job {job} was requeued before its first checkpoint: its run starts afresh")
    return None


def continue_logs(trainer: pl.Trainer, run: Continuation) -> None:
    """Have loggers go on in the run's folder, without what was written after the checkpoint.

    TensorBoard's event files say from which step on earlier ones do not count; a CSV file, which its logger
    would delete, is kept under another name. Other loggers are left as they are.
    """
    if run.folder is None:
        return
    version = run.folder.name
    update = run.checkpoint.update
    for logger in trainer.loggers:
        if isinstance(logger, (TensorBoardLogger, CSVLogger)):
            cast(Any, logger)._version = version
        if isinstance(logger, TensorBoardLogger):
            cast(Any, logger)._kwargs["purge_step"] = update + 1
        elif isinstance(logger, CSVLogger):
            file = Path(logger.log_dir) / "metrics.csv"
            if trainer.is_global_zero and file.exists():
                file.rename(_free_name(file.with_name(f"metrics-until-{update:06d}.csv")))


def compare_settings(
    checkpoint: Mapping[str, Any],
    ours: Mapping[str, Any],
    path: str,
    allowed: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Stop where a setting differs from the one that a checkpoint was written by.

    Args:
        checkpoint: One that a command wrote; another has nothing to compare, and passes.
        ours: The settings of this call, nested.
        path: The checkpoint's place.
        allowed: Keys that may differ, with all that is below them.
        defaults: What settings are when they are not given, nested. A setting that the checkpoint does not
            know, because it was written before there was one, had its default.

    Raises:
        UserError: If others differ, with both values of each; if an allowed key is unknown, or cannot differ.
    """
    theirs = cast("Mapping[str, Any] | None", checkpoint.get(KEY))
    if theirs is None:
        return
    here, there = _flat(_relevant(ours)), _flat(_relevant(theirs))
    usual = _flat(_relevant(defaults or {}))
    there |= {key: value for key, value in usual.items() if key in here and key not in there}
    for key in allowed:
        if not any(_covers(key, each) for each in here | there):
            raise UserError(f"--allow_drift {key}: there is no such setting")
    differing = [key for key in sorted(here | there) if here.get(key, ABSENT) != there.get(key, ABSENT)]
    fixed = [key for key in differing if any(_covers(each, key) for each in FIXED)]
    drifted = [key for key in differing if not any(_covers(each, key) for each in allowed)]
    said = [
        f"{key}: checkpoint {there.get(key, ABSENT)!r}, here {here.get(key, ABSENT)!r}" for key in differing
    ]
    if fixed:
        raise UserError(
            f"{path} was written by other settings ({_some(said)}), and a resume cannot change "
            f"{', '.join(FIXED)}; put them back, or take the weights alone with --init_from"
        )
    if drifted:
        keys = " ".join(f"--allow_drift {key}" for key in drifted[:4])
        raise UserError(
            f"{path} was written by other settings: {_some(said)}. Put them back, or let them differ: {keys}"
        )
    if differing:
        rank_zero_info(f"goes on with other settings, as allowed: {_some(said)}")


def _continue(folder: Path | None, checkpoints: Path) -> Continuation:
    found = newest_valid(checkpoints)
    say_passed_over(found)
    rank_zero_info(f"resuming after update {found.update}, from {found.path}")
    return Continuation(folder=folder, checkpoint=found)


def _root_of_runs(trainer: pl.Trainer) -> Path | None:
    """Return the folder in which each run has its log folder, None without a logger that has one."""
    logger = trainer.loggers[0] if trainer.loggers else None
    root = getattr(logger, "root_dir", None)
    return None if root is None else Path(root)


def _newest_runs(root: Path) -> list[Path]:
    """Return `version_0`, `version_1`, … the newest first."""
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


def _relevant(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings without what a call alone has, and without callbacks that save."""
    kept = {key: value for key, value in settings.items() if key not in ONLY_THIS_CALL}
    trainer = dict(kept.get("trainer") or {})
    callbacks: Any = trainer.get("callbacks")
    if isinstance(callbacks, list):
        each_of = cast("list[Any]", callbacks)
        trainer["callbacks"] = [each for each in each_of if "Checkpoint" not in str(_class_of(each))] or None
    return kept | {"trainer": trainer}


def _class_of(value: Any) -> Any:
    return cast("dict[str, Any]", value).get("class_path") if isinstance(value, dict) else value


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings and lists as dotted keys, without those that are free to differ."""
    if any(_covers(each, prefix) for each in FREE):
        return {}
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping) and value:
        parts = cast("Mapping[Any, Any]", value).items()
    elif isinstance(value, (list, tuple)) and any(
        isinstance(each, (dict, list)) for each in cast("Any", value)
    ):
        parts = enumerate(cast("list[Any]", value))
    elif prefix:
        return {prefix: list(cast("Any", value)) if isinstance(value, tuple) else value}
    flat: dict[str, Any] = {}
    for key, part in parts:
        flat |= _flat(part, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _covers(key: str, other: str) -> bool:
    return other == key or other.startswith(f"{key}.")


def _some(said: Sequence[str]) -> str:
    more = f"; and {len(said) - 6} more" if len(said) > 6 else ""
    return "; ".join(said[:6]) + more
