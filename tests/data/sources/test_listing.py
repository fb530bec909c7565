"""Sources are looked up once."""

import json
from pathlib import Path

import pytest

from andrea_pl import TextDataModule, TextSource
from andrea_pl.data.sources import documents
from tests.support.answers import write_tiny
from tests.support.commands import run_python

pytestmark = pytest.mark.system


def test_a_start_lists_each_source_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing to prepare, where it was 9 times."""
    Path("text.txt").write_text("\n".join(f"line {n} and {n * n}" for n in range(20)))
    looked_up: list[str] = []
    find = documents.find_files

    def counted(source: str, *rest: str) -> list[Path]:
        looked_up.append(source)
        return find(source, *rest)

    monkeypatch.setattr(documents, "find_files", counted)
    counts = []
    for _ in range(2):
        sources = [
            TextSource(name=name, paths=["text.txt"], document_separator="\n") for name in ("one", "two")
        ]
        data = TextDataModule(sources, vocab_size=280, cache_dir="cache", val_fraction=0.0)
        looked_up.clear()
        data.prepare_data()
        data.setup()
        counts.append({name: looked_up.count(name) for name in ("one", "two")})
    assert counts[1] == {"one": 1, "two": 1}


LISTINGS = """
import json, sys
from andrea_pl.cli.main import main
from andrea_pl.data.sources import documents
looked_up = []
find = documents.find_files
documents.find_files = lambda source, *rest: looked_up.append(source) or find(source, *rest)
sys.argv = ["andrea"]
for _ in range(2):
    looked_up.clear()
    assert main(["fit", "--config", "tiny.yaml"]) == 0
print(json.dumps(looked_up))
"""


def test_the_command_lists_each_source_once() -> None:
    write_tiny()
    result = run_python(LISTINGS)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == ["lines"]
