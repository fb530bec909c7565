"""What the README shows is true: its Python runs, its commands and configurations exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from andrea_pl import RoPELanguageModel, TextSource, TransformerConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.system
@pytest.mark.parametrize("number", range(2))
def test_python_runs(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", blocks("python")[number]],
        capture_output=True,
        text=True,
        check=False,
    )
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
    for source in yaml.safe_load(blocks("yaml")[0])["data"]["sources"]:
        TextSource(**source)


def test_parameters_of_the_table() -> None:
    units = {"thousand": 1e3, "million": 1e6}
    rows = re.findall(r"`(configs/[\w.-]+)` \| ([\d.]+) (thousand|million)", README)
    assert len(rows) == 4
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
