"""Recognises a file's content by its first bytes, if its name says something else."""

import codecs
import gzip
import os
import zlib
from errno import ENOSPC
from pathlib import Path

from andrea_pl.data.sources.files import UNPACKERS, is_gzip, open_bytes

HEAD_BYTES = 4096

Fault = tuple[str, str]
"""A fault and its remedy."""

UNREADABLE = (OSError, EOFError, zlib.error)
"""Errors that reading a file raises, also a damaged gzip file."""

_COMPRESSED = {
    b"\x1f\x8b\x08": ("gzip", "gzip -d"),
    b"\x28\xb5\x2f\xfd": ("zstd", UNPACKERS[".zst"]),
    b"BZh": ("bzip2", UNPACKERS[".bz2"]),
    b"\xfd7zXZ\x00": ("xz", UNPACKERS[".xz"]),
    b"PK\x03\x04": ("zip", UNPACKERS[".zip"]),
    b"\x04\x22\x4d\x18": ("lz4", UNPACKERS[".lz4"]),
    b"7z\xbc\xaf\x27\x1c": ("7-Zip", "7z x"),
}
_BZIP2_BLOCK = b"1AY&SY"
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def read_head(file: Path, size: int = HEAD_BYTES) -> bytes:
    """Return the first bytes of a file, without decompression."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def content_fault(file: Path, kind: str) -> Fault | None:
    """Return why a file cannot hold what its name or format says, or None.

    Args:
        file: The file.
        kind: Its format: `text`, `jsonl`, `parquet` or `tokens`.

    Raises:
        OSError: If it cannot be read.
    """
    head = read_head(file)
    if is_gzip(file) and head:
        if not head.startswith(b"\x1f\x8b"):
            return "not compressed by gzip, though its name ends in .gz", "rename it or write it again"
        with open_bytes(file) as content:
            head = content.read(HEAD_BYTES)
    fault = _compression(head, file)
    if fault is None and kind in ("text", "jsonl"):
        fault = _foreign_text(head, file)
    return fault


def read_fault(error: Exception) -> Fault:
    """Return the fault and the remedy for an error in reading a file."""
    if isinstance(error, gzip.BadGzipFile | EOFError | zlib.error):
        return f"broken gzip ({error})", "compress or download it again"
    reason = getattr(error, "strerror", None) or str(error)
    if isinstance(error, PermissionError):
        return f"cannot be read ({reason})", "change its permissions"
    if isinstance(error, OSError) and error.errno == ENOSPC:
        return (
            "no space for a decompressed copy in the temporary folder",
            "set TMPDIR or decompress it yourself",
        )
    return f"cannot be read ({reason})", "check the file and its disk"


def _compression(head: bytes, file: Path) -> Fault | None:
    for magic, (name, command) in _COMPRESSED.items():
        if not head.startswith(magic) or (name == "bzip2" and head[4:10] != _BZIP2_BLOCK):
            continue
        rename = "rename it to end in .gz, or " if name == "gzip" and not is_gzip(file) else ""
        return f"compressed with {name}", f"{rename}decompress it with {command}"
    return None


def _foreign_text(head: bytes, file: Path) -> Fault | None:
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return f"{encoding} (by its byte order mark), not UTF-8", _convert(encoding, file)
    if head.startswith(b"PAR1") and not head[4:5].isalnum():
        return "a parquet file", "rename it to end in .parquet, or give the source format: parquet"
    if b"\0" not in head:
        if head.startswith(b"%PDF-") and not _is_utf8(head):
            return "a PDF, not text", "extract its text, for example with pdftotext"
        return None
    little, big = _share_of_zeros(head[1::2]), _share_of_zeros(head[0::2])
    if len(head) >= 8 and max(little, big) > 0.9 and min(little, big) < 0.1:
        encoding = "UTF-16LE" if little > big else "UTF-16BE"
        return f"looks like {encoding}, not UTF-8", _convert(encoding, file)
    if not _is_utf8(head) and not head.lstrip().startswith((b"{", b"\xef\xbb\xbf")):
        return "binary, not text", "leave it out, or give the source the format that it has"
    return None


def _share_of_zeros(content: bytes) -> float:
    return content.count(0) / max(len(content), 1)


def _convert(encoding: str, file: Path) -> str:
    command = f"iconv -f {encoding} -t UTF-8"
    return f"convert it: {command} {file.name}" if file.name.isprintable() else f"convert it with {command}"


def _is_utf8(head: bytes) -> bool:
    """Return whether bytes are the beginning of UTF-8."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True
