"""TensorBoard's curves of a run that is resumed: every step once, in the order in which it was made.

    file 1  1 2 3 │ 4 5           a checkpoint of update 3 marks its place in the file; the run is killed at 5
    file 2        START 4, 4 5 6  the resumed run has TensorBoard discard what is at step 4 and later

TensorBoard reads the event files of a folder in the order of the times in their names, and discards, where a
session starts at step s, all that it has read at step s and later. What was written before the mark and lies
there nevertheless, because a curve counts something else than updates, is written once more.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger

from andrea_callbacks.packages import is_kind

NAME = re.compile(r"(.*tfevents\.)(\d+)(.*)")
"""An event file's name: its time in seconds is the second part."""

HEADER, FOOTER = 12, 4
"""Bytes around a record: its length and that one's checksum; the record's checksum."""


def mark_curves(trainer: pl.Trainer) -> dict[str, int]:
    """Return how far the event files of a trainer's TensorBoard loggers are written, in bytes by name.

    They are flushed. On ranks but zero, and in folders of other file systems, there is nothing to mark.
    """
    files = {file: writer for writer, file in _writers(trainer) if file is not None}
    for writer in files.values():
        writer.flush()
    return {file.name: file.stat().st_size for file in files if file.exists()}


def discard_curves(trainer: pl.Trainer, marks: Mapping[str, int]) -> None:
    """Have TensorBoard discard what a run wrote after the checkpoint that is resumed from; on rank zero.

    Sub-folders that `add_scalars` writes into are left as they are.

    Args:
        trainer: Its `global_step` is the update of the checkpoint.
        marks: What `mark_curves` returned when the checkpoint was saved. Where none of the files has a mark,
            all that is at later steps is discarded.
    """
    for writer, file in _writers(trainer):
        older = [] if file is None else _older(file)
        if file is not None and not older:
            continue
        if file is not None:
            older = _put_before(file, older)
        start, kept = _split(older, marks, trainer.global_step + 1, _event_class(writer))
        _write_start(writer, start, kept)


def _writers(trainer: pl.Trainer) -> list[tuple[Any, Path | None]]:
    """Return rank zero's TensorBoard writers, each with its file, None on another file system."""
    found: list[tuple[Any, Path | None]] = []
    for logger in cast("list[Any]", trainer.loggers) if trainer.is_global_zero else []:
        get = (
            getattr(logger.experiment, "_get_file_writer", None)
            if is_kind(logger, TensorBoardLogger)
            else None
        )
        if get is not None:
            writer = get()
            found.append((writer, _file_of(writer)))
    return found


def _file_of(writer: Any) -> Path | None:
    events = writer.event_writer
    name = str(getattr(events, "_ev_writer", events)._file_name)  # the first is tensorboardX's
    return None if "://" in name else Path(name)


def _older(file: Path) -> list[Path]:
    """Return the other event files of a file's folder in the order of writing."""
    files = [each for each in file.parent.iterdir() if NAME.fullmatch(each.name) and each.name != file.name]
    return sorted(files, key=lambda each: (_time_of(each), each.stat().st_mtime_ns))


def _put_before(file: Path, older: list[Path]) -> list[Path]:
    """Rename older files whose time is not before a file's, as after a clock went back; keep their order."""
    placed: list[Path] = []
    limit = _time_of(file)
    for each in reversed(older):
        limit = min(_time_of(each), limit - 1)
        placed.append(_renamed(each, limit))
    placed.reverse()
    for each, name in zip(older, placed, strict=True):  # oldest first: no name is taken when it is given
        if each != name:
            each.rename(name)
    return placed


def _renamed(file: Path, seconds: int) -> Path:
    found = cast("re.Match[str]", NAME.fullmatch(file.name))
    return file.with_name(f"{found[1]}{seconds:0{len(found[2])}d}{found[3]}")


def _time_of(file: Path) -> int:
    return int(cast("re.Match[str]", NAME.fullmatch(file.name))[2])


def _split(files: list[Path], marks: Mapping[str, int], after: int, kind: Any) -> tuple[int, list[Any]]:
    """Return from which step on TensorBoard is to discard, and what of that was written before the mark.

    Args:
        files: Event files in the order of writing.
        marks: Bytes of a file that were written when the checkpoint was saved.
        after: The first update that is made again.
        kind: The class of events.
    """
    at, size = _marked(files, marks, kind)
    if at < 0:
        return after, []
    kept: list[Any] = []
    discarded: list[int] = []
    for number, file in enumerate(files):
        for end, event in _events(file, kind):
            if number > at or (number == at and end > size):
                discarded += [event.step] if event.HasField("summary") else []
            elif event.HasField("session_log") and event.session_log.status == event.session_log.START:
                kept = [each for each in kept if each.step < event.step]
            elif event.HasField("summary") and event.step >= after - 1:
                kept.append(event)
    start = min((each for each in discarded if each >= after - 1), default=after)
    return start, [each for each in kept if each.step >= start]


def _marked(files: list[Path], marks: Mapping[str, int], kind: Any) -> tuple[int, int]:
    """Return the place of the newest file that has a mark, and its bytes; -1 where none has one.

    A file that was renamed is known by the time of its first event, which is the one it was named by.
    """
    named = {_renamed(Path(name), 0).name: (_time_of(Path(name)), size) for name, size in marks.items()}
    for number, file in reversed(list(enumerate(files))):
        time, size = named.get(_renamed(file, 0).name, (-1, 0))
        born = next((event.wall_time for _, event in _events(file, kind)), 0.0)
        if abs(born - time) < 2:
            return number, size
    return -1, 0


def _events(file: Path, kind: Any) -> Iterator[tuple[int, Any]]:
    """Yield each event of a file with the byte at which it ends; a torn one ends the file."""
    end = 0
    with suppress(Exception), file.open("rb") as stream:  # what cannot be read makes no event
        while len(header := stream.read(HEADER)) == HEADER:
            length = int(struct.unpack("<Q", header[:8])[0])
            record = stream.read(length + FOOTER)
            if len(record) < length + FOOTER:
                return
            end += HEADER + length + FOOTER
            yield end, kind.FromString(record[:length])


def _event_class(writer: Any) -> Any:
    """Return the class of events that a writer takes: tensorboard's or tensorboardX's."""
    if type(writer).__module__.startswith("tensorboardX"):
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore

        return cast(Any, Event)
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore

    return cast(Any, Event)


def _write_start(writer: Any, step: int, kept: list[Any]) -> None:
    start: Any = _event_class(writer)(step=step)
    start.session_log.status = start.session_log.START
    writer.add_event(start)
    for each in kept:
        writer.add_event(each, walltime=each.wall_time)
    writer.flush()
