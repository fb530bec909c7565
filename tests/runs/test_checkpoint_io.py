"""Checkpoint files: verified, passed over, swept, locked, and never unpickled."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from andrea_callbacks.numerics.atomic_write import replace_durably, write_all
from andrea_pl import DurableCheckpointIO, UserError
from andrea_pl.runs.checkpoint_io import read_checkpoint
from andrea_pl.runs.manifest import fault_of, manifest_path, move_aside, newest_valid
from tests.support.checkpoints import Evil, checkpoint
from tests.support.commands import run_python
from tests.support.toy import ListLoader, ToyU, build_trainer, window


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

    @pytest.mark.guarantee("no save tears a checkpoint")
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

    @pytest.mark.system
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

    @pytest.mark.guarantee("no save tears a checkpoint")
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

    @pytest.mark.system
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


class TestClosedDoors:
    @pytest.mark.parametrize("place", ["all of it", "callbacks", "hyper_parameters", "loops"])
    @pytest.mark.guarantee("checkpoints are never unpickled")
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

    @pytest.mark.guarantee("checkpoints are never unpickled")
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


def test_the_format_is_checked(folder: Path) -> None:
    """A manifest of a later version is none that can be trusted."""
    path = folder / "update-000030.ckpt.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    assert newest_valid(folder).update == 20
