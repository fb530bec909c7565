"""A folder of checkpoints: what is swept, kept and removed."""

from pathlib import Path
from typing import Any

import pytest

from andrea_callbacks.numerics.atomic_write import remove_temporaries
from andrea_pl import DurableCheckpoint, DurableCheckpointIO, UserError
from andrea_pl.runs.manifest import newest_valid, sweep
from tests.support.toy import ListLoader, ToyU, build_trainer, window


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

    @pytest.mark.guarantee("no save tears a checkpoint")
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
