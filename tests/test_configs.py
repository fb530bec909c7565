"""Every shipped configuration: parsed, commented key by key, and run for an update."""

import json
import re
from pathlib import Path

import pytest
import yaml

from commands import andrea

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
SHORT = [
    *("--trainer.max_steps", "1", "--trainer.limit_val_batches", "0"),
    *("--data.sequences_per_update", "2", "--data.block_size", "64"),
]


def python_sources(config: str) -> list[str]:
    """Return a flag that gives the configuration's sources a small text that is on every machine."""
    given = yaml.safe_load(Path(config).read_text())["data"]["sources"]
    sources = [{**source, "kind": "python", "part": "topics", "paths": []} for source in given]
    return ["--data.sources", json.dumps(sources)]


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
        ("andrea-12m-v1", 12.4e6),
        ("andrea-12m-v2", 12.4e6),
        ("andrea-120m-v1", 97.9e6),
        ("andrea-120m-v2", 97.9e6),
        ("andrea-mini-v1", 0.58e6),
        ("andrea-mini-v2", 0.58e6),
        ("local", 1.97e6),
        ("overfit", 10.4e3),
    ],
)
def test_runs_and_says_its_size(name: str, parameters: float) -> None:
    path = next(each for each in CONFIGS if each.stem == name)
    source = [] if name == "overfit" else python_sources(str(path))
    warmup = ["--model.warmup_updates", "0", "--trainer.enable_checkpointing", "false"]
    result = andrea("fit", "--config", str(path), *SHORT, *source, *warmup)
    assert result.returncode == 0, result.stderr
    said = re.search(r"^parameters: ([\d,]+)$", result.stdout, re.MULTILINE)
    assert said
    assert int(said[1].replace(",", "")) == pytest.approx(parameters, rel=0.01)
