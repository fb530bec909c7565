"""Keeps a run going when the disk under its logs is full: one warning, and gaps in the logs.

    event file    a partly written record is cut off again, so that later records can be read
    metrics.csv   rows that could not be written stay in memory, and are written with the next ones

TensorBoard writes in a separate thread. Its errors would appear in the next unrelated call that logs.
"""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from andrea_callbacks.hooks.lightning_state import opened_experiment
from andrea_callbacks.hooks.packages import is_kind


class LogGuard:
    """Keeps disk errors under a trainer's TensorBoard and CSV loggers from ending its run.

    Args:
        trainer: Its loggers have opened their files. Only rank zero writes any.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._files: list[_GuardedFile] = []
        for logger in trainer.loggers if trainer.is_global_zero else []:
            experiment: Any = opened_experiment(logger)
            if is_kind(logger, TensorBoardLogger):
                self._files += _guard_events(experiment)
            elif is_kind(logger, CSVLogger) and experiment is not None:
                self._files.append(_guard_table(experiment))

    def report(self) -> None:
        """Warn once per file that could not be written, and tell when it can be written again."""
        for each in self._files:
            each.report()


class _GuardedFile:
    """A file whose disk may be full."""

    def __init__(self, file: Path, loss: str) -> None:
        self.file = file
        self._loss = loss
        self._fault: OSError | None = None
        self._told: OSError | None = None
        self._has_warned = False

    @contextmanager
    def writing(self, undo: Callable[[], None]) -> Generator[None, None, None]:
        """Catch a disk error inside the context, and undo what was partly written."""
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                undo()
            self._fault = error
        else:
            self._fault = None

    def report(self) -> None:
        """Report a change of state; called in the main thread."""
        fault = self._fault
        if fault is not None and self._told is None:
            self._told = fault
            if not self._has_warned:
                self._has_warned = True
                rank_zero_warn(
                    f"{self.file} cannot be written ({fault.strerror or fault}); the run goes on, "
                    f"{self._loss}. Free some space"
                )
        elif fault is None and self._told is not None:
            self._told = None
            rank_zero_info(f"{self.file} is written again")


class _Records:
    """Stands in for TensorBoard's record writer in its thread."""

    def __init__(self, writer: Any, guarded: _GuardedFile) -> None:
        self._writer = writer
        self._guarded = guarded

    def write(self, record: bytes) -> None:
        """Append a record, or leave the file unchanged."""
        size = _size(self._guarded.file)
        with self._guarded.writing(lambda: os.truncate(self._guarded.file, size)):
            self._writer.write(record)

    def flush(self) -> None:
        """Write every buffered record."""
        with suppress(OSError):
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._writer.close()

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return bool(self._writer.closed)


def _guard_events(experiment: Any) -> list[_GuardedFile]:
    """Guard the event file of a SummaryWriter; tensorboardX has another writer, which is left as it is."""
    if not hasattr(experiment, "_get_file_writer"):
        return []
    events = experiment._get_file_writer().event_writer
    pipe = getattr(events, "_async_writer", None)
    if pipe is None or "://" in str(events._file_name) or isinstance(pipe._writer, _Records):
        return []
    guarded = _GuardedFile(Path(events._file_name), "with a gap in its curves")
    pipe._writer = pipe._worker._record_writer = _Records(pipe._writer, guarded)
    return [guarded]


def _guard_table(experiment: Any) -> _GuardedFile:
    """Guard the table of a CSVLogger."""
    file = Path(experiment.metrics_file_path)
    guarded = _GuardedFile(file, "and keeps these rows in memory until they can be written")
    kind = cast(Any, type(experiment))

    def save() -> None:
        columns = list(experiment.metrics_keys)
        is_rewritten = file.exists() and set[str]().union(*experiment.metrics) - set(columns)
        content, size = file.read_bytes() if is_rewritten else None, _size(file)

        def undo() -> None:
            experiment.metrics_keys = columns
            if content is not None:
                file.write_bytes(content)
            elif file.exists():
                os.truncate(file, size) if size else file.unlink()

        with guarded.writing(undo):
            kind.save(experiment)

    experiment.save = save
    return guarded


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
