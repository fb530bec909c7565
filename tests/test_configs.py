"""Every shipped configuration: parsed, commented key by key, and run for an update."""

import re
from pathlib import Path

import pytest
import yaml

from tests.support.commands import ROOT, andrea
from tests.support.configurations import small_sources

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SHORT = [
    *("--trainer.max_steps", "1", "--trainer.limit_val_batches", "0"),
    *("--data.sequences_per_update", "2", "--data.block_size", "64"),
]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_has_its_comment(path: Path) -> None:
    """A key that takes a value is preceded, where it first appears, by a comment with its type."""
    seen: set[str] = set()
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        match = re.match(r"\s*(?:- )?([\w]+): +(?!\|)\S", line)
        if not match or match[1] in seen or match[1] in ("class_path", "name"):
            continue
        seen.add(match[1])
        comment = lines[number - 1].strip()
        assert comment.startswith("# "), f"{path.name}:{number + 1}: {line}"
        assert re.search(r"\((int|float|str|bool|list)\b.*\)", comment), f"{path.name}:{number}: {comment}"
    assert f"andrea fit --config configs/{path.name}" in path.read_text()


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("andrea-12m-v1", None),  # the same network as v2's, one block of which is enough
        ("andrea-12m-v2", 12.4e6),
        ("andrea-120m-v1", None),
        ("andrea-120m-v2", 97.9e6),
        ("andrea-mini-v1", 0.58e6),
        ("andrea-mini-v2", 0.58e6),
        ("local", 1.97e6),
        ("overfit", 10.4e3),
    ],
)
def test_runs_and_says_its_size(name: str, parameters: float | None) -> None:
    path = next(each for each in CONFIGS if each.stem == name)
    source = [] if name == "overfit" else small_sources(str(path))
    warmup = ["--model.warmup_updates", "0", "--trainer.enable_checkpointing", "false"]
    depth = ["--model.network.n_layers", "1"] if parameters is None else []
    result = andrea("fit", "--config", str(path), *SHORT, *source, *warmup, *depth)
    assert result.returncode == 0, result.stderr
    said = re.search(r"^parameters: ([\d,]+)$", result.stdout, re.MULTILINE)
    assert said
    if parameters is None:
        networks = [
            yaml.safe_load(each.read_text())["model"]["network"]
            for each in (path, path.with_name(path.name.replace("v1", "v2")))
        ]
        assert networks[0] == networks[1]
    else:
        assert int(said[1].replace(",", "")) == pytest.approx(parameters, rel=0.01)
