"""Reading sources: every kind, every fault."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from andrea_pl import TextSource, UserError
from andrea_pl.data.sources.documents import Problems
from tests.support.texts import read


def test_files_folders_and_globs(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in {"a.txt": "A", "b.md": "B", "sub/c.rst": "C", "sub/ignored.png": "x"}.items():
        (tmp_path / name).write_text(text)
    assert read([tmp_path])[0] == ["A", "B", "C"]
    assert read([tmp_path / "a.txt", tmp_path / "sub"])[0] == ["A", "C"]
    assert read([f"{tmp_path}/*.md"])[0] == ["B"]
    assert read([f"{tmp_path}/**/*.rst"])[0] == ["C"]


def test_separator(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n---\ntwo\n---\n\n---\n")
    source = TextSource(name="s", paths=[str(tmp_path / "a.txt")], document_separator="---\n")
    found = [(document.text, document.line) for document in source.read(Problems("raise"))]
    assert found == [("one\n", 1), ("two\n", 3)]


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhi")
    assert read([tmp_path / "a.txt"])[0] == ["hi"]


RECORDS: list[tuple[dict[str, Any], str]] = [
    ({"text": "plain"}, "plain"),
    ({"question": "Why?", "answer": "So."}, "Question: Why?\nAnswer: So.\n"),
    (
        {"messages": [{"role": "user", "content": "hi"}, {"role": "bot", "content": "ho"}]},
        "user: hi\nbot: ho\n",
    ),
]


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(record) for record, _ in RECORDS) + "\n\n")
    assert read([path])[0] == [text for _, text in RECORDS]


def test_marks_and_line_ends_of_windows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hi"}\r\n')
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\n\r\ntwo")
    assert read([tmp_path / "a.jsonl"])[0] == ["hi"]
    assert read([tmp_path / "a.txt"], document_separator="\n\n\n")[0] == ["one", "two"]


def test_token_files_among_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.bin").write_bytes(b"ab")
    with pytest.raises(UserError, match=r"mixes \.bin token files and text"):
        _ = TextSource(name="s", paths=[str(tmp_path)]).is_token_file
    (tmp_path / "a.txt").unlink()
    assert TextSource(name="s", paths=[str(tmp_path)]).is_token_file


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", "two"]}), path)
    assert read([path])[0] == ["one", "two"]


FAULTS = {
    "empty.txt": (b"", r"empty\.txt: empty file"),
    "blank.txt": (b" \n ", r"blank\.txt: empty file"),
    "latin.txt": (b"ab\ncaf\xe9", r"latin\.txt:2: not UTF-8 \(byte 0xe9\)"),
    "empty.jsonl": (b"\n", r"empty\.jsonl: empty file"),
    "broken.jsonl": (b'{"text": "a"}\n{"text": ', r"broken\.jsonl:2: broken JSON"),
    "latin.jsonl": (b'{"text": "caf\xe9"}', r"latin\.jsonl:1: not UTF-8"),
    "key.jsonl": (b'{"body": "a"}', r"key\.jsonl:1: missing key \(found: body\)"),
    "list.jsonl": (b"[1]", r"list\.jsonl:1: a list where an object is expected"),
    "number.jsonl": (b'{"text": 3}', r"number\.jsonl:1: a value that should be a string"),
    "turn.jsonl": (b'{"messages": [{"role": "user"}]}', r"turn\.jsonl:1: a value that should be a string"),
    "hollow.jsonl": (b'{"text": " "}', r"hollow\.jsonl:1: empty text"),
    "half.jsonl": (b'{"text": "\\ud800"}', r"half\.jsonl:1: half a surrogate pair"),
    "digits.jsonl": (b'{"text": ' + b"9" * 5000 + b"}", r"digits\.jsonl:1: broken JSON"),
    "deep.jsonl": (b"[" * 100_000, r"deep\.jsonl:1: broken JSON"),
    "broken.parquet": (b"PAR1 is not enough", r"broken\.parquet:1: broken parquet"),
    "empty.parquet": (b"", r"empty\.parquet: empty file"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_name_file_line_and_remedy(tmp_path: Path, name: str) -> None:
    content, message = FAULTS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message + ".*; .*`on_error` to skip"):
        read([tmp_path / name])


def test_skipping_counts(tmp_path: Path) -> None:
    for name, (content, _) in FAULTS.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_text("good")
    texts, problems = read([tmp_path], policy="skip")
    assert texts == ["a", "good"]
    assert len(problems) == len(FAULTS)


@pytest.mark.parametrize("path", ["missing.txt", "*.none", "folder"])
def test_nothing_matched(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=f"nothing matches '.*{path[-5:]}'"):
        read([tmp_path / path])


def test_unknown_kind(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(UserError, match=r"a\.pdf has no known kind"):
        read([tmp_path / "a.pdf"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a/b", "paths": ["x"]}, "source name 'a/b'"),
        ({"name": "", "paths": ["x"]}, "source name"),
        ({"name": "a"}, "has no paths"),
        ({"name": "a", "kind": "python", "paths": ["x"]}, "reads no paths"),
        ({"name": "a", "kind": "tokens"}, "has no documents"),
        ({"name": "a", "paths": ["x"], "document_separator": ""}, "document_separator"),
    ],
)
def test_refused_sources(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TextSource(**options)
