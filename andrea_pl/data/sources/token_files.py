"""Reads token files that another program wrote, and cuts them into documents."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from andrea_pl.data.sources.content import UNREADABLE, content_fault, read_fault
from andrea_pl.data.sources.documents import LARGEST_ID, Problems, TextSource
from andrea_pl.data.sources.files import open_seekable, shown
from andrea_pl.data.sources.records import Document, digest
from andrea_pl.data.store.encoding import Piece
from andrea_pl.errors import UserError

PIECE_TOKENS = 8192
"""Tokens per piece of a token file without known document ends."""
BLOCK_TOKENS = 1 << 22
"""Tokens read at once, so that memory does not grow with the file."""

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

HEADER_BYTES = 1024
"""Bytes of llm.c's header: 256 int32, of which the first three are magic, version and number of tokens."""
HEADERS = {20240520: ("uint16", (1,)), 20240801: ("uint32", (7, 1))}
"""Dtype and versions of llm.c's token files by their magic.

The first version is that of `HEADERS_INFO` in its dev/data/data_common.py; other programs write 1 for both.
"""
OTHER_HEADERS = {
    20240326: "a model of llm.c",
    20240327: "a debugging state of llm.c",
    20240328: "a tokenizer of llm.c",
    20240522: "a multiple-choice evaluation of llm.c",
    20240803: "a debugging state of llm.c",
    0x616B3432: "a model of llama2.c",
}
FOREIGN = {
    b"\x93NUMPY": "a NumPy .npy file; write its ids with np.load(…).astype(np.uint16).tofile(…)",
    b"LITPKDS": "a packed data set of LitGPT; write its ids as raw uint16 or uint32",
    b"GGUF": "a GGUF model; give token ids",
    b"PAR1": "a parquet file; rename it to end in .parquet",
    b"ARROW1": "an Arrow file; export its ids as raw uint16 or uint32",
    b"\x89HDF": "an HDF5 file; write its ids as raw uint16 or uint32",
}
INDEXES = {b"MMIDIDX\x00": "Megatron", b"TNTIDX\x00": "fairseq"}

_SAMPLE = 65_536
_TOO_SHORT = 64
"""Least number of tokens from whose values their dtype can be judged."""


class _Refused(Exception):  # noqa: N818  (a fault of a file, which becomes a problem)
    def __init__(self, fault: str, remedy: str) -> None:
        super().__init__(fault)
        self.fault = (fault, remedy)


def token_pieces(source: TextSource, vocab_size: int, problems: Problems) -> Iterator[Piece]:
    """Cut raw token files, or those with llm.c's header, into documents.

    Args:
        source: A source of token files.
        vocab_size: Number of ids of the files' tokenizer, or of the model if no tokenizer is given.
        problems: Receives files that cannot be read.

    Raises:
        UserError: If the ids and the vocabulary do not fit each other.
    """
    ends = 0
    for file in source.files():
        try:
            fault = content_fault(file, "tokens")
            if fault is None:
                with open_seekable(file) as content:
                    tokens = _open_tokens(file, content, source)
                    _check_ids(tokens, file, source, vocab_size)
                    for start, end, is_ended in _piece_bounds(tokens, source.end_of_document):
                        ends += is_ended
                        piece = np.array(tokens[start:end])
                        place = Document(text="", origin=str(file), line=start)
                        yield [piece], piece.nbytes, digest(piece.tobytes()), place
                continue
        except _Refused as refused:
            fault = refused.fault
        except UNREADABLE as error:
            fault = read_fault(error)
        problems.report(shown(file), *fault)
    if source.end_of_document is not None and not ends:
        rank_zero_warn(
            f"source {source.name!r}: end_of_document={source.end_of_document} occurs nowhere, so each file "
            "is one document; give the id that ends documents, or leave it out"
        )


def _open_tokens(file: Path, content: BinaryIO, source: TextSource) -> NDArray[Any]:
    """Memory-map the tokens of a file, after its header if it has one."""
    size = content.seek(0, 2)
    content.seek(0)
    head = content.read(HEADER_BYTES)
    _refuse_foreign(file, head)
    magic = int.from_bytes(head[:4], "little", signed=True)
    if magic in HEADERS:
        name, count = _read_header(head, size, magic)
        if source.token_dtype not in (None, name):
            raise UserError(
                f"{shown(file)}: its header says {name} and the source's token_dtype {source.token_dtype}; "
                "leave token_dtype out"
            )
        return np.memmap(content, dtype=DTYPES[name], mode="r", offset=HEADER_BYTES, shape=(count,))
    name = source.token_dtype or "uint16"
    if not size or size % DTYPES[name].itemsize:
        raise _Refused(f"{size} bytes are no list of {name} tokens", f"write it again as raw {name}")
    tokens = np.memmap(content, dtype=DTYPES[name], mode="r")
    _refuse_other_width(tokens, name, source)
    return tokens


def _read_header(head: bytes, size: int, magic: int) -> tuple[str, int]:
    """Return dtype and number of tokens of a file with llm.c's header."""
    name, versions = HEADERS[magic]
    if len(head) < HEADER_BYTES:
        raise _Refused(f"{size} bytes end within llm.c's header of {HEADER_BYTES}", "write it again")
    version, count = np.frombuffer(head, "<i4")[1:3].tolist()
    if version not in versions:
        known = " or ".join(map(str, versions))
        raise _Refused(
            f"llm.c's header {magic} of version {version}, where {known} is known",
            f"write it again with version {versions[0]}, or as raw {name}",
        )
    expected = HEADER_BYTES + count * DTYPES[name].itemsize
    if count <= 0 or size != expected:
        raise _Refused(
            f"llm.c's header says {count} tokens of {name} or {expected} bytes, and the file has {size}",
            "copy or write it again",
        )
    return name, count


def _refuse_foreign(file: Path, head: bytes) -> None:
    """Refuse files that contain something other than token ids."""
    for magic, what in FOREIGN.items():
        if head.startswith(magic):
            name, _, remedy = what.partition("; ")
            raise _Refused(f"{name}, not raw token ids", remedy)
    numbers = np.frombuffer(head[: len(head) // 4 * 4], "<i4")
    magic = int(numbers[0]) if len(numbers) else 0
    if magic in OTHER_HEADERS:
        raise _Refused(
            f"{OTHER_HEADERS[magic]} (magic {magic}), not a list of token ids", "give its token files"
        )
    is_date = 20_200_101 <= magic <= 20_991_231
    if is_date and magic not in HEADERS and len(head) == HEADER_BYTES and not numbers[16:].any():
        known = ", ".join(map(str, HEADERS))
        raise _Refused(
            f"a header with the unknown magic {magic} (known: {known})", "write raw ids without it"
        )
    if len(head) >= _TOO_SHORT and len(set(head)) >= 8 and all(9 <= byte < 127 for byte in head):
        raise _Refused("text, not token ids", "rename it to end in .txt, or give the source format: text")
    _refuse_indexed(file)


def _refuse_indexed(file: Path) -> None:
    """Refuse the data file of an indexed dataset, whose dtype and documents are described in another file."""
    index = file.with_suffix(".idx")
    if index.is_file():
        with index.open("rb") as content:
            start = content.read(16)
        for magic, program in INDEXES.items():
            if start.startswith(magic):
                raise _Refused(
                    f"belongs to the indexed data set {shown(index.name)} of {program}, whose dtype is there",
                    "write its ids as raw uint16 or uint32 under another name",
                )
    if file.name.startswith("chunk-") and file.with_name("index.json").is_file():
        raise _Refused("a chunk of a LitData set", "write its ids as raw uint16 or uint32")


def _refuse_other_width(tokens: NDArray[Any], name: str, source: TextSource) -> None:
    """Refuse ids of twice the width, whose upper halves would be read as ids: every second id is tiny."""
    is_given = source.token_dtype is not None
    if (is_given and name == "uint16") or len(tokens) < _TOO_SHORT or len(tokens) % 2:
        return
    sample = tokens[:_SAMPLE]
    lower, upper = int(sample[0::2].max()), int(sample[1::2].max())
    if lower and (upper == 0 or (lower > 255 and upper < 16 and name == "uint16")):
        wide = "uint32" if name == "uint16" else "64-bit"
        remedy = "set token_dtype: uint32" if name == "uint16" else "write it again as raw uint32"
        keep = ", or token_dtype: uint16 if it is not" if name == "uint16" else ""
        raise _Refused(f"every second {name} is at most {upper}: this looks like {wide} ids", remedy + keep)


def _check_ids(tokens: NDArray[Any], file: Path, source: TextSource, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary, and a vocabulary or an end that such ids cannot hold."""
    if tokens.dtype == DTYPES["uint16"]:
        largest = LARGEST_ID["uint16"]
        remedy = "set the source's token_dtype: uint32 if it was written so, or write it again as uint32"
        if vocab_size > largest + 1:
            raise UserError(
                f"{shown(file)}: a vocabulary of {vocab_size} does not fit uint16 ids, which end at "
                f"{largest}; {remedy}"
            )
        end = source.end_of_document
        if end is not None and end > largest:
            raise UserError(
                f"{shown(file)}: end_of_document={end} does not fit uint16 ids, which end at {largest}; "
                f"{remedy}"
            )
    blocks = range(0, len(tokens), BLOCK_TOKENS)
    highest = max(int(tokens[start : start + BLOCK_TOKENS].max()) for start in blocks)
    if highest >= vocab_size:
        raise UserError(
            f"{shown(file)}: token id {highest} does not fit vocab_size={vocab_size}; raise `vocab_size`, "
            "give the tokenizer that wrote it, or set the source's token_dtype"
        )


def _piece_bounds(tokens: NDArray[Any], end_of_document: int | None) -> Iterator[tuple[int, int, bool]]:
    """Yield each document's first token, its last token + 1, and whether it has an end-of-document token."""
    start = 0
    if end_of_document is None:
        for start in range(0, len(tokens), PIECE_TOKENS):
            yield start, min(start + PIECE_TOKENS, len(tokens)), False
        return
    for block in range(0, len(tokens), BLOCK_TOKENS):
        found = np.flatnonzero(tokens[block : block + BLOCK_TOKENS] == end_of_document)
        for end in (found + block + 1).tolist():
            yield start, end, True
            start = end
    if start < len(tokens):
        yield start, len(tokens), False
