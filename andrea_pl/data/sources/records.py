"""The records that pass between readers, store and dataset."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PART_CHARACTERS = 1 << 20
"""Characters in a part of a document, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text and where it came from."""

    text: str
    origin: str
    """The file, or what stands for one."""
    line: int
    """First line in the file, from 1; the row number for a table."""
    identity: str | None = None
    """What a repeat is known by, where the text has a frame of ours around it; the text itself when None."""

    @property
    def content(self) -> bytes:
        """What decides the split, and what is compared to find repeats."""
        return (self.text if self.identity is None else self.identity).encode()

    @property
    def digest(self) -> int:
        """Hash of the content, as `digest` gives it."""
        return digest(self.content)

    @property
    def size(self) -> int:
        """Bytes of text."""
        return len(self.text.encode())

    def parts(self) -> Iterator[str]:
        """Yield the text in parts of bounded size."""
        for start in range(0, len(self.text), PART_CHARACTERS):
            yield self.text[start : start + PART_CHARACTERS]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongDocument:
    """A text that is never held in memory as a whole.

    Its parts can be read once, and only until the reader that gave it is asked for the next document.
    """

    origin: str
    """The file."""
    line: int
    """First line in the file, from 1."""
    digest: int
    """Hash of the content, as `digest` gives it."""
    size: int
    """Bytes of text."""
    stream: Iterator[str]
    """The parts that were not read yet."""

    @property
    def text(self) -> str:
        """The whole text, where it has to be held after all."""
        return "".join(self.stream)

    def parts(self) -> Iterator[str]:
        """Yield the text in parts of bounded size."""
        return self.stream


AnyDocument = Document | LongDocument


def digest(content: bytes) -> int:
    """Return a hash of a document's content, 64 bits: its share of 2^64 decides the split."""
    return digest_of_parts([content])


def digest_of_parts(parts: Iterable[bytes]) -> int:
    """Return the hash of a content that comes in parts."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        hashed.update(part)
    return int.from_bytes(hashed.digest(), "big")
