"""The records that pass between readers, store and dataset."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text and where it came from."""

    text: str
    origin: str
    """The file, or what stands for one."""
    line: int
    """First line in the file, from 1; the row number for a table."""
