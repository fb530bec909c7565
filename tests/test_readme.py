"""What the README shows is true: its Python runs, its commands and configurations exist."""

import re
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from andrea_callbacks import RunEvent, publish_event
from andrea_pl import (
    Curriculum,
    LanguageModule,
    RoPELanguageModel,
    TextDataModule,
    TextSource,
    TransformerConfig,
    Ucb1,
)
from tests.support.commands import ROOT, run_python
from tests.support.projects import everything
from tests.support.toy import build_trainer

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.system
@pytest.mark.parametrize("number", range(2))
def test_python_runs(number: int) -> None:
    done = run_python(f"import warnings; warnings.simplefilter('ignore')\n{blocks('python')[number]}")
    assert done.returncode == 0, done.stderr
    if number == 0:
        assert "in 3 updates" in done.stderr


def test_two_commands() -> None:
    commands = blocks("bash")
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv .venv && ") for command in commands)
    for path in re.findall(r"(configs/[\w.-]+\.yaml|constraints\.txt)", README):
        assert (ROOT / path).exists()


def test_sources_of_the_yaml() -> None:
    first, second = (yaml.safe_load(block)["data"] for block in blocks("yaml"))
    for source in (*first["sources"], *second["sources"]):
        TextSource(**source)
    mixture = second["curriculum"].pop("mixture")
    assert mixture.pop("class_path") == "andrea_pl.Ucb1"
    Curriculum(mixture=Ucb1(**mixture["init_args"]), **second["curriculum"])


def test_parameters_of_the_table() -> None:
    units = {"thousand": 1e3, "million": 1e6}
    rows = re.findall(r"`(configs/[\w.-]+)`(?:, `-v1`)? \| ([\d.]+) (thousand|million)", README)
    assert len(rows) == 6
    for path, number, unit in rows:
        config = yaml.safe_load((ROOT / path).read_text())
        shape = TransformerConfig(
            vocab_size=config["data"]["vocab_size"],
            block_size=config["data"]["block_size"],
            **config["model"]["network"],
        )
        import torch

        with torch.device("meta"):
            count = RoPELanguageModel(shape).count_parameters()
        assert count / units[unit] == pytest.approx(float(number), rel=0.06)


def glossary() -> list[str]:
    """Return the scalars of the glossary as patterns; `/x` and `_x` continue the name before them."""
    names: list[str] = []
    rows = README.split("| scalar | meaning |")[1].split("\n\n")[0].splitlines()[2:]
    for row in rows:
        for name in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
            head = names[-1] if names else ""
            if name.startswith("/"):
                name = head.rpartition("/")[0] + name
            elif name.startswith("_"):
                name = head.rpartition("_")[0] + name
            names.append(name)
    return names


@pytest.mark.system
@pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning")
def test_glossary_has_every_scalar(tmp_path: Path) -> None:
    """Whatever the callbacks and the module wrote in a run with everything on stands in the table."""
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    documents = [[1 + (number * place) % 30 for place in range(1, 12)] for number in range(80)]
    data = TextDataModule(
        [
            TextSource(name="t", kind="tokens", documents=documents[:40]),
            TextSource(name="u", kind="tokens", documents=documents[40:70]),
            TextSource(name="v", kind="tokens", documents=documents[70:], split="val"),
        ],
        curriculum=Curriculum(mixture=Ucb1(), min_clip_coefficient=0.0, updates_per_epoch=70),
        vocab_size=32,
        block_size=8,
        sequences_per_update=2,
        val_fraction=0,
    )
    shape = TransformerConfig(vocab_size=32, block_size=8, d_model=8, n_heads=2, n_layers=1)

    class Spike(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            details = {"norm": 9.0, "clip_threshold": 1.0}
            publish_event(trainer, RunEvent(kind="spike", update=3, message="", details=details))

    trainer = build_trainer(callbacks=[*everything(), Spike()], logger=logger, max_epochs=1)
    trainer.fit(LanguageModule(shape, lr=1e-3), datamodule=data)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    patterns = [re.compile(re.sub(r"<\w+>|…", ".+", name)) for name in glossary()]
    written = set(events.Tags()["scalars"]) - {"epoch", "hp_metric"}
    assert len(written) > 45
    unexplained = {name for name in written if not any(pattern.fullmatch(name) for pattern in patterns)}
    assert unexplained == set()
    unwritten = {
        pattern.pattern for pattern in patterns if not any(pattern.fullmatch(name) for name in written)
    }
    needs_more = {"coherence/words", "test/.+", "train/loss_scale", "val/bits_per_byte"}  # text, a scaler
    needs_more |= {"val/.+/bits_per_byte"}
    assert unwritten == needs_more
