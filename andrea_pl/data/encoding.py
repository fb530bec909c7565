"""From documents to tokens, by a tokenizer."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from andrea_pl.data.documents import Problems, TextSource
from andrea_pl.data.records import Document
from andrea_pl.data.tokenizer import TextTokenizer

CHUNK_CHARACTERS = 1 << 21

Piece = tuple[Sequence[int] | NDArray[Any], int, bytes, Document]
"""Tokens, bytes of text, what decides the split, and where it came from."""


def digest(content: bytes) -> int:
    """Return a hash of a document's content, 64 bits: its share of 2^64 decides the split."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def encoded(source: TextSource, tokenizer: TextTokenizer, problems: Problems) -> Iterator[Piece]:
    """Yield the documents of a text source as tokens."""
    for chunk in _chunks(source.read(problems)):
        for document, tokens in zip(
            chunk, tokenizer.encode_documents([each.text for each in chunk]), strict=True
        ):
            yield tokens, len(document.text.encode()), document.content, document


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Gather documents until there is work enough for all cores."""
    chunk: list[Document] = []
    characters = 0
    for document in documents:
        chunk.append(document)
        characters += len(document.text)
        if characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
