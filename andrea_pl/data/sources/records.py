"""Records passed between readers, store and dataset."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PART_CHARACTERS = 1 << 20
"""Maximum number of characters in a part of a document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text and its origin."""

    text: str
    origin: str
    """The file, or what stands for one."""
    line: int
    """First line in the file, from 1; the row number for a table."""
    identity: str | None = None
    """The content that identifies repeats if we added a frame around the text; None uses the text itself."""

    @property
    def content(self) -> bytes:
        """The content that decides the split and identifies repeats."""
        return (self.text if self.identity is None else self.identity).encode()

    @property
    def digest(self) -> int:
        """`digest` of the content."""
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
    """A text that is never in memory as a whole.

    Its parts can be read only once, and only before its reader yields the next document.
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
    """The unread parts."""

    @property
    def text(self) -> str:
        """The whole text, for uses that need it in memory."""
        return "".join(self.stream)

    def parts(self) -> Iterator[str]:
        """Yield the text in parts of bounded size."""
        return self.stream


AnyDocument = Document | LongDocument


def digest(content: bytes) -> int:
    """Return a 64-bit hash of a document's content, which also decides the split."""
    return digest_of_parts([content])


def digest_of_parts(parts: Iterable[bytes]) -> int:
    """Return the hash of a content given in parts."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        hashed.update(part)
    return int.from_bytes(hashed.digest(), "big")
