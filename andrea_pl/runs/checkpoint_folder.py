"""A run's checkpoint folder: found, locked, cleaned up, rotated."""

import os
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info

from andrea_callbacks.numerics.atomic_write import make_folder_durably, synchronize_folder
from andrea_pl.errors import UserError
from andrea_pl.runs.lock import FolderLock
from andrea_pl.runs.manifest import FINAL, SUFFIX, sweep

PERIODIC, BEST = "update", "best"


class CheckpointFolder:
    """The folder in which one callback saves during a fit.

    Args:
        path: A local folder, or one on another file system (`s3://` …), which is neither locked nor cleaned
            up.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_local = "://" not in path
        self._lock: FolderLock | None = None

    def file(self, kind: str, update: int) -> str:
        """Return the path of an update's file; `kind` is `update`, `best` or `final`."""
        return joined(self.path, f"{kind}-{update:06d}{SUFFIX}")

    def lock_early(self) -> None:
        """Lock the folder if it exists.

        Raises:
            UserError: If another run holds it.
        """
        if self._lock is None and self.is_local and Path(self.path).is_dir():
            self._lock = FolderLock(Path(self.path), announce=False)

    def hand_over(self, lock: FolderLock) -> None:
        """Use a lock that was taken before for this folder."""
        self._lock = lock

    def take(self, facts: dict[str, Any]) -> None:
        """Lock and clean up the folder, and try a write, so that a failure appears now.

        Args:
            facts: Contents of the lock file; see `run_facts`.

        Raises:
            UserError: If the folder cannot be written, or another run holds it.
        """
        folder = Path(self.path)
        try:
            make_folder_durably(folder)
            _synchronize_parents(folder)
            trial = folder / f".trial-{time.monotonic_ns()}"
            trial.write_bytes(b"trial")
            trial.unlink()
        except OSError as error:
            raise unwritable(folder, error) from error
        if self._lock is not None and self._lock.folder != folder:
            self.release()
        if self._lock is None:
            self._lock = FolderLock(folder, announce=False)
        self._lock.announce(facts)
        swept = sweep(folder)
        if swept:
            rank_zero_info(
                f"{folder}: removed what unfinished saves left: {', '.join(p.name for p in swept)}"
            )

    def release(self) -> None:
        """Release the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def best_files(self) -> set[str]:
        """Return the names of the best files that exist."""
        return {each.name for each in Path(self.path).glob(f"{BEST}-*{SUFFIX}")}

    def surplus(self, update: int, keep: int, best: Collection[str]) -> list[str]:
        """Return the files up to an update that are neither among the newest `keep` nor among the best."""
        files = [each for kind in (PERIODIC, BEST) for each in Path(self.path).glob(f"{kind}-*{SUFFIX}")]
        made = sorted((each for each in files if 0 <= _update_of(each) <= update), key=_update_of)
        return [joined(self.path, each.name) for each in made[:-keep] if each.name not in best]

    def earlier_finals(self, update: int) -> list[str]:
        """Return the files of final weights of earlier updates."""
        files = Path(self.path).glob(f"{FINAL}-*{SUFFIX}")
        return [joined(self.path, each.name) for each in files if 0 <= _update_of(each) < update]


def folder_of(trainer: pl.Trainer, given: str | None) -> str:
    """Return a trainer's checkpoint folder: the given one, or one in the log folder."""
    if given is not None:
        return given if "://" in given else str(Path(given).expanduser())
    if not trainer.loggers:
        return joined(trainer.default_root_dir, "checkpoints")
    logger = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    folder = os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name), version)  # noqa: PTH118
    return joined(folder, "checkpoints")


def unwritable(folder: Path, error: OSError) -> UserError:
    """Return the error for a folder that cannot be written."""
    return UserError(
        f"{folder}: checkpoints cannot be written there ({error.strerror or error}); give another "
        "dirpath, or mend its permissions"
    )


def run_facts(trainer: pl.Trainer, logs: str | None) -> dict[str, Any]:
    """Return the contents of a run's lock file, by which a resume finds the run's logs.

    Args:
        trainer: Its loggers are listed.
        logs: The log folder, or None.
    """
    return {"logs": logs, "loggers": [_named(each) for each in trainer.loggers]}


def _synchronize_parents(folder: Path) -> None:
    """Synchronise the names of a folder, its log folder and the folder of runs with the disk."""
    for each in list(folder.parents)[:4]:
        with suppress(OSError):  # a folder that may be entered and not read
            synchronize_folder(each)


def _named(logger: Logger) -> list[str]:
    """Return a logger's class, root folder and version, to find its folder again."""
    return [type(logger).__name__, str(getattr(logger, "root_dir", None)), str(logger.version)]


def _update_of(path: Path) -> int:
    digits = path.name.removesuffix(SUFFIX).rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1


def joined(folder: str, name: str) -> str:
    """Return a path below a folder, which may be on another file system."""
    return f"{folder.rstrip('/')}/{name}"
