"""Acquires a run's folders before it starts, and restores them if it does not start.

    lock the resumed run ─> compare settings ─> version folders, locks ─> loggers, text, restore ─> update 1
    └──────────── if anything refuses the run until here, its folders are unchanged ───────────────┘

Lightning makes loggers open their files before any hook of a callback. In a folder that another run is
writing, that is enough to hide the other run's curves. So the command acquires the folders first.
"""

import os
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from typing_extensions import override

from andrea_callbacks.hooks.lightning_state import given_version, set_version
from andrea_callbacks.numerics.atomic_write import make_folder_durably, synchronize_folder
from andrea_pl.errors import UserError
from andrea_pl.runs.checkpoint_callback import DurableCheckpoint
from andrea_pl.runs.checkpoint_folder import run_facts, unwritable
from andrea_pl.runs.lock import FolderLock

WRITTEN_AT_START = ("config.yaml", "hparams.yaml", "tokenizer.json", "metrics.csv")
"""Files that a command may write into a log folder before its first update, besides event files."""


class RunFolders(Callback):
    """Holds the folders of a command's run, and can undo everything until the first update."""

    def __init__(self) -> None:
        super().__init__()
        self._has_started = False
        self._locks: dict[Path, FolderLock] = {}
        self._own: list[Path] = []  # folders that nobody else has chosen
        self._made: list[Path] = []
        self._there: dict[Path, set[str]] = {}  # what older log folders held before
        self._renamed: list[tuple[Path, Path]] = []

    @override
    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Record that the run has started."""
        self._has_started = True

    @override
    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Record that an evaluation has started."""
        self._has_started |= not trainer.sanity_checking

    @override
    def on_test_batch_start(self, *_: Any, **__: Any) -> None:
        """Record that an evaluation has started."""
        self._has_started = True

    @override
    def on_predict_batch_start(self, *_: Any, **__: Any) -> None:
        """Record that an evaluation has started."""
        self._has_started = True

    def lock(self, trainer: pl.Trainer, folder: Path) -> None:
        """Lock an existing folder of checkpoints before it is searched.

        Raises:
            UserError: If another run holds it.
        """
        if _decides(trainer) and folder.is_dir() and folder not in self._locks:
            self._locks[folder] = FolderLock(folder, announce=False)

    def take(self, trainer: pl.Trainer, trains: bool = True) -> None:
        """Acquire log folders, and for training also folders of checkpoints.

        A logger without a version gets a new folder, which no other run can get, even one that starts at the
        same moment.

        Raises:
            UserError: If another run holds a folder of checkpoints, or one cannot be written.
        """
        if not _decides(trainer) or getattr(trainer, "fast_dev_run", False):
            return
        claimed: dict[Path, str] = {}
        logs = [
            self._take_log_folder(logger, claimed)
            for logger in trainer.loggers
            if isinstance(logger, (TensorBoardLogger, CSVLogger)) and "://" not in str(logger.root_dir)
        ]
        for each in cast("list[Callback]", cast(Any, trainer).callbacks):
            if trains and isinstance(each, DurableCheckpoint):
                self._take_checkpoints(trainer, each, logs)
        for folder in logs:
            _try_to_write(folder)

    def note_renamed(self, file: Path, name: Path) -> None:
        """Remember a renamed file of an earlier part of the run."""
        self._renamed.append((file, name))

    def give_back(self) -> None:
        """If the run has not started, restore everything: no new file or folder, and the old lock file."""
        if self._has_started:
            return
        for file, name in self._renamed:
            if name.exists() and not file.exists():
                name.rename(file)
        for folder, there in self._there.items():
            _remove_new_files(folder, there)
        for lock in self._locks.values():
            _withdraw(lock)
        for folder in self._own:
            if not any(folder.rglob("*.ckpt")):
                shutil.rmtree(folder, ignore_errors=True)
        for folder in reversed(self._made):
            with suppress(OSError):  # it has something of somebody else's
                folder.rmdir()

    def _take_log_folder(self, logger: TensorBoardLogger | CSVLogger, claimed: dict[Path, str]) -> Path:
        root = _root_of(logger)
        if given_version(logger) is None:
            if root not in claimed:
                folder = self._claim(root)
                claimed[root] = folder.name.removeprefix("version_")
            set_version(logger, claimed[root])
        folder = root / _version_name(logger)
        if folder not in self._own:
            made = self._make(folder)
            if folder in made:
                self._own.append(folder)
            else:
                self._there.setdefault(folder, {each.name for each in folder.iterdir()})
        return folder

    def _claim(self, root: Path) -> Path:
        """Make the next free `version_n`. If two runs try at once, only one of them makes it."""
        self._make(root)
        number = 1 + max(map(_number_of, root.iterdir()), default=-1)
        while True:
            folder = root / f"version_{number}"
            try:
                folder.mkdir()
            except FileExistsError:
                number += 1
                continue
            self._own.append(folder)
            self._made.append(folder)
            synchronize_folder(root)
            return folder

    def _take_checkpoints(self, trainer: pl.Trainer, saving: DurableCheckpoint, logs: list[Path]) -> None:
        place = saving.resolve(trainer)
        if "://" in place:
            return
        folder = Path(place)
        try:
            self._made += make_folder_durably(folder)
        except OSError as error:
            raise unwritable(folder, error) from error
        self.lock(trainer, folder)
        self._locks[folder].announce(run_facts(trainer, str(logs[0]) if logs else None))
        saving.open_folder(trainer).hand_over(self._locks[folder])

    def _make(self, folder: Path) -> list[Path]:
        try:
            made = make_folder_durably(folder)
        except OSError as error:
            raise _unwritable(folder, error) from error
        self._made += made
        return made


def _decides(trainer: pl.Trainer) -> bool:
    """Return whether this process is rank zero, and not only the launcher of rank zero."""
    launchers = {each.__name__ for each in type(trainer.strategy.launcher).__mro__}
    return trainer.is_global_zero and "_MultiProcessingLauncher" not in launchers


def _root_of(logger: TensorBoardLogger | CSVLogger) -> Path:
    return Path(os.path.expandvars(str(logger.root_dir))).expanduser()


def _version_name(logger: Logger) -> str:
    version = logger.version
    return version if isinstance(version, str) else f"version_{version}"


def _number_of(folder: Path) -> int:
    found = re.fullmatch(r"version_(\d+)", folder.name)
    return int(found[1]) if found else -1


def _try_to_write(folder: Path) -> None:
    """Detect a full disk or a read-only folder before Lightning does."""
    trial = folder / f".trial-{os.getpid()}"
    try:
        trial.write_bytes(bytes(4096))
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        trial.unlink(missing_ok=True)


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"{folder}: nothing can be written there ({error.strerror or error}); free some space, mend its "
        "permissions, or give another folder (trainer.logger, trainer.default_root_dir)"
    )


def _remove_new_files(folder: Path, there: set[str]) -> None:
    """Remove files that this process wrote into an existing log folder."""
    ours = re.compile(rf".*tfevents\..*\.{re.escape(socket.gethostname())}\.{os.getpid()}\..*")
    for each in list(folder.iterdir()) if folder.is_dir() else list[Path]():
        if each.name not in there and (each.name in WRITTEN_AT_START or ours.fullmatch(each.name)):
            each.unlink(missing_ok=True)


def _withdraw(lock: FolderLock) -> None:
    """Acquire a lock again if the end of a fit has released it, and restore its file."""
    with suppress(UserError, OSError):  # another run has it
        lock.hold()
        lock.withdraw()
