"""Encodes documents with a tokenizer in bounded memory."""

from collections.abc import Iterable, Iterator

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from andrea_pl.data.sources.documents import Problems, TextSource
from andrea_pl.data.sources.lossy import LossWatch
from andrea_pl.data.sources.records import AnyDocument, Document
from andrea_pl.data.sources.records import digest as digest
from andrea_pl.data.store.cutting import TooLongPieceError
from andrea_pl.data.store.tokenizer import TextTokenizer
from andrea_pl.errors import UserError

CHUNK_BYTES = 1 << 20
"""Approximate number of bytes encoded together, enough work for all cores."""
LARGE_UNCUT = 1 << 22
"""Bytes of a text encoded in one piece above which its memory is reported."""
LARGEST_UNCUT = 1 << 26
"""Maximum number of characters encoded in one piece."""
BYTES_PER_BYTE = 230
"""Approximate memory, in bytes, per byte of text encoded in one piece."""

Piece = tuple[Iterable[NDArray[np.uint32]], int, int, AnyDocument]
"""Tokens in order, bytes of text, the hash that decides the split, and the origin."""


def encoded(source: TextSource, tokenizer: TextTokenizer, problems: Problems) -> Iterator[Piece]:
    """Yield the documents of a text source as tokens, each between two end-of-document tokens.

    Read the tokens of one document before you ask for the next. At the end warnings report a separator that
    never occurs, and text that the tokenizer cannot reproduce.
    """
    end = np.array([tokenizer.end_id], dtype=np.uint32)
    watch = LossWatch(source.name, tokenizer)
    for chunk in _chunks(source.read(problems)):
        if isinstance(chunk, list):
            texts = [document.text for document in chunk]
            for document, text, ids in zip(chunk, texts, tokenizer.encode_pieces(texts), strict=True):
                watch.see(text, ids, document)
                yield [end, ids, end], document.size, document.digest, document
        else:
            yield _encoded_in_pieces(chunk, tokenizer, end, watch), chunk.size, chunk.digest, chunk
    watch.report()
    _report_separator(source, problems)


def _chunks(documents: Iterable[AnyDocument]) -> Iterator[list[Document] | AnyDocument]:
    """Group documents until there is enough work for all cores. Each long document is its own group."""
    chunk: list[Document] = []
    gathered = 0
    for document in documents:
        size = document.size
        is_short = isinstance(document, Document) and size <= CHUNK_BYTES
        if chunk and (gathered >= CHUNK_BYTES or not is_short):
            yield chunk
            chunk, gathered = [], 0
        if isinstance(document, Document) and is_short:
            chunk.append(document)
            gathered += size
        else:
            yield document
    if chunk:
        yield chunk


def _encoded_in_pieces(
    document: AnyDocument, tokenizer: TextTokenizer, end: NDArray[np.uint32], watch: LossWatch
) -> Iterator[NDArray[np.uint32]]:
    """Yield the tokens of a long document."""
    yield end
    try:
        for batch in _batches(tokenizer.cutter.pieces(document.parts(), LARGEST_UNCUT)):
            for text, ids in zip(batch, tokenizer.encode_pieces(batch), strict=True):
                watch.see(text, ids, document)
                yield ids
    except TooLongPieceError as error:
        raise UserError(
            f"{document.origin}:{document.line}: more than {LARGEST_UNCUT >> 20} Mi characters that "
            "this tokenizer can only encode in one piece, which would take many GiB of memory; cut the file "
            "into documents with the source's document_separator, or leave `tokenizer` out to learn one "
            "that encodes any text in pieces"
        ) from error
    yield end


def _batches(pieces: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    gathered = 0
    for piece in pieces:
        batch.append(piece)
        size = len(piece.encode())
        gathered += size
        if size > LARGE_UNCUT:
            rank_zero_warn(
                f"{size / 2**20:.0f} MiB of text are encoded in one piece, because this tokenizer gives "
                f"other ids for pieces; that takes about {size * BYTES_PER_BYTE / 2**30:.1f} GiB of memory. "
                "Cut the text into documents with document_separator to need less"
            )
        if gathered >= CHUNK_BYTES:
            yield batch
            batch, gathered = [], 0
    if batch:
        yield batch


def _report_separator(source: TextSource, problems: Problems) -> None:
    """Warn that a separator never occurs."""
    separator = source.document_separator
    if separator is None or problems.found_separator:
        return
    files = source.files() if source.kind == "files" else []
    count = sum(source.format_of(file) == "text" for file in files)
    hint = "; in YAML, write line ends between double quotes" if "\\" in separator else ""
    rank_zero_warn(
        f"source {source.name!r}: its document_separator {separator!r} occurs in none of its {count} text "
        f"files, so that each is one document{hint}; correct it, or remove it"
    )
