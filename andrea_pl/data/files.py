"""Files of a source: how they are opened."""

from pathlib import Path
from typing import BinaryIO


def open_bytes(file: Path) -> BinaryIO:
    """Open a file for reading its content as bytes."""
    return file.open("rb")
