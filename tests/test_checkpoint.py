"""Checkpoint files: verified, passed over, swept, locked, and never unpickled."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andrea_callbacks.durable import remove_temporaries, replace_durably, write_all
from andrea_pl import DurableCheckpoint, DurableCheckpointIO, UserError
from andrea_pl.checkpoint import fault_of, manifest_path, move_aside, newest_valid, read_checkpoint, sweep
from andrea_pl.lock import FolderLock, read_holder
from commands import run_python
from toy import ListLoader, ToyU, build_trainer, window


def checkpoint(update: int, size: int = 1000) -> dict[str, Any]:
    weights = {"w": torch.full((size,), float(update))}
    return {"global_step": update, "state_dict": weights, "optimizer_states": []}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with checkpoints of updates 10, 20, 30."""
    for update in (30, 10, 20):  # the order of writing decides nothing
        path = tmp_path / "checkpoints" / f"update-{update:06d}.ckpt"
        DurableCheckpointIO().save_checkpoint(checkpoint(update), path)
    return tmp_path / "checkpoints"


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "one byte": lambda path: path.write_bytes(path.read_bytes()[:1]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "all but one byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one bit": lambda path: flip(path, path.stat().st_size // 2 * 8 + 3),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "removed": lambda path: path.unlink(),
    "no manifest": lambda path: manifest_path(path).unlink(),
    "torn manifest": lambda path: manifest_path(path).write_text("{"),
}


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


class TestNewestValid:
    def test_by_update(self, folder: Path) -> None:
        found = newest_valid(folder)
        assert (found.path.name, found.update, found.passed_over) == ("update-000030.ckpt", 30, [])
        assert read_checkpoint(found.path)["state_dict"]["w"][0] == 30.0

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_passes_over_what_is_damaged(self, folder: Path, damage: str) -> None:
        """Truncated, flipped, replaced: the one before is taken, and the fault is named."""
        newest = folder / "update-000030.ckpt"
        DAMAGES[damage](newest)
        found = newest_valid(folder)
        assert found.path.name == "update-000020.ckpt"
        assert len(found.passed_over) == 1
        assert str(newest) in found.passed_over[0]

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_none_left_is_an_error(self, folder: Path, damage: str) -> None:
        files = sorted(folder.glob("*.ckpt"))
        for file in files:
            DAMAGES[damage](file)
        with pytest.raises(UserError, match="nothing is started afresh") as caught:
            newest_valid(folder)
        for file in files:
            assert str(file) in str(caught.value)

    def test_weights_alone_are_passed_over(self, folder: Path) -> None:
        """As `save_weights_only` writes them."""
        content = checkpoint(40)
        del content["optimizer_states"]
        DurableCheckpointIO().save_checkpoint(content, folder / "weights-40.ckpt")
        found = newest_valid(folder)
        assert found.update == 30
        assert "weights-40.ckpt holds weights alone" in found.passed_over[0]

    def test_nothing_there_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="there is no checkpoint"):
            newest_valid(tmp_path)
        with pytest.raises(UserError, match="no such folder"):
            newest_valid(tmp_path / "none")

    @given(bit=st.integers(min_value=0, max_value=10**6))
    def test_any_bit_flipped_is_found(self, tmp_path_factory: Any, bit: int) -> None:
        path = tmp_path_factory.mktemp("flipped") / "a.ckpt"
        DurableCheckpointIO().save_checkpoint(checkpoint(1, 10), path)
        assert fault_of(path) is None
        flip(path, bit % (8 * path.stat().st_size))
        assert "does not agree with its manifest" in str(fault_of(path))
        with pytest.raises(UserError, match=r"a\.ckpt: does not agree with its manifest"):
            read_checkpoint(path)


class TestWriting:
    def test_the_same_name_again(self, tmp_path: Path) -> None:
        """Whichever of the two contents is there at any moment verifies."""
        path, io = tmp_path / "a.ckpt", DurableCheckpointIO()
        io.save_checkpoint(checkpoint(1), path)
        before, manifest = path.read_bytes(), manifest_path(path).read_bytes()
        io.save_checkpoint(checkpoint(2, 2000), path)
        assert newest_valid(tmp_path).update == 2
        path.write_bytes(before)  # a kill after the manifest, before the rename
        assert fault_of(path) is None
        assert newest_valid(tmp_path).update == 1
        io.save_checkpoint(checkpoint(3), path)
        io.save_checkpoint(checkpoint(4), path)  # of the same size as the one before
        path.write_bytes(before)
        io.save_checkpoint(checkpoint(1), path)
        assert newest_valid(tmp_path).update == 1
        manifest_path(path).write_bytes(manifest)
        path.write_bytes(before)
        assert fault_of(path) is None

    def test_saves_of_the_same_name_that_were_killed(self, tmp_path: Path) -> None:
        """One after the other before its rename: what lies there verifies, is gone on from, and stays."""
        path, io = tmp_path / "last.ckpt", DurableCheckpointIO()
        io.save_checkpoint(checkpoint(1), path)
        before = path.read_bytes()
        for update in (2, 3, 4):
            io.save_checkpoint(checkpoint(update), path)
            path.write_bytes(before)
        assert newest_valid(tmp_path).update == 1
        assert move_aside(tmp_path, after=1) is None
        assert path.exists()
        aside = move_aside(tmp_path, after=0)
        assert aside is not None
        assert newest_valid(aside).update == 1

    def test_what_is_written_is_what_torch_writes(self, tmp_path: Path) -> None:
        DurableCheckpointIO().save_checkpoint(checkpoint(3), tmp_path / "a.ckpt")
        torch.save(checkpoint(3), tmp_path / "b.ckpt")
        for name in ("a", "b"):
            loaded = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
            assert torch.equal(loaded["state_dict"]["w"], checkpoint(3)["state_dict"]["w"])

    def test_a_folder_in_its_place_is_moved(self, tmp_path: Path) -> None:
        (tmp_path / "a.ckpt").mkdir()
        (tmp_path / "a.ckpt" / "mine").touch()
        with pytest.warns(UserWarning, match=r"a\.ckpt was a folder"):
            DurableCheckpointIO().save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
        assert (tmp_path / "a.ckpt-1" / "mine").exists()
        assert newest_valid(tmp_path).update == 1

    def test_removal_takes_the_manifest_along(self, folder: Path) -> None:
        DurableCheckpointIO().remove_checkpoint(str(folder / "update-000030.ckpt"))
        assert sorted(each.name for each in folder.iterdir()) == [
            f"update-0000{number}.ckpt{suffix}" for number in (10, 20) for suffix in ("", ".json")
        ]

    def test_a_limit_leaves_the_previous_file(self, folder: Path) -> None:
        """As on a full disk: byte-identical, path and bytes in the message, nothing left behind."""
        path = folder / "update-000030.ckpt"
        before = {each.name: each.read_bytes() for each in folder.iterdir()}
        script = (
            "import resource, sys, torch; from andrea_pl import DurableCheckpointIO, UserError\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
            "try:\n"
            "    state = {'w': [torch.zeros(10**5) for _ in range(10)]}\n"
            "    DurableCheckpointIO().save_checkpoint(state, sys.argv[1])\n"
            "except UserError as error:\n"
            "    print(error, file=sys.stderr)\n"
            "    sys.exit(1)\n"
        )
        result = run_python(script, str(path))
        assert result.returncode == 1
        assert f"{path} could not be written: File too large; free some space" in result.stderr
        assert "bytes were, of a checkpoint whose tensors take 4,000,000; " in result.stderr
        assert "what was there before is as it was" in result.stderr
        assert {each.name: each.read_bytes() for each in folder.iterdir()} == before

    @pytest.mark.parametrize("place", ["/proc/andrea/a.ckpt", "/dev/null/a.ckpt"])
    def test_a_folder_that_cannot_be_written(self, place: str) -> None:
        with pytest.raises(UserError, match=rf"{place} could not be written: .*\. 0 bytes were"):
            DurableCheckpointIO().save_checkpoint(checkpoint(1), place)

    def test_another_file_system_is_lightnings(self) -> None:
        io = DurableCheckpointIO()
        io.save_checkpoint(checkpoint(4), "memory://run/a.ckpt")
        assert io.load_checkpoint("memory://run/a.ckpt")["global_step"] == 4
        with pytest.raises(UserError, match=r"memory://run/none\.ckpt"):
            io.load_checkpoint("memory://run/none.ckpt")
        io.remove_checkpoint("memory://run/a.ckpt")

    def test_replaced_whole_or_not_at_all(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text("before")

        def fail(descriptor: int) -> None:
            write_all(descriptor, b"half")
            raise RuntimeError

        with pytest.raises(RuntimeError):
            replace_durably(file, fail)
        assert file.read_text() == "before"
        assert [each.name for each in tmp_path.iterdir()] == ["file"]
        mask = os.umask(0o027)
        replace_durably(file, lambda descriptor: write_all(descriptor, b"after"))
        os.umask(mask)
        assert file.read_text() == "after"
        assert file.stat().st_mode & 0o777 == 0o640

    def test_memory_beside_the_checkpoint(self, tmp_path: Path) -> None:
        """Streaming 64 MB takes less than a tenth of it more, whatever the largest tensor is."""
        script = """
import sys, torch
from andrea_pl import DurableCheckpointIO
from lightning.pytorch.plugins import TorchCheckpointIO
from saving import resident, start_peak

state = {"big": torch.ones(12 << 20), "small": [torch.ones(1 << 16) for _ in range(64)]}
for io in (DurableCheckpointIO(), TorchCheckpointIO()):
    io.save_checkpoint({}, sys.argv[1])
    before = start_peak()
    io.save_checkpoint(state, sys.argv[1])
    print(resident("VmHWM") - before)
"""
        result = run_python(script, str(tmp_path / "a.ckpt"))
        assert result.returncode == 0, result.stderr
        ours, theirs = map(int, result.stdout.split())
        assert ours < 6.4e6
        assert theirs > 60e6  # the control


class TestSweeping:
    def test_removes_what_killed_saves_left(self, folder: Path) -> None:
        part = folder / ".andrea-update-000040.ckpt-x7y.part"
        part.write_bytes(b"half")
        lonely = folder / "update-000040.ckpt.json"
        lonely.write_bytes((folder / "update-000030.ckpt.json").read_bytes())
        mine = folder / "notes.part"
        mine.touch()
        assert sweep(folder) == [part, lonely]
        assert mine.exists()
        assert len(list(folder.glob("*.ckpt*"))) == 6
        assert remove_temporaries(folder) == []


class TestLock:
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


class Evil:
    """Pickled, it is a call that makes a file."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("witness"),)


class TestClosedDoors:
    @pytest.mark.parametrize("place", ["all of it", "callbacks", "hyper_parameters", "loops"])
    def test_a_pickle_is_not_run(self, tmp_path: Path, place: str) -> None:
        content: Any = Evil() if place == "all of it" else {**checkpoint(1), place: {"a": Evil()}}
        torch.save(content, tmp_path / "evil.ckpt")
        with pytest.raises(UserError, match=r"evil\.ckpt is not a checkpoint that can be loaded"):
            DurableCheckpointIO().load_checkpoint(tmp_path / "evil.ckpt")
        trainer = build_trainer()
        trainer.strategy.checkpoint_io = DurableCheckpointIO()
        with pytest.raises(UserError, match=r"evil\.ckpt"):
            trainer.fit(ToyU(), ListLoader([window([0])]), ckpt_path=tmp_path / "evil.ckpt")
        assert not Path("witness").exists()

    def test_unsafe_loading_is_refused(self, folder: Path) -> None:
        with pytest.raises(UserError, match="weights_only=False"):
            DurableCheckpointIO().load_checkpoint(folder / "update-000010.ckpt", weights_only=False)

    @pytest.mark.parametrize("scheme", ["http", "https"])
    def test_nothing_is_fetched_from_the_web(self, scheme: str) -> None:
        for act in (DurableCheckpointIO().load_checkpoint, read_checkpoint):
            with pytest.raises(UserError, match="not fetched from the web"):
                act(f"{scheme}://example.com/a.ckpt")
            with pytest.raises(UserError, match="not fetched from the web"):
                act(f"simplecache::{scheme.upper()}://example.com/a.ckpt")


class TestRotation:
    def test_keeps_the_newest_and_the_best(self, tmp_path: Path) -> None:
        saving = DurableCheckpoint(every=1, keep=2, dirpath=str(tmp_path))
        trainer = build_trainer(callbacks=[saving], enable_checkpointing=True)
        trainer.fit(ToyU(), ListLoader([window([0])] * 5))
        assert sorted(each.name for each in tmp_path.glob("*.ckpt")) == [
            "update-000004.ckpt",
            "update-000005.ckpt",
        ]
        assert saving.last_path == f"{tmp_path}/update-000005.ckpt"
        assert {each.name for each in tmp_path.iterdir() if "update" not in each.name} == {".lock"}

    def test_removes_only_after_the_new_one_is_there(self, tmp_path: Path, monkeypatch: Any) -> None:
        """A save that fails leaves the last valid one, even where one file is kept."""
        saving = DurableCheckpoint(every=1, keep=1, dirpath=str(tmp_path))
        real = DurableCheckpointIO.save_checkpoint

        def save(self: Any, content: Any, path: Any, storage_options: Any = None) -> None:
            if "000003" in str(path):
                raise UserError("full")
            real(self, content, path)

        monkeypatch.setattr(DurableCheckpointIO, "save_checkpoint", save)
        trainer = build_trainer(callbacks=[saving], enable_checkpointing=True)
        with pytest.raises(UserError, match="full"):
            trainer.fit(ToyU(), ListLoader([window([0])] * 5))
        assert newest_valid(tmp_path).update == 2

    @pytest.mark.parametrize(
        "options", [{"every": 0}, {"minutes": 0}, {"mode": "least"}, {"keep": -1}, {"keep_best": 0}]
    )
    def test_options_out_of_range_are_named(self, options: dict[str, Any]) -> None:
        with pytest.raises(UserError, match=f"DurableCheckpoint: {next(iter(options))}"):
            DurableCheckpoint(**options)

    def test_two_in_one_folder_are_refused(self, tmp_path: Path) -> None:
        two = [DurableCheckpoint(dirpath=str(tmp_path), name=name) for name in ("a", "b")]
        trainer = build_trainer(callbacks=two, enable_checkpointing=True)
        with pytest.raises(UserError, match="give one another dirpath"):
            trainer.fit(ToyU(), ListLoader([window([0])]))

    def test_a_folder_that_cannot_be_written_is_found_before_training(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for place in (tmp_path / "file" / "below", Path("/proc/andrea")):
            trainer = build_trainer(
                callbacks=[DurableCheckpoint(dirpath=str(place))], enable_checkpointing=True
            )
            module = ToyU()
            with pytest.raises(UserError, match=f"{place}: checkpoints cannot be written there"):
                trainer.fit(module, ListLoader([window([0])]))
            assert module.updates_applied == 0

    def test_a_file_system_of_its_own(self, caplog: Any) -> None:
        """Lightning's IO, and a statement of what that means."""
        import fsspec

        saving = DurableCheckpoint(every=1, dirpath="memory://runs")
        trainer = build_trainer(callbacks=[saving], enable_checkpointing=True)
        with caplog.at_level("INFO", "lightning.pytorch"):
            trainer.fit(ToyU(), ListLoader([window([0])] * 2))
        assert "that storage's promise" in caplog.text
        assert sorted(fsspec.filesystem("memory").glob("/runs/*.ckpt"))
        again = build_trainer(max_steps=3)
        again.strategy.checkpoint_io = DurableCheckpointIO()
        again.fit(ToyU(), ListLoader([window([0])] * 3), ckpt_path="memory://runs/update-000002.ckpt")
        assert again.global_step == 3


def test_the_format_is_checked(folder: Path) -> None:
    """A manifest of a later version is none that can be trusted."""
    path = folder / "update-000030.ckpt.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    assert newest_valid(folder).update == 20
