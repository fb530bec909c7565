"""Configurations of the command, and what a run by one leaves behind."""

import json
import re
import subprocess
from pathlib import Path

import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.commands import ROOT, andrea

TINY = """
seed_everything: 1
trainer:
  accelerator: cpu
  max_steps: 6
  val_check_interval: 3
  check_val_every_n_epoch: null
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: .
data:
  sources:
    - name: lines
      paths: [{path}]
  vocab_size: 300
  block_size: 32
  sequences_per_update: 8
  val_fraction: 0.2
  cache_dir: cache
model:
  network: {{d_model: 16, n_heads: 2, n_layers: 1}}
  lr: 1.0e-2
"""


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read all scalars of an event file back."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def log_folder(result: subprocess.CompletedProcess[str]) -> Path:
    """Return where a fit said that its logs are."""
    said = re.search(r"^logs: (\S+)", result.stderr, re.MULTILINE)
    assert said, result.stderr
    return Path(said[1])


EVIL = "import pathlib; pathlib.Path('witness').touch()\n\nclass Thing:\n    pass\n"


def small_sources(config: str) -> list[str]:
    """Return a flag that gives the configuration's sources a few token ids, which need no preparation."""
    given = yaml.safe_load(Path(config).read_text())["data"]["sources"]
    rows = [[1, 2, 3 + number] for number in range(4)]  # the parser takes its time over long lists
    kept = ("name", "floor", "max_epochs")
    sources = [
        {**{key: source[key] for key in kept if key in source}, "kind": "tokens", "documents": rows}
        for source in given
    ]
    return ["--data.sources", json.dumps(sources)]


CONFIGS = ROOT / "configs"


def fit(command: list[str], *options: str, code: int = 0) -> str:
    """Run and return what is said."""
    result = andrea(*command, *options)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def longer(steps: int = 8) -> list[str]:
    return ["--trainer.max_steps", str(steps), "--allow_drift", "trainer.max_steps"]
