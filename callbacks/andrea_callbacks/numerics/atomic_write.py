"""Writes files so that a kill, a full disk or a power cut leaves either the old content or the new."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

TEMPORARY_PREFIX = ".andrea-"
TEMPORARY_SUFFIX = ".part"
"""Name of a temporary file while it is written, in the folder of the final file."""


def append_durably(file: Path, lines: bytes) -> None:
    """Append whole lines to a file and wait until the disk has them; first end a torn last line.

    Raises:
        OSError: If the lines cannot be written. What was written of them is removed if the disk allows it.
    """
    make_folder_durably(file.parent)
    is_new = not file.exists()
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            lines = b"\n" + lines
        try:
            write_all(descriptor, lines)
            os.fsync(descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
    if is_new:
        synchronize_folder(file.parent)


def replace_durably(
    file: Path, write: Callable[[int], None], before: Callable[[], None] | None = None
) -> None:
    """Replace a file's content atomically, and wait until the disk has it.

    The content is written into a temporary file in the same folder, synchronised, and renamed; then the
    folder is synchronised. `TMPDIR` is not used.

    Args:
        file: The file.
        write: Writes the content to a file descriptor.
        before: Called when the content is on the disk, but not under its name yet.

    Raises:
        OSError: If the content cannot be written. The old file is unchanged, and no temporary file is left.
    """
    descriptor, name = tempfile.mkstemp(TEMPORARY_SUFFIX, f"{TEMPORARY_PREFIX}{file.name}-", file.parent)
    try:
        try:
            os.fchmod(descriptor, 0o666 & ~_umask())
            write(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if before is not None:
            before()
        os.replace(name, file)  # noqa: PTH105  the temporary's name is a str
    except BaseException:
        with suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        raise
    synchronize_folder(file.parent)


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all of a content, however many calls that takes."""
    view = memoryview(content).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def make_folder_durably(folder: Path) -> list[Path]:
    """Make a folder and its missing parents, and wait until the disk has their names.

    Returns:
        The folders made by this call, the outermost first, without those that another process made.

    Raises:
        OSError: If a folder cannot be made.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    made: list[Path] = []
    for each in reversed(missing):
        try:
            each.mkdir()
        except FileExistsError:  # another process came first
            if not each.is_dir():
                raise
            continue
        made.append(each)
        synchronize_folder(each.parent)
    return made


def synchronize_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_temporaries(folder: Path) -> list[Path]:
    """Remove temporary files of killed processes. No other process may be writing in the folder.

    Returns:
        The removed files.
    """
    found = sorted(folder.glob(f"{TEMPORARY_PREFIX}*{TEMPORARY_SUFFIX}"))
    for each in found:
        each.unlink(missing_ok=True)
    return found


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
