"""The command: --resume, settings that differ, damaged checkpoints, and what is never let in."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from andrea_callbacks import read_journal
from andrea_pl.checkpoint import DurableCheckpointIO, newest_valid
from commands import andrea
from test_checkpoint import DAMAGES, Evil
from test_command import EVIL, scalars, tiny

pytestmark = pytest.mark.system
assert tiny  # a fixture

RUN = Path("lightning_logs/version_0")
CHECKPOINTS = RUN / "checkpoints"


@pytest.fixture
def saving(tiny: Path) -> list[str]:
    """Return the command of a run that saves every two updates, of which validation comes at two."""
    config: dict[str, Any] = yaml.safe_load(tiny.read_text())
    config["trainer"]["callbacks"] = [
        {"class_path": "andrea_callbacks.RunJournal"},
        {
            "class_path": "andrea_pl.DurableCheckpoint",
            "init_args": {"every": 2, "monitor": "val/loss", "keep": 3},
        },
    ]
    tiny.write_text(yaml.safe_dump(config))
    return ["fit", "--config", str(tiny)]


def fit(command: list[str], *options: str, code: int = 0) -> str:
    """Run and return what is said."""
    result = andrea(*command, *options)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def longer(steps: int = 8) -> list[str]:
    return ["--trainer.max_steps", str(steps), "--allow_drift", "trainer.max_steps"]


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


class TestDrift:
    """Lightning#20310, #20801: flags beat the checkpoint, or the difference stops the run with both."""

    @pytest.mark.parametrize("how", ["--resume", "--ckpt_path"])
    def test_a_difference_stops_the_run(self, saving: list[str], how: str) -> None:
        fit(saving)
        given = [how] if how == "--resume" else [how, str(newest_valid(CHECKPOINTS).path)]
        said = fit(saving, *given, "--model.lr", "0.02", "--trainer.max_steps", "9", code=1)
        assert "model.lr: checkpoint 0.01, here 0.02" in said
        assert "trainer.max_steps: checkpoint 6, here 9" in said
        assert "--allow_drift model.lr --allow_drift trainer.max_steps" in said
        assert [step for step, _ in scalars(RUN)["train/loss"]] == [1, 2, 3, 4, 5, 6]

    def test_what_is_allowed_is_heeded(self, saving: list[str]) -> None:
        """The flag's rate, decay and betas are used, not those in the optimizer's state."""
        fit(saving, "--model.schedule", "constant")
        flags = ["--model.schedule", "constant", "--model.lr", "0.02", "--model.betas", "[0.5,0.6]"]
        flags += ["--model.weight_decay", "0.5", "--allow_drift", "model", *longer()]
        said = fit(saving, "--resume", *flags)
        assert "lr is 0.02, and was 0.01" in said
        assert "goes on with other settings, as allowed: model.betas.0: checkpoint 0.9, here 0.5" in said or (
            "model.betas: checkpoint [0.9, 0.999], here [0.5, 0.6]" in said
        )
        rates = [value for _, value in scalars(RUN)["train/lr"]]
        assert rates == pytest.approx([0.01] * 6 + [0.02] * 2)
        groups = torch.load(newest_valid(CHECKPOINTS).path, weights_only=True)["optimizer_states"][0]
        assert [group["betas"] for group in groups["param_groups"]] == [(0.5, 0.6)] * 2
        assert [group["weight_decay"] for group in groups["param_groups"]] == [0.5, 0.0]

    def test_a_schedule_cannot_drift(self, saving: list[str]) -> None:
        fit(saving)
        said = fit(saving, "--resume", "--model.schedule", "constant", "--allow_drift", "model", code=1)
        assert "which a resume cannot change: model.schedule: checkpoint 'cosine', here 'constant';" in said

    def test_what_is_allowed_is_not_complained_of(self, saving: list[str]) -> None:
        fit(saving)
        flags = ["--model.lr", "0.02", "--model.max_norm", "0.5", "--allow_drift", "model.lr,data.seed"]
        said = fit(saving, "--resume", *flags, code=1)
        assert "other settings: model.max_norm: checkpoint 1.0, here 0.5. Put them back" in said

    def test_a_text_of_the_same_lengths_is_another(self, saving: list[str]) -> None:
        fit(saving)
        text = Path("text.jsonl")
        text.write_text(text.read_text().replace("says 25 and", "says 52 and"))
        kept = "lines: 1 document new, 1 gone; this run keeps the text it started with"
        assert kept in fit(saving, "--resume", *longer())

    def test_a_text_that_is_gone(self, saving: list[str]) -> None:
        """The prepared text is enough; without it the run is refused before anything is restored."""
        fit(saving)
        Path("text.jsonl").rename("elsewhere.jsonl")
        said = fit(saving, "--resume", *longer())
        assert "lines: cannot be read any more" in said
        assert "this run keeps the text it started with" in said
        shutil.rmtree("cache")
        said = fit(saving, "--resume", *longer(10), code=1)
        assert "needs the text that its run began with, and that is gone from" in said
        assert "Restoring states" not in said

    def test_a_mistyped_key(self, saving: list[str]) -> None:
        fit(saving)
        said = fit(saving, "--resume", "--model.lr", "1", "--allow_drift", "model.lrr", code=1)
        assert "--allow_drift model.lrr: there is no such setting" in said
        assert "--allow_drift model.lr" in said

    def test_the_same_command_twice_after_an_allowed_drift(self, saving: list[str]) -> None:
        """What was allowed may be no difference any more."""
        fit(saving)
        without = ["--trainer.callbacks", "[]", "--allow_drift", "trainer.callbacks", *longer()]
        for _ in range(2):
            fit(saving, "--resume", *without)

    def test_what_decides_nothing_may_differ(self, saving: list[str]) -> None:
        fit(saving)
        free = [
            "--data.num_workers",
            "1",
            "--trainer.enable_progress_bar",
            "true",
            "--data.cache_dir",
            "other",
        ]
        fit(saving, "--resume", *free)

    def test_validate_takes_the_configuration_of_a_fine_tuned_run(self, saving: list[str]) -> None:
        fit(saving)
        path = str(newest_valid(CHECKPOINTS).path)
        fit(saving, "--init_from", path)
        result = andrea("validate", "--config", "lightning_logs/version_1/config.yaml", "--ckpt_path", path)
        assert result.returncode == 0, result.stderr


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
