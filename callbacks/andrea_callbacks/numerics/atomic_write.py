"""Files that a kill, a full disk or a power cut leaves whole: the old content or the new."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

TEMPORARY_PREFIX = ".andrea-"
TEMPORARY_SUFFIX = ".part"
"""What a file is named while it is written, in the folder that it will lie in."""


def append_durably(file: Path, lines: bytes) -> None:
    """Append whole lines to a file and wait until the disk has them; a torn last line is ended first.

    Raises:
        OSError: If that cannot be done; then none of them is left there, as far as the disk lets it.
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
    """Give a file new content, under its name all at once, and wait until the disk has it.

    The content is written into a temporary file of the same folder, synchronised, and renamed; then the
    folder is synchronised. `TMPDIR` has no part in it.

    Args:
        file: Where it will be.
        write: Writes the content to a file descriptor.
        before: Called when the content is on the disk and not under its name yet.

    Raises:
        OSError: If that cannot be done; what was there before is as it was, and nothing else is left.
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
    """Make a folder and its parents where they are missing, and wait until the disk has their names.

    Returns:
        The folders that were made here, the outermost first; what another process made is not among them.

    Raises:
        OSError: If that cannot be done.
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
    """Remove what killed processes were writing; nobody else may be writing there.

    Returns:
        What was removed.
    """
    found = sorted(folder.glob(f"{TEMPORARY_PREFIX}*{TEMPORARY_SUFFIX}"))
    for each in found:
        each.unlink(missing_ok=True)
    return found


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
