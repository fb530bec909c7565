"""Manifests of checkpoint files, which tell which files of a folder can be trusted.

A manifest lists sizes and SHA-256 of a file's coming and earlier contents. It is on the disk before the file
is replaced, so that the file verifies at every moment.
"""

import json
import re
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from andrea_callbacks.numerics.atomic_write import checksum, remove_temporaries, replace_durably, write_all
from andrea_pl.errors import UserError

SUFFIX = ".ckpt"
FINAL = "final"
"""Prefix of files with a run's final weights only; a resume ignores them."""
MANIFEST_SUFFIX = ".json"
FORMAT_VERSION = 1
KEPT_CONTENTS = 4
"""Earlier contents that a manifest keeps listing, since killed saves may not have replaced them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The contents of a checkpoint file."""

    update: int
    """Updates made before the save, `global_step`."""
    size: int
    """Size in bytes."""
    sha256: str
    resumable: bool
    """Whether the file holds an optimizer's state, and not only weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest checkpoint of a folder that verifies."""

    path: Path
    update: int
    passed_over: list[str]
    """Newer checkpoints, each with what is wrong with it."""


def manifest_path(path: Path) -> Path:
    """Return the path of a checkpoint's manifest."""
    return path.with_name(path.name + MANIFEST_SUFFIX)


_verified: dict[tuple[str, int, int, int], str] = {}
"""Checksums of files that this process has read, by path, inode, size and modification time."""


def fault_of(path: Path) -> str | None:
    """Return what is wrong with a checkpoint according to its manifest, None if it verifies."""
    if path.is_dir():
        return "is a folder"
    if not path.is_file():
        return "is not there: its save was cut short, or it was removed"
    contents = read_manifest(path)
    if not contents:
        return f"has no manifest ({manifest_path(path).name}) that can be read"
    size = path.stat().st_size
    if size not in [each.size for each in contents]:
        return f"has {size:,} bytes where its manifest says {contents[0].size:,}"
    try:
        found = _checksum(path)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    if not any(each.size == size and each.sha256 == found for each in contents):
        return f"does not agree with its manifest (SHA-256 {found[:12]}, not {contents[0].sha256[:12]})"
    return None


def newest_valid(folder: str | Path) -> Found:
    """Return the newest checkpoint of a folder that verifies, and the newer ones that do not.

    Files with final weights are ignored.

    Raises:
        UserError: If there is no checkpoint, or none verifies; the message names each with its fault.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder, and so no checkpoint in it")
    passed_over: list[str] = []
    files = _newest_first(folder)
    finals = [path for path in files if _is_final(path)]
    for path in [each for each in files if each not in finals]:
        fault = fault_of(path)
        if fault is None:
            content = _content(path)
            if content.resumable:
                return Found(path=path, update=content.update, passed_over=passed_over)
            fault = "holds weights alone, which nothing can go on from"
        passed_over.append(f"{path} {fault}")
    passed_over += [f"{path} holds final weights only" for path in finals]
    if passed_over:
        raise UserError(
            f"{folder}: no checkpoint verifies, and nothing is started afresh in its place: "
            f"{'; '.join(passed_over)}. --ckpt_path takes one that you trust all the same, once its "
            f"{MANIFEST_SUFFIX} is removed"
        )
    raise UserError(f"{folder}: there is no checkpoint; start without --resume")


def has_checkpoints(folder: str | Path) -> bool:
    """Return whether a folder holds a checkpoint, a damaged one, or the manifest of one."""
    return Path(folder).is_dir() and bool(_newest_first(Path(folder)))


def move_aside(folder: Path, after: int) -> Path | None:
    """Move checkpoints of later updates, of another run or damaged, into a subfolder.

    Args:
        folder: The folder of checkpoints.
        after: The run's current update; checkpoints up to it stay.

    Returns:
        The new subfolder, None if there was nothing to move.
    """
    later = [path for path in _newest_first(folder) if read_manifest(path) and _is_later(path, after)]
    if not later:
        return None
    aside = next(each for number in count(1) if not (each := folder / f"earlier-{number}").exists())
    aside.mkdir()
    for path in later:
        path.rename(aside / path.name)
        manifest_path(path).rename(manifest_path(aside / path.name))
    return aside


def _is_final(path: Path) -> bool:
    """Return whether a file holds final weights, by its name and its manifest."""
    return path.name.startswith(f"{FINAL}-") and not any(each.resumable for each in read_manifest(path))


def _is_later(path: Path, after: int) -> bool:
    """Return whether a file belongs to a later update, or is damaged and may belong to one."""
    if not path.exists() or max(each.update for each in read_manifest(path)) <= after:
        return False
    return fault_of(path) is not None or _content(path).update > after


def _content(path: Path) -> Content:
    """Return the manifest's entry for the current contents of a file that verifies."""
    found = _checksum(path)
    return next(each for each in read_manifest(path) if each.sha256 == found)


def sweep(folder: Path) -> list[Path]:
    """Remove what killed saves left in a folder: temporary files, and manifests without a file.

    No other process may be writing there.
    """
    lonely = [each for each in _manifests(folder) if not _described(each).exists()]
    for each in lonely:
        each.unlink(missing_ok=True)
    return [*remove_temporaries(folder), *lonely]


def _newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, newest update first, by manifest or else by name."""
    named = {each for each in folder.glob(f"*{SUFFIX}") if not each.name.startswith(".")}
    named |= {_described(each) for each in _manifests(folder)}

    def age(path: Path) -> tuple[int, float]:
        named = re.search(r"(\d+)$", path.name.removesuffix(SUFFIX))
        by_name = int(named[1]) if named else -1
        update = max((each.update for each in read_manifest(path)), default=by_name)
        return update, path.stat().st_mtime if path.exists() else 0.0

    return sorted(named, key=age, reverse=True)


def _manifests(folder: Path) -> list[Path]:
    return [each for each in folder.glob(f"*{SUFFIX}{MANIFEST_SUFFIX}") if not each.name.startswith(".")]


def _described(manifest: Path) -> Path:
    return manifest.with_name(manifest.name.removesuffix(MANIFEST_SUFFIX))


def read_manifest(path: Path) -> list[Content]:
    """Return the contents listed in a checkpoint's manifest, newest first; empty without a manifest."""
    try:
        read: Any = json.loads(manifest_path(path).read_text(encoding="utf-8"))
        if read["format"] != FORMAT_VERSION:
            return []
        return [
            Content(
                update=int(each["update"]),
                size=int(each["size"]),
                sha256=str(each["sha256"]),
                resumable=bool(each["resumable"]),
            )
            for each in read["contents"]
        ]
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return []  # a kill or an editor may have left anything there


def write_manifest(path: Path, contents: list[Content]) -> None:
    """Write a checkpoint's manifest, newest contents first, and wait until the disk has it."""
    described = {"format": FORMAT_VERSION, "contents": [asdict(each) for each in contents]}
    text = json.dumps(described, indent=1).encode()
    replace_durably(manifest_path(path), lambda descriptor: write_all(descriptor, text))


def _checksum(path: Path) -> str:
    status = path.stat()
    key = (str(path.absolute()), status.st_ino, status.st_size, status.st_mtime_ns)
    if key not in _verified:
        _verified[key] = checksum(path)
    return _verified[key]


def say_passed_over(found: Found) -> None:
    """Print every newer checkpoint that did not verify."""
    for each in found.passed_over:
        rank_zero_info(f"passed over: {each}")
