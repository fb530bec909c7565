"""Reads text files of any size as documents in bounded memory.

A file of up to `HELD` bytes is read at once. A larger file is read twice: first to check it to the end, so
that a file with a fault gives no document at all, and to hash long documents; then to yield its documents,
long ones as a stream.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from andrea_pl.data.sources.files import open_bytes, shown
from andrea_pl.data.sources.records import AnyDocument, Document, LongDocument, digest_of_parts
from andrea_pl.errors import UserError

if TYPE_CHECKING:
    from andrea_pl.data.sources.documents import Problems

HELD = 1 << 23
"""Maximum number of bytes of a file, and of characters of a document, in memory at once."""
READ_BYTES = 1 << 20


def normalized_separator(separator: str) -> str:
    r"""Return a separator with \r\n changed to \n, as in the text."""
    return separator.replace("\r\n", "\n")


def read_text_file(file: Path, separator: str | None, problems: "Problems") -> Iterator[AnyDocument]:
    r"""Yield the documents of one UTF-8 file; \r\n becomes \n, and a byte order mark is dropped.

    Args:
        file: The file.
        separator: Cuts the file into documents; without it the file is one document.
        problems: Receives reports of files that are empty or not UTF-8.

    Raises:
        UserError: If the file changes between the two readings.
    """
    separator = None if separator is None else normalized_separator(separator)
    with open_bytes(file) as stream:
        head = stream.read(HELD + 1)
    is_held = len(head) <= HELD
    chunks: Callable[[], Iterable[bytes]] = (lambda: [head]) if is_held else (lambda: _read(file))
    try:
        survey = _survey(_decoded(chunks()), separator)
    except _NotUtf8Error as fault:
        remedy = "convert the file, for example with iconv"
        problems.report(f"{shown(file)}:{fault.line}", f"not UTF-8 (byte 0x{fault.byte:02x})", remedy)
        return
    if survey.is_blank:
        problems.report(shown(file), "empty file", "remove it")
        return
    problems.found_separator |= survey.ends > 1
    try:
        yield from _documents(file, _decoded(chunks()), separator, survey.long)
    except (_NotUtf8Error, _ChangedError) as fault:
        raise UserError(f"{shown(file)} changed while it was read; run the command again") from fault


class _NotUtf8Error(Exception):
    """A byte is not valid UTF-8.

    Args:
        line: Its line, from 1.
        byte: Its value.
    """

    def __init__(self, line: int, byte: int) -> None:
        super().__init__(line, byte)
        self.line = line
        self.byte = byte


class _ChangedError(Exception):
    """A file has changed at its second reading."""


@dataclass(slots=True)
class _Survey:
    """The result of a file's first reading."""

    is_blank: bool = True
    ends: int = 0
    long: list["_Long"] = field(default_factory=list["_Long"])


@dataclass(slots=True)
class _Long:
    """Facts about a long document before it is yielded."""

    digest: int
    size: int
    is_blank: bool


def _read(file: Path) -> Iterator[bytes]:
    with open_bytes(file) as stream:
        while chunk := stream.read(READ_BYTES):
            yield chunk


def _unix_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    r"""Replace \r\n by \n, also if a chunk ends between the two."""
    held = b""
    for chunk in chunks:
        joined = held + chunk
        held = b"\r" if joined.endswith(b"\r") else b""
        yield joined.removesuffix(held).replace(b"\r\n", b"\n")
    yield held


def _decoded(chunks: Iterable[bytes]) -> Iterator[str]:
    """Decode the chunks of a file, without its byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, is_first = 1, True
    for chunk, is_last in chain(((each, False) for each in _unix_lines(chunks)), [(b"", True)]):
        try:
            text = decoder.decode(chunk, is_last)
        except UnicodeDecodeError as error:
            before = error.object[: error.start]
            raise _NotUtf8Error(line + before.count(b"\n"), error.object[error.start]) from error
        line += chunk.count(b"\n")
        if is_first and text:
            text, is_first = text.removeprefix("\ufeff"), False
        yield text


def _segments(chunks: Iterable[str], separator: str | None) -> Iterator[tuple[str, bool]]:
    """Yield the text without separators, each part with whether its document ends after it."""
    held = ""
    for chunk in chunks:
        if separator is None:
            yield chunk, False
            continue
        *whole, rest = (held + chunk).split(separator)
        yield from ((part, True) for part in whole)
        cut = max(len(rest) - len(separator) + 1, 0)  # what follows may be the start of a separator
        yield rest[:cut], False
        held = rest[cut:]
    yield held, True


def _groups(segments: Iterator[tuple[str, bool]]) -> Iterator[str | Iterator[str]]:
    """Yield each document as a string, or as a stream of its parts where it is long."""
    parts: list[str] = []
    length = 0
    for part, is_end in segments:
        parts.append(part)
        length += len(part)
        if is_end:
            yield "".join(parts)
        elif length > HELD:
            stream = chain(parts, _until_end(segments))
            yield stream
            _exhaust(stream)
        else:
            continue
        parts, length = [], 0


def _until_end(segments: Iterator[tuple[str, bool]]) -> Iterator[str]:
    for part, is_end in segments:
        yield part
        if is_end:
            return


def _exhaust(stream: Iterator[str]) -> None:
    for _ in stream:
        pass


def _survey(text: Iterable[str], separator: str | None) -> _Survey:
    """Read a file to its end: check it, count its documents, hash the long ones."""
    survey = _Survey()

    def seen() -> Iterator[str]:
        for chunk in text:
            survey.is_blank = survey.is_blank and not chunk.strip()
            yield chunk

    for group in _groups(_segments(seen(), separator)):
        survey.ends += 1
        if not isinstance(group, str):
            stream = _Watched(group)
            mark = digest_of_parts(part.encode() for part in stream)
            survey.long.append(_Long(mark, stream.size, stream.is_blank))
    return survey


class _Watched(Iterator[str]):
    """A stream of text that records what passed through it.

    Args:
        stream: The text in parts.
    """

    def __init__(self, stream: Iterator[str]) -> None:
        self.size = 0
        self.lines = 0
        self.is_blank = True
        self._stream = stream

    def __next__(self) -> str:
        part = next(self._stream)
        self.size += len(part.encode())
        self.lines += part.count("\n")
        self.is_blank = self.is_blank and not part.strip()
        return part


def _documents(
    file: Path, text: Iterable[str], separator: str | None, long: list[_Long]
) -> Iterator[AnyDocument]:
    line = 1
    remaining = iter(long)
    for group in _groups(_segments(text, separator)):
        if isinstance(group, str):
            if group.strip():
                yield Document(text=group, origin=str(file), line=line)
            line += group.count("\n")
        else:
            known = next(remaining, None)
            stream = _Watched(group)
            if known and not known.is_blank:
                yield LongDocument(
                    origin=str(file), line=line, digest=known.digest, size=known.size, stream=stream
                )
            _exhaust(stream)
            if known is None or stream.size != known.size:
                raise _ChangedError
            line += stream.lines
        line += separator.count("\n") if separator else 0
