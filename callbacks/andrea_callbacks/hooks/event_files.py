"""Keeps the TensorBoard curves of a resumed run in order: every step appears once.

    file 1  1 2 3 CHECKPOINT 4 5  each checkpoint leaves a mark; the run is killed at 5
    file 2        START 4, 4 5 6  the run resumed from 3 has TensorBoard discard what is at step 4 and later

TensorBoard reads the event files of a folder in the order of the times in their names. At a session start
for step s it discards everything it read at step s and later. Some curves do not count updates, so that this
also discards some of their points from before the mark. Those points are written again.
"""

import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger

from andrea_callbacks.hooks.lightning_state import opened_experiment
from andrea_callbacks.hooks.packages import is_kind

NAME = re.compile(r"(.*tfevents\.)(\d+)(.*)")
"""An event file's name; the second group is its time in seconds."""

HEADER, FOOTER = 12, 4
"""Bytes before a record (its length and the length's checksum) and after it (its checksum)."""


def mark_curves(trainer: pl.Trainer, place: str | None) -> None:
    """Mark a checkpoint in the event files of a trainer's TensorBoard loggers, on rank zero.

    TensorBoard does not show the mark. Everything logged so far is flushed.

    Args:
        trainer: Its `global_step` is the checkpoint's update.
        place: Tells checkpoints of the same update apart.
    """
    for writer in _writers(trainer):
        _write_session(writer, trainer.global_step, "CHECKPOINT", place or "")
        writer.flush()


def discard_curves(trainer: pl.Trainer, place: str | None) -> None:
    """Make TensorBoard discard what a run wrote after the resumed checkpoint, on rank zero.

    If no file has that checkpoint's mark, everything at later steps is discarded. Subfolders of `add_scalars`
    are not changed.

    Args:
        trainer: Its `global_step` is the checkpoint's update.
        place: The argument of `mark_curves` for that checkpoint.
    """
    update = trainer.global_step
    for writer in _writers(trainer):
        file = _file_of(writer)
        older = [] if file is None else _put_before(file, _older(file))
        if file is not None and not older:
            continue
        before, after = _split(older, update, place or "", type(_new_event(writer)))
        start = min((each.step for each in after), default=update + 1)
        _write_session(writer, start, "START")
        for each in before:
            if each.step >= start:
                writer.add_event(each, walltime=each.wall_time)
        writer.flush()


def remove_opened_files(trainer: pl.Trainer) -> None:
    """Remove the event files that a refused fit's TensorBoard loggers opened, on rank zero.

    Folders that become empty are removed too.
    """
    for logger in cast("list[Any]", trainer.loggers) if trainer.is_global_zero else []:
        experiment: Any = opened_experiment(logger)
        if not is_kind(logger, TensorBoardLogger) or not hasattr(experiment, "_get_file_writer"):
            continue
        file = _file_of(experiment._get_file_writer())
        experiment.close()
        if file is not None:
            file.unlink(missing_ok=True)
            with suppress(OSError):  # somebody else's files are there
                file.parent.rmdir()


def _writers(trainer: pl.Trainer) -> list[Any]:
    """Return rank zero's TensorBoard file writers."""
    loggers = cast("list[Any]", trainer.loggers) if trainer.is_global_zero else []
    experiments = [each.experiment for each in loggers if is_kind(each, TensorBoardLogger)]
    return [each._get_file_writer() for each in experiments if hasattr(each, "_get_file_writer")]


def _file_of(writer: Any) -> Path | None:
    """Return a writer's file, None if it is on another file system."""
    events = writer.event_writer
    name = str(getattr(events, "_ev_writer", events)._file_name)  # the first is tensorboardX's
    return None if "://" in name else Path(name)


def _older(file: Path) -> list[Path]:
    """Return the other event files in a file's folder, oldest first."""
    files = [each for each in file.parent.iterdir() if NAME.fullmatch(each.name) and each.name != file.name]
    return sorted(files, key=lambda each: (_time_of(each), each.stat().st_mtime_ns))


def _put_before(file: Path, older: list[Path]) -> list[Path]:
    """Rename older files with a later time in their name, as after a clock was set back; keep the order."""
    placed: list[Path] = []
    limit = _time_of(file)
    for each in reversed(older):
        limit = min(_time_of(each), limit - 1)
        found = cast("re.Match[str]", NAME.fullmatch(each.name))
        placed.append(each.with_name(f"{found[1]}{limit:0{len(found[2])}d}{found[3]}"))
    placed.reverse()
    for each, name in zip(older, placed, strict=True):  # oldest first: no name is taken when it is given
        if each != name:
            each.rename(name)
    return placed


def _time_of(file: Path) -> int:
    return int(cast("re.Match[str]", NAME.fullmatch(file.name))[2])


def _split(files: list[Path], update: int, place: str, kind: Any) -> tuple[list[Any], list[Any]]:
    """Return the events before a checkpoint's mark and those after it; both empty without a mark.

    Lightning writes the row of update k at step k - 1, after the checkpoint saved at the end of that update.
    Such a late row counts as before the mark.

    Args:
        files: Event files, oldest first.
        update: The checkpoint's update.
        place: The checkpoint's place.
        kind: The events' class.
    """
    shown: list[Any] = []
    before: list[Any] | None = None
    after: list[Any] = []
    late: list[Any] = []
    for event in (each for file in files for each in _events(file, kind)):
        session = event.session_log
        if event.HasField("summary"):  # at any step: some curves count epochs, or are one behind the updates
            shown.append(event)
            if (
                _is_curve(event) and event.step != update - 1
            ):  # there Lightning has the row of this very update
                after.append(event)
            else:
                late.append(event)
        elif session.status == session.START:  # of an earlier resume
            shown = [each for each in shown if each.step < event.step]
        elif session.status == session.CHECKPOINT and (event.step, session.msg) == (update, place):
            before, after, late = list(shown), [], []
    return ([], []) if before is None else ([*before, *late], after)


def _is_curve(event: Any) -> bool:
    """Return whether an event is a point of a curve, and not the run's layout or options."""
    plugins = {each.metadata.plugin_data.plugin_name for each in event.summary.value}
    return not plugins <= {"custom_scalars", "hparams"}


def _events(file: Path, kind: Any) -> Iterator[Any]:
    """Yield the events of a file up to the first torn one."""
    with suppress(Exception), file.open("rb") as stream:  # what cannot be read makes no event
        while len(header := stream.read(HEADER)) == HEADER:
            length = int(struct.unpack("<Q", header[:8])[0])
            record = stream.read(length + FOOTER)
            if len(record) < length + FOOTER:
                return
            yield kind.FromString(record[:length])


def _new_event(writer: Any) -> Any:
    """Return an empty event of the writer's package, tensorboard or tensorboardX."""
    is_other = type(writer).__module__.startswith("tensorboardX")
    module = "tensorboardX.proto.event_pb2" if is_other else "tensorboard.compat.proto.event_pb2"
    return cast(Any, import_module(module)).Event()  # only where there is such a logger


def _write_session(writer: Any, step: int, status: str, message: str = "") -> None:
    event = _new_event(writer)
    event.session_log.status = getattr(event.session_log, status)
    event.session_log.msg = message
    writer.add_event(event, step)
