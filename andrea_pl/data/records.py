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
    identity: str | None = None
    """What a repeat is known by, where the text has a frame of ours around it; the text itself when None."""

    @property
    def content(self) -> bytes:
        """What decides the split, and what is compared to find repeats."""
        return (self.text if self.identity is None else self.identity).encode()
