"""Every shipped configuration: parsed, commented key by key, and run for an update."""

import re
from pathlib import Path

import pytest

from commands import andrea

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
SHORT = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "0", "--data.sequences_per_update", "2"]
TOPICS = ["--data.sources", '[{"name": "topics", "kind": "python", "part": "topics"}]']


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
    [("andrea-12m", 12.4e6), ("andrea-120m", 97.9e6), ("local", 1.97e6), ("overfit", 10.4e3)],
)
def test_runs_and_says_its_size(name: str, parameters: float) -> None:
    path = next(each for each in CONFIGS if each.stem == name)
    source = [] if name == "overfit" else TOPICS
    warmup = ["--model.warmup_updates", "0", "--trainer.enable_checkpointing", "false"]
    result = andrea("fit", "--config", str(path), *SHORT, *source, *warmup)
    assert result.returncode == 0, result.stderr
    said = re.search(r"^parameters: ([\d,]+)$", result.stdout, re.MULTILINE)
    assert said
    assert int(said[1].replace(",", "")) == pytest.approx(parameters, rel=0.01)
