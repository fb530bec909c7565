"""The stock LightningCLI, with nothing linked: every shipped configuration as it stands."""

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from andrea_pl import LanguageModule, TextDataModule
from tests.support.configurations import small_sources
from tests.test_configs import CONFIGS

pytestmark = [
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`warmup_updates`"),
    pytest.mark.filterwarnings("ignore:.*Experiment logs directory"),
]

SMALL = [
    *("--trainer.max_steps", "2", "--trainer.enable_progress_bar", "false"),
    *("--trainer.enable_model_summary", "false", "--trainer.enable_checkpointing", "false"),
    *("--data.sequences_per_update", "2", "--data.vocab_size", "300", "--data.block_size", "64"),
    *("--model.network.n_layers", "1", "--model.network.d_model", "24", "--model.network.n_heads", "2"),
    *("--model.warmup_updates", "0"),
]


def stock(*arguments: str) -> LightningCLI:
    return LightningCLI(LanguageModule, TextDataModule, args=list(arguments))


def tiny(path: Path) -> list[str]:
    """Return flags that make a run of a configuration short; its text is a few token ids."""
    rows = [[1 + number, 2, 3, 4, 5 + number] for number in range(8)]
    sources = [
        {"name": each["name"], "kind": "tokens", "documents": rows}
        for each in json.loads(small_sources(str(path))[1])
    ]
    held_out = {"name": "held-out", "kind": "tokens", "documents": [[1, 2, 3], [4, 5]], "split": "val"}
    return [*SMALL, "--data.sources=[]", f"--data.sources={json.dumps([*sources, held_out])}"]


@pytest.mark.system
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_fits(path: Path) -> None:
    """Issue 27: "the following arguments are required: fit.model.network.vocab_size"."""
    cli = stock("fit", "--config", str(path), *tiny(path))
    assert cli.trainer.global_step == 2
    assert (cli.model.network.config.vocab_size, cli.model.network.config.block_size) == (300, 64)
    if path.stem != "local":
        return
    cli.trainer.save_checkpoint("a.ckpt")
    weights = cli.model.state_dict()
    again = stock("validate", "--config", str(path), *tiny(path), "--ckpt_path", "a.ckpt")
    loaded = again.model.state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert "val/loss" in again.trainer.callback_metrics
