"""Text files read in pieces."""

from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andrea_pl import TextSource, UserError
from andrea_pl.data.sources import plain_text
from andrea_pl.data.sources.documents import Problems

pytestmark = pytest.mark.filterwarnings("ignore:the text gave")


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is long, and read a few bytes at a time."""
    monkeypatch.setattr(plain_text, "HELD", 5)
    monkeypatch.setattr(plain_text, "READ_BYTES", 3)


def read(
    path: Path, separator: str | None = None, policy: Any = "raise"
) -> tuple[list[tuple[Any, ...]], Problems]:
    problems = Problems(policy)
    source = TextSource(name="s", paths=[str(path)], document_separator=separator)
    found = []
    for document in source.read(problems):
        mark, size = document.digest, document.size
        text = "".join(document.parts())
        assert size == len(text.encode())
        found.append((text, document.line, mark))
    return found, problems


def plainly(raw: bytes, separator: str | None) -> list[tuple[str, int, int]]:
    """Read a file the plain way: all at once."""
    text = raw.replace(b"\r\n", b"\n").decode().removeprefix("\ufeff")
    found, line = [], 1
    for piece in text.split(separator) if separator else [text]:
        if piece.strip():
            mark = int.from_bytes(blake2b(piece.encode(), digest_size=8).digest(), "big")
            found.append((piece, line, mark))
        line += piece.count("\n") + (separator or "").count("\n")
    return found


FILE = st.lists(
    st.sampled_from(["a", "é", "中", "😀", "\x00", "\ufeff", "\r", "\r\n", "\n", "-", "--", "---", " "]),
    min_size=1,
)


@pytest.mark.system
@given(text=FILE.map("".join), separator=st.sampled_from([None, "---", "\n\n", "-", "a-a"]))
@settings(max_examples=200)
def test_files_read_in_pieces(small_reads: None, tmp_path: Path, text: str, separator: str | None) -> None:
    """Line ends, marks, characters and separators across the borders of what is read at once."""
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    if not text.replace("\r\n", "\n").removeprefix("\ufeff").strip():
        with pytest.raises(UserError, match=r"a\.txt: empty file"):
            read(path, separator)
        return
    assert read(path, separator)[0] == plainly(text.encode(), separator)


@given(
    before=FILE.map("".join).filter(lambda text: "\0" not in text),  # that is called binary
    bad=st.sampled_from([b"\xff", b"\xe4\xb8", b"\xf0\x9f\x98", b"\xc3("]),
    after=st.sampled_from([b"", b"abcdefg\n"]),
)
@settings(max_examples=100)
def test_bytes_that_are_not_utf8_in_pieces(
    small_reads: None, tmp_path: Path, before: str, bad: bytes, after: bytes
) -> None:
    """No document of such a file is used, and the line is that of the first bad byte."""
    path = tmp_path / "a.txt"
    path.write_bytes(before.encode() + bad + after)
    line = 1 + before.replace("\r\n", "\n").count("\n")
    found, problems = read(path, "-", "skip")
    assert found == []
    assert problems.messages == [f"{path}:{line}: not UTF-8 (byte 0x{bad[0]:02x})"]


def test_a_file_that_changes_while_it_is_read(small_reads: None, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a long document, and more " * 10_000)
    documents = TextSource(name="s", paths=[str(path)]).read(Problems("raise"))
    document = next(documents)
    path.write_text("short")
    with pytest.raises(UserError, match=r"a\.txt changed while it was read"):
        list(chain(document.parts(), documents))
