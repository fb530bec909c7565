"""Logs on a full disk: the run goes on, one warning names the file, and what was written stays whole."""

import csv
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from andrea_callbacks import RunJournal
from andrea_pl import DurableCheckpoint
from andrea_pl.runs.manifest import newest_valid
from tests.support.toy import ListLoader, ToyU, build_trainer, window

FULL = OSError(errno.ENOSPC, "No space left on device")


class Disk:
    """A disk that takes half of each write while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.refused: list[str] = []
        self._monkeypatch = monkeypatch

    def guards(self, owner: Any, name: str, half: Callable[..., None]) -> None:
        real = getattr(owner, name)

        def write(*arguments: Any, **named: Any) -> Any:
            if self.is_full:
                self.refused.append(name)
                half(real, *arguments, **named)
                raise FULL
            return real(*arguments, **named)

        self._monkeypatch.setattr(owner, name, write)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


class Fills(ToyU):
    """A module that fills the disk before update 3, and makes room before update `until`."""

    def __init__(self, disk: Disk, until: int) -> None:
        super().__init__()
        self.disk = disk
        self.until = until

    def on_train_batch_start(self, *_: Any) -> None:
        self.disk.is_full = 3 <= self.trainer.global_step + 1 < self.until


def fit(disk: Disk, until: int, **options: Any) -> None:
    trainer = build_trainer(
        enable_checkpointing=True, default_root_dir=".", max_epochs=1, log_every_n_steps=1, **options
    )
    trainer.fit(Fills(disk, until), ListLoader([window([0, 1])] * 6))


def words(told: Any, part: str) -> list[str]:
    """Return the warnings that have a part."""
    return [str(each.message) for each in told if part in str(each.message)]


def scalars(folder: Path) -> list[int]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [each.step for each in events.Scalars("train/loss")]


def test_an_event_file(disk: Disk) -> None:
    """Each record is cut off that was half written, so that later ones are read; the rest is a gap."""
    from tensorboard.compat.tensorflow_stub.io import gfile

    def half(append: Any, files: Any, name: str, content: bytes, *rest: Any) -> None:
        append(files, name, content[: len(content) // 2], *rest)

    disk.guards(gfile.LocalFileSystem, "append", half)
    saving = DurableCheckpoint(every=1, keep=0)
    with pytest.warns(UserWarning, match=r"version_0/events.* cannot be written \(No space left") as told:
        fit(disk, until=5, logger=TensorBoardLogger(".", version=0), callbacks=[saving])
    assert len(words(told, "cannot be written")) == 1
    assert "with a gap in its curves" in words(told, "cannot be written")[0]
    assert disk.refused
    folder = Path("lightning_logs/version_0")
    steps = scalars(folder)
    assert {1, 2, 5, 6} <= set(steps)
    assert steps == sorted(set(steps))
    assert newest_valid(folder / "checkpoints").update == 6


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_a_table(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows wait for space; each is in the table once, under the right columns."""
    from lightning.fabric.loggers.csv_logs import csv as writing

    def half(write: Any, writer: Any, rows: Any) -> None:
        write(writer, list(rows)[:1])

    disk.guards(writing.DictWriter, "writerows", half)
    logger = CSVLogger(".", version=0, flush_logs_every_n_steps=1)
    with pytest.warns(UserWarning, match=r"metrics\.csv cannot be written") as told:
        fit(disk, until=6, logger=logger, callbacks=[DurableCheckpoint(every=1)])
    assert len(words(told, "cannot be written")) == 1
    assert disk.refused
    with Path("lightning_logs/version_0/metrics.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row.get("train/loss")]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("until", [5, 99])
def test_a_journal(disk: Disk, until: int) -> None:
    """Lines wait for space; where none comes the run ends all the same, and says how many are lost."""
    from andrea_callbacks.numerics import atomic_write as durable

    def half(write: Any, descriptor: int, content: Any) -> None:
        write(descriptor, content[: len(content) // 2])

    disk.guards(durable, "write_all", half)
    with pytest.warns(UserWarning, match="RunJournal: journal.jsonl could not be written") as told:
        fit(disk, until=until, callbacks=[RunJournal("journal.jsonl", every=1, seconds=0)])
    lost = words(told, "are lost")
    assert len(words(told, "could not be written (")) == 1
    rows = [json.loads(line) for line in Path("journal.jsonl").read_text().splitlines()]
    updates = [row["update"] for row in rows if row["kind"] == "update"]
    if until == 5:
        assert updates == [1, 2, 3, 4, 5, 6]
        assert not lost
    else:
        assert updates == [1, 2]
        assert "its last 6 lines are lost" in lost[0]  # four updates, a checkpoint, the end


class FullLogger(DummyLogger):
    """Somebody's logger."""

    save_dir = "elsewhere"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: Any, step: int | None = None, **_: Any) -> None:
        if step == 3:
            raise FULL


def test_any_other_logger(disk: Disk) -> None:
    """Scalars that a logger refuses are left out, and said once, by its place."""
    logger = FullLogger()
    with pytest.warns(UserWarning, match="FullLogger in elsewhere cannot write the scalars of update 3"):
        fit(disk, until=0, logger=logger, callbacks=[DurableCheckpoint()])


class Raises(Fills):
    """A module whose own file is on a full disk after an update."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 4:
            raise FULL


def test_what_is_done_is_saved_before_a_full_disk_ends_a_run(disk: Disk) -> None:
    """Also where nobody here writes: four updates are made, four are saved."""
    trainer = build_trainer(enable_checkpointing=True, max_epochs=1, callbacks=[DurableCheckpoint()])
    with pytest.raises(OSError, match="No space left"):
        trainer.fit(Raises(disk, 0), ListLoader([window([0, 1])] * 6))
    assert newest_valid("checkpoints").update == 4
