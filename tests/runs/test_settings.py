"""Settings that differ from those of the run that is resumed."""

import shutil
from pathlib import Path

import pytest
import torch

from andrea_pl.runs.manifest import newest_valid
from tests.support.commands import andrea
from tests.support.configurations import fit, longer, scalars

pytestmark = pytest.mark.system

RUN = Path("lightning_logs/version_0")


CHECKPOINTS = RUN / "checkpoints"


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
