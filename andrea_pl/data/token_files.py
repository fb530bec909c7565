"""Token files: tokens that another program wrote, cut into documents."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from andrea_pl.data.documents import Problems, TextSource
from andrea_pl.data.encoding import Piece
from andrea_pl.data.records import Document, digest
from andrea_pl.errors import UserError

PIECE_TOKENS = 8192
"""Tokens of a piece of a token file whose documents have no known end."""


def token_pieces(source: TextSource, vocab_size: int, problems: Problems) -> Iterator[Piece]:
    """Cut nanoGPT's raw uint16 files into documents."""
    for file in source.files():
        size = file.stat().st_size
        if not size or size % 2:
            problems.report(
                str(file), f"{size} bytes are no list of uint16 tokens", "write it again as raw uint16"
            )
            continue
        tokens = np.memmap(file, dtype="<u2", mode="r")
        highest = int(tokens.max())
        if highest >= vocab_size:
            raise UserError(
                f"{file}: token id {highest} does not fit vocab_size={vocab_size}; raise data.vocab_size"
            )
        for start, end in _piece_bounds(tokens, source.end_of_document):
            piece = np.array(tokens[start:end])
            document = Document(text="", origin=str(file), line=start)
            yield [piece], piece.nbytes, digest(piece.tobytes()), document


def _piece_bounds(tokens: NDArray[Any], end_of_document: int | None) -> Iterator[tuple[int, int]]:
    if end_of_document is None:
        bounds = [*range(0, len(tokens), PIECE_TOKENS), len(tokens)]
    else:
        ends = (np.flatnonzero(tokens == end_of_document) + 1).tolist()
        bounds = [0, *ends] if ends and ends[-1] == len(tokens) else [0, *ends, len(tokens)]
    yield from pairwise(bounds)
