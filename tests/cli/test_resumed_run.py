"""The command: --resume, settings that differ, damaged checkpoints, and what is never let in."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from andrea_callbacks import read_journal
from andrea_pl.runs.checkpoint_io import DurableCheckpointIO
from andrea_pl.runs.manifest import newest_valid
from tests.support.checkpoints import DAMAGES, Evil
from tests.support.commands import andrea
from tests.support.configurations import EVIL, fit, longer, scalars

pytestmark = pytest.mark.system

RUN = Path("lightning_logs/version_0")
CHECKPOINTS = RUN / "checkpoints"


class TestResume:
    def test_goes_on_in_its_own_folder(self, saving: list[str]) -> None:
        """Curves and journal continue; each step is there once, and what is kept is the run's own."""
        fit(saving)
        kept = {name: (RUN / name).read_bytes() for name in ("config.yaml", "tokenizer.json")}
        said = fit(saving, "--resume", *longer())
        assert "resuming after update 6, from lightning_logs/version_0/checkpoints/" in said
        assert not Path("lightning_logs/version_1").exists()
        found = scalars(RUN)
        assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert [step for step, _ in found["val/loss"]] == [3, 6]
        assert {name: (RUN / name).read_bytes() for name in kept} == kept
        rows = read_journal(RUN / "journal.jsonl")
        assert [row["update"] for row in rows if row["kind"] == "update"] == list(range(1, 9))
        assert [row["resumed"] for row in rows if row["kind"] == "start"] == [False, True]

    def test_rows_of_an_epoch_that_ends_with_the_best(self, saving: list[str]) -> None:
        """Each once, though the file that is gone on from was saved at the end of an epoch."""
        ends = ["--trainer.check_val_every_n_epoch", "1", "--trainer.val_check_interval", "1.0"]
        fit(saving, *ends, "--trainer.max_steps", "-1", "--trainer.max_epochs", "1")
        longer_by_epochs = ["--trainer.max_steps", "-1", "--trainer.max_epochs", "2"]
        fit(saving, *ends, *longer_by_epochs, "--resume", "--allow_drift", "trainer")
        found = scalars(RUN)
        for tag in ("epoch/loss", "val/loss", "train/loss"):
            steps = [step for step, _ in found[tag]]
            assert len(set(steps)) == len(steps), tag

    def test_rows_after_the_checkpoint_are_made_again(self, saving: list[str]) -> None:
        """An older checkpoint is all that is left: what the curves had after it is not doubled."""
        fit(saving)
        before = scalars(RUN)
        for update in (6, 5, 4):
            for file in CHECKPOINTS.glob(f"*-{update:06d}.ckpt*"):
                file.unlink()
        said = fit(saving, "--resume")
        assert "resuming after update 3" in said
        after = scalars(RUN)
        assert {tag: rows for tag, rows in after.items() if "throughput" not in tag} == {
            tag: rows for tag, rows in before.items() if "throughput" not in tag
        }

    def test_the_newest_run_with_a_checkpoint(self, saving: list[str]) -> None:
        """A run that never came to one is passed over, and said so; a folder can be given."""
        fit(saving)
        fit(saving)
        Path("lightning_logs/version_2/checkpoints").mkdir(parents=True)
        said = fit(saving, "--resume", *longer())
        assert "passed over, without a checkpoint: lightning_logs/version_2" in said
        assert "from lightning_logs/version_1/checkpoints" in said
        assert "from lightning_logs/version_0/checkpoints" in fit(saving, "--resume", str(RUN), *longer())

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--resume"], "no run with a checkpoint is there to go on with"),
            (["--resume", "none"], "--resume none: no such folder"),
            (["--resume", "lightning_logs/version_0", "--ckpt_path", "a.ckpt"], "are not given both"),
            (["--resume", "."], "this configuration's runs are in"),
            (["--resume", "text.jsonl"], "--resume text.jsonl: a file; --ckpt_path takes that"),
            (["--allow_drift"], "--allow_drift needs a key"),
        ],
    )
    def test_nothing_to_go_on_with(self, saving: list[str], options: list[str], words: str) -> None:
        assert words in fit(saving, *options, code=1)

    def test_without_a_logger(self, saving: list[str]) -> None:
        quiet = ["--trainer.logger", "false"]
        fit(saving, *quiet)
        assert "resuming after update 6, from checkpoints/" in fit(saving, *quiet, "--resume", *longer())

    def test_a_csv_file_is_kept(self, saving: list[str]) -> None:
        """CSVLogger deletes its file when it opens it again; that is kept beside the new one."""
        logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}}
        Path("csv.yaml").write_text(yaml.safe_dump({"trainer": {"logger": logger}}))
        command = [*saving, "--config", "csv.yaml"]
        fit(command)
        folder = Path("logs/lightning_logs/version_0")
        before = (folder / "metrics.csv").read_text()
        fit(command, "--resume", *longer())
        assert (folder / "metrics-until-000006.csv").read_text() == before
        assert (folder / "metrics.csv").exists()

    def test_a_folder_of_its_own_for_checkpoints(self, saving: list[str]) -> None:
        path = Path(saving[-1])
        path.write_text(path.read_text().replace("every: 2", "every: 2\n      dirpath: kept"))
        fit(saving)
        said = fit(saving, "--resume", *longer())
        assert "from kept/" in said
        assert [step for step, _ in scalars(RUN)["train/loss"]] == [1, 2, 3, 4, 5, 6, 7, 8]


class TestDamage:
    @pytest.mark.parametrize("damage", ["half", "one bit", "a folder"])  # the others in test_checkpoint
    def test_falls_back_and_says_so(self, saving: list[str], damage: str) -> None:
        """The newest one damaged: the one before. All of them: an error, and no fresh start."""
        fit(saving)
        newest = newest_valid(CHECKPOINTS).path
        DAMAGES[damage](newest)
        said = fit(saving, "--resume")
        assert f"passed over: {newest}" in said
        assert "resuming after update 4" in said
        for file in CHECKPOINTS.glob("*.ckpt"):
            DAMAGES[damage](file)
        said = fit(saving, "--resume", code=1)
        assert "nothing is started afresh in its place" in said
        assert [each.name for each in Path("lightning_logs").iterdir()] == ["version_0"]

    def test_a_damaged_file_that_is_named(self, saving: list[str]) -> None:
        fit(saving)
        path = newest_valid(CHECKPOINTS).path
        DAMAGES["one bit"](path)
        for options in (["--ckpt_path", str(path)], ["--init_from", str(path)]):
            assert f"{path}: does not agree with its manifest" in fit(saving, *options, code=1)

    @pytest.mark.parametrize("place", ["/proc/andrea", "file/below"])
    def test_a_folder_that_cannot_be_written(self, saving: list[str], place: str) -> None:
        """An error before the first update."""
        Path("file").touch()
        path = Path(saving[-1])
        path.write_text(path.read_text().replace("every: 2", f"every: 2\n      dirpath: {place}"))
        said = fit(saving, code=1)
        assert f"{place}: checkpoints cannot be written there" in said
        journals = list(Path().rglob("journal.jsonl"))
        assert not journals


class TestClosedDoors:
    """A witness file is never made, and the message names the file or the key."""

    def evil(self, change: Any) -> str:
        """Write the newest checkpoint again with something in it; as an attacker would, with its manifest."""
        newest = newest_valid(CHECKPOINTS).path
        content = torch.load(newest, weights_only=True)
        DurableCheckpointIO().save_checkpoint(change(content), newest)
        return str(newest)

    def test_a_pickle(self, saving: list[str]) -> None:
        """In the state of a callback; at other places in test_checkpoint."""
        fit(saving)
        path = self.evil(lambda content: content["callbacks"].update(RunJournal=Evil()) or content)
        name = re.escape(path)
        for command in (
            [*saving, "--resume"],
            [*saving, "--ckpt_path", path],
            [*saving, "--init_from", path],
            ["validate", *saving[1:], "--ckpt_path", path],
            ["generate", "--ckpt_path", path],
            ["export", "--ckpt_path", path, "--output", "model"],
        ):
            assert re.search(rf"{name} is not a checkpoint that can be loaded", fit(command, code=1))
        assert not Path("witness").exists()

    def test_a_class_path_in_a_checkpoint(self, saving: list[str]) -> None:
        """CVE-2026-58659: hyper-parameters that name what is to be called. They are not looked at."""
        Path("evil.py").write_text(EVIL)
        fit(saving)
        path = self.evil(
            lambda content: (
                content
                | {
                    "hyper_parameters": {"_class_path": "evil.Thing", "_instantiator": "evil.Thing"},
                    "datamodule_hyper_parameters": {
                        "_class_path": "evil.Thing",
                        "_instantiator": "evil.Thing",
                    },
                    "hparams_name": "kwargs",
                }
            )
        )
        for command in (
            [*saving, "--resume", *longer()],
            ["validate", *saving[1:], "--ckpt_path", path],
            ["generate", "--ckpt_path", path, "--max_new_tokens", "2"],
        ):
            result = andrea(*command, PYTHONPATH=str(Path.cwd()))
            assert result.returncode == 0, result.stderr
        assert not Path("witness").exists()

    @pytest.mark.parametrize("option", ["--ckpt_path", "--init_from"])
    def test_nothing_is_fetched(self, saving: list[str], option: str) -> None:
        said = fit(saving, option, "https://example.com/a.ckpt", code=1)
        assert "https://example.com/a.ckpt: checkpoints are not fetched from the web" in said

    @pytest.mark.parametrize(
        ("name", "key"),
        [
            ("RunJournal", "name"),
            ("DurableCheckpoint", "name"),
            ("TensorBoardLogger", "version"),
            ("TensorBoardLogger", "name"),
            ("TensorBoardLogger", "sub_dir"),
            ("source", "name"),
        ],
    )
    def test_names_that_climb_are_refused(self, saving: list[str], name: str, key: str) -> None:
        path = Path(saving[-1])
        config: dict[str, Any] = yaml.safe_load(path.read_text())
        climbing = f"../../outside-{name}-{key}"
        if name == "source":
            config["data"]["sources"][0]["name"] = climbing
        elif name == "TensorBoardLogger":
            options = {"save_dir": "logs", key: climbing}
            config["trainer"]["logger"] = {
                "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                "init_args": options,
            }
        else:
            for each in config["trainer"]["callbacks"]:
                if each["class_path"].endswith(name):
                    each.setdefault("init_args", {})["name"] = climbing
        path.write_text(yaml.safe_dump(config))
        result = andrea(*saving)
        assert result.returncode in (1, 2)
        assert climbing in result.stderr
        assert key in result.stderr
        assert not list(Path.cwd().parent.rglob(f"outside-{name}-{key}*"))
