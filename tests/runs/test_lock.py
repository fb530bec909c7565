"""A folder on a file system without locks: what a run says of itself is there all the same."""

import errno
import fcntl
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from andrea_pl import DurableCheckpoint, UserError
from andrea_pl.runs.lock import FolderLock, read_holder
from andrea_pl.runs.resume import requeued_run
from tests.support.toy import ListLoader, ToyU, build_trainer, window


@pytest.mark.parametrize("fault", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL])
def test_a_requeued_job_finds_its_run_without_flock(monkeypatch: pytest.MonkeyPatch, fault: int) -> None:
    """One warning says that a second run cannot be refused."""

    def flock(*_: Any) -> None:
        raise OSError(fault, "not here")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    saving = DurableCheckpoint(dirpath="kept")
    options: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 1}
    trainer = build_trainer(callbacks=[saving], **options)
    with pytest.warns(UserWarning, match="kept: its file system cannot lock files") as told:
        trainer.fit(ToyU(), ListLoader([window([0, 1])] * 3))
    assert sum("cannot be refused" in str(each.message) for each in told) == 1
    assert read_holder(Path("kept"))["job"] == "4711"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run = requeued_run(build_trainer(callbacks=[DurableCheckpoint(dirpath="kept")], **options))
    assert run is not None
    assert run.checkpoint.update == 3


@pytest.mark.parametrize("fault", [errno.EAGAIN, errno.EACCES])
def test_a_lock_that_another_machine_holds(monkeypatch: pytest.MonkeyPatch, fault: int) -> None:
    """NFS may call it a missing permission."""

    def flock(*_: Any) -> None:
        raise OSError(fault, "held")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match="is being written by another run"):
        FolderLock(Path())


def test_a_lock_is_withdrawn() -> None:
    """A run that did not start leaves the file as it was, or none; a lock that was released comes back."""
    FolderLock(Path()).withdraw()
    assert not Path(".lock").exists()
    first = FolderLock(Path(), {"job": "1"})
    first.release()
    before = Path(".lock").read_bytes()
    second = FolderLock(Path(), {"job": "2", "loggers": ["a name that is longer than what was there"]})
    assert read_holder(Path())["job"] == "2"
    second.withdraw()
    assert Path(".lock").read_bytes() == before
    second.hold()
    with pytest.raises(UserError):
        FolderLock(Path())
    second.release()


def test_a_file_that_is_removed_while_its_lock_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs never hold two files of one name."""
    real, removed = fcntl.flock, []

    def flock(file: Any, operation: int) -> None:
        real(file, operation)
        if not removed:
            removed.append(1)
            Path(".lock").unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = FolderLock(Path())
    with pytest.raises(UserError):
        FolderLock(Path())
    lock.release()


class TestLock:
    @pytest.mark.guarantee("one run a folder")
    def test_one_holder(self, tmp_path: Path) -> None:
        lock = FolderLock(tmp_path)
        with pytest.raises(UserError, match=rf"another run \(process {os.getpid()} on "):
            FolderLock(tmp_path)
        lock.release()
        FolderLock(tmp_path).release()

    def test_a_killed_holder_holds_nothing(self, tmp_path: Path) -> None:
        """What it left behind names it, and is taken over."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            lock = FolderLock(tmp_path)
            os.write(writing, b"1")
            signal.pause()
        os.read(reading, 1)
        with pytest.raises(UserError, match=f"process {child} on"):
            FolderLock(tmp_path)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert read_holder(tmp_path)["process"] == child
        lock = FolderLock(tmp_path)
        assert read_holder(tmp_path)["process"] == os.getpid()
        lock.release()
        os.close(reading)
        os.close(writing)

    def test_a_fork_does_not_hold_what_its_parent_held(self, tmp_path: Path) -> None:
        """Workers outlive a killed run by seconds, and must not keep the next one out."""
        lock = FolderLock(tmp_path)
        (reading, writing), (ready, tells) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.write(tells, b"1")
            os.read(reading, 1)
            os._exit(0)
        os.read(ready, 1)
        assert lock._file is not None
        lock._file.close()  # as the end of the process does
        FolderLock(tmp_path).release()
        os.close(writing)
        os.waitpid(child, 0)
        for each in (reading, ready, tells):
            os.close(each)
