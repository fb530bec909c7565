"""Checkpoint files: written so that nothing tears them, verified before they are read, never unpickled.

<folder>/update-000040.ckpt        what torch.save makes of a checkpoint
         update-000040.ckpt.json   its manifest: size and SHA-256 of what lies, or is about to lie, there
         final-000040.ckpt         weights that a callback put in place at the end, an average for instance
         .andrea-*.part            what is being written; what a kill left of it is swept at the next start

A manifest is on the disk before its file gets its name, and still names what the file held before: at every
moment whatever lies there verifies.
"""

import errno
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from andrea_callbacks.durable import (
    checksum,
    make_folder_durably,
    remove_temporaries,
    replace_durably,
    write_all,
)
from andrea_callbacks.packages import with_twin
from andrea_pl.errors import UserError

SUFFIX = ".ckpt"
FINAL = "final"
"""How names of files begin that hold what a run ended with, weights only; a resume does not look for them."""
MANIFEST_SUFFIX = ".json"
FORMAT_VERSION = 1
KEPT_CONTENTS = 4
"""Earlier contents that a manifest goes on naming; saves that were killed may not have arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a checkpoint file holds."""

    update: int
    """Updates made before it was saved, `global_step`."""
    size: int
    """Bytes."""
    sha256: str
    resumable: bool
    """Whether an optimizer's state is there too, and not the weights alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest checkpoint of a folder that can be trusted."""

    path: Path
    update: int
    passed_over: list[str]
    """Newer ones, each with what is wrong with it."""


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints that a kill, a full disk or a power cut cannot tear, and reads no pickle.

    A local file is streamed into a temporary one in its own folder while its checksum is made, synchronised,
    renamed; its manifest is on the disk before. It is loaded only if it agrees with its manifest, where it
    has one, and only tensors and plain values are let in. Any rank may load; Lightning saves on rank zero.

    A path of another file system (`s3://`, `gs://` …) is written and read by Lightning's own IO: whether it
    appears whole or not is the promise of that storage; there is no manifest, and what is damaged is found
    when it is loaded. `http://` and `https://` are refused.

    Raises:
        UserError: If a file cannot be written, naming the path and how many bytes were, or is not what its
            manifest says, or holds more than tensors and plain values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.__class__ = with_twin(type(self))  # which pytorch_lightning takes for a plugin too

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, its manifest first."""
        local = _local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        stream = _HashingStream()

        def write(descriptor: int) -> None:
            stream.descriptor = descriptor
            try:
                torch.save(checkpoint, cast(Any, stream))
            except Exception as error:
                raise stream.fault or error from error  # torch may have its own words for a full disk

        def announce() -> None:
            content = Content(
                update=int(checkpoint.get("global_step", 0)),
                size=stream.size,
                sha256=stream.digest.hexdigest(),
                resumable="optimizer_states" in checkpoint,
            )
            _write_manifest(local, [content, *_manifest(local)[:KEPT_CONTENTS]])

        try:
            make_folder_durably(local.parent)
            _move_folder_aside(local)
            replace_durably(local, write, announce)
        except OSError as error:
            raise _writing_error(local, stream.size, checkpoint, error) from error

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Verify and load a checkpoint; `weights_only=False` is refused."""
        if weights_only is False:
            raise UserError(f"{path}: weights_only=False would run what a checkpoint says; it is never used")
        return read_checkpoint(path, map_location)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint and then its manifest."""
        super().remove_checkpoint(path)
        local = _local_path(path)
        if local is not None:
            manifest_path(local).unlink(missing_ok=True)


class _HashingStream:
    """What torch.save writes into: a descriptor, a checksum and a count."""

    def __init__(self) -> None:
        self.descriptor = -1
        self.digest = hashlib.sha256()
        self.size = 0
        self.fault: OSError | None = None

    def write(self, content: Any) -> int:
        """Write all of it."""
        view = memoryview(content).cast("B")
        try:
            write_all(self.descriptor, view)
        except OSError as error:
            self.fault = error
            raise
        self.digest.update(view)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is kept back."""


def read_checkpoint(path: str | Path, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """Verify a checkpoint by its manifest, where it has one, and load it; only plain values are let in.

    Args:
        path: A local file, or a path of another file system that fsspec knows, but http.
        map_location: Where tensors go.
        mmap: Whether tensors stay in the file until they are used, for a look at the rest.

    Raises:
        UserError: If there is none, it is damaged, or holds more than tensors and plain values.
    """
    local = _local_path(path)
    if local is not None:
        _refuse_missing(local)
        fault = fault_of(local) if _manifest(local) else None
        if fault is not None:
            raise UserError(f"{path}: {fault}; take another checkpoint")
    try:
        if local is None:
            return super(DurableCheckpointIO, DurableCheckpointIO()).load_checkpoint(
                path, map_location, weights_only=True
            )
        loaded = torch.load(local, map_location=map_location, mmap=mmap, weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such checkpoint") from error
    except Exception as error:  # torch raises several kinds; all mean that this is no checkpoint to trust
        raise UserError(
            f"{path} is not a checkpoint that can be loaded ({type(error).__name__}): it is damaged, or "
            "holds more than tensors and plain values"
        ) from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path} holds a {type(loaded).__name__}, not a checkpoint; take another checkpoint")
    return cast("dict[str, Any]", loaded)


def manifest_path(path: Path) -> Path:
    """Return where the manifest of a checkpoint is."""
    return path.with_name(path.name + MANIFEST_SUFFIX)


_verified: dict[tuple[str, int, int, int], str] = {}
"""Checksums of files that this process has read to their end, by path, inode, size and time of change."""


def fault_of(path: Path) -> str | None:
    """Return what is wrong with a checkpoint by its manifest, None if it verifies."""
    if path.is_dir():
        return "is a folder"
    if not path.is_file():
        return "is not there: its save was cut short, or it was removed"
    contents = _manifest(path)
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
    """Return the newest checkpoint of a folder that verifies; the caller says what was passed over.

    Final weights are no fault: they are passed over without a word.

    Raises:
        UserError: If there is none at all, or none verifies; each is named with its fault.
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
    """Say whether a folder holds anything that is, was or should be a checkpoint."""
    return Path(folder).is_dir() and bool(_newest_first(Path(folder)))


def move_aside(folder: Path, after: int) -> Path | None:
    """Move checkpoints of later updates into a folder of their own: another run's, or damaged ones.

    Args:
        folder: Where they are.
        after: The update that a run has come to; those up to it stay.

    Returns:
        The new folder, None where there was nothing to move.
    """
    later = [path for path in _newest_first(folder) if _manifest(path) and _is_later(path, after)]
    if not later:
        return None
    aside = next(each for number in count(1) if not (each := folder / f"earlier-{number}").exists())
    aside.mkdir()
    for path in later:
        path.rename(aside / path.name)
        manifest_path(path).rename(manifest_path(aside / path.name))
    return aside


def _is_final(path: Path) -> bool:
    """Say whether a file is one of final weights by its name, and by its manifest where that can be read."""
    return path.name.startswith(f"{FINAL}-") and not any(each.resumable for each in _manifest(path))


def _is_later(path: Path, after: int) -> bool:
    """Say whether a file is of an update after that, or damaged and may be."""
    if not path.exists() or max(each.update for each in _manifest(path)) <= after:
        return False
    return fault_of(path) is not None or _content(path).update > after


def _content(path: Path) -> Content:
    """Return what a file that verifies holds, of what its manifest says that it may."""
    found = _checksum(path)
    return next(each for each in _manifest(path) if each.sha256 == found)


def sweep(folder: Path) -> list[Path]:
    """Remove what killed saves left in a folder: temporaries, and manifests whose file never came.

    Nobody else may be writing there.
    """
    lonely = [each for each in _manifests(folder) if not _described(each).exists()]
    for each in lonely:
        each.unlink(missing_ok=True)
    return [*remove_temporaries(folder), *lonely]


def _newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder by update, newest first; without a manifest the name tells it."""
    named = {each for each in folder.glob(f"*{SUFFIX}") if not each.name.startswith(".")}
    named |= {_described(each) for each in _manifests(folder)}

    def age(path: Path) -> tuple[int, float]:
        named = re.search(r"(\d+)$", path.name.removesuffix(SUFFIX))
        by_name = int(named[1]) if named else -1
        update = max((each.update for each in _manifest(path)), default=by_name)
        return update, path.stat().st_mtime if path.exists() else 0.0

    return sorted(named, key=age, reverse=True)


def _manifests(folder: Path) -> list[Path]:
    return [each for each in folder.glob(f"*{SUFFIX}{MANIFEST_SUFFIX}") if not each.name.startswith(".")]


def _described(manifest: Path) -> Path:
    return manifest.with_name(manifest.name.removesuffix(MANIFEST_SUFFIX))


def _manifest(path: Path) -> list[Content]:
    """Return what a checkpoint may hold by its manifest, the newest first; nothing where there is none."""
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


def _write_manifest(path: Path, contents: list[Content]) -> None:
    described = {"format": FORMAT_VERSION, "contents": [asdict(each) for each in contents]}
    text = json.dumps(described, indent=1).encode()
    replace_durably(manifest_path(path), lambda descriptor: write_all(descriptor, text))


def _checksum(path: Path) -> str:
    status = path.stat()
    key = (str(path.absolute()), status.st_ino, status.st_size, status.st_mtime_ns)
    if key not in _verified:
        _verified[key] = checksum(path)
    return _verified[key]


def _local_path(path: Any) -> Path | None:
    """Return a local path, None for one of another file system.

    Raises:
        UserError: If it is fetched from the web.
    """
    text = str(path)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    if any(link.lower().startswith(("http:", "https:")) for link in text.split("::")):
        raise UserError(f"{text}: checkpoints are not fetched from the web; download it first")
    return None if "://" in text else Path(text)


def _refuse_missing(path: Path) -> None:
    if path.is_file():
        return
    if (path / ".metadata").is_file():
        raise UserError(
            f"{path}: a folder of shards, which only trainer.strategy.save_distributed_checkpoint: true "
            "writes and only its own strategy continues, from Python; leave that false for one file"
        )
    inside = sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else []
    hint = f"; that folder holds {inside[-1]}" if inside else ""
    raise UserError(f"{path}: no such checkpoint file; give a {SUFFIX} that andrea fit wrote{hint}")


def _move_folder_aside(path: Path) -> None:
    """Give a folder that lies where a file is to be written another name."""
    if path.is_dir():
        aside = next(
            each for number in count(1) if not (each := path.with_name(f"{path.name}-{number}")).exists()
        )
        path.rename(aside)
        rank_zero_warn(f"{path} was a folder, where a checkpoint is to be written; it is {aside} now")


def _writing_error(path: Path, written: int, checkpoint: Mapping[str, Any], error: OSError) -> UserError:
    size = sum(_storages(checkpoint).values())
    kept = "; what was there before is as it was" if path.exists() else ""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason += "; free some space, or have checkpoints written elsewhere (dirpath)"
    elif written == 0:
        reason += "; check the folder and its permissions"
    return UserError(
        f"{path} could not be written: {reason}. {written:,} bytes were, of a checkpoint whose tensors take "
        f"{size:,}{kept}"
    )


def _storages(value: Any) -> dict[int, int]:
    """Return the bytes of all tensors' storages in nested values, each once."""
    if isinstance(value, Tensor):
        return {value.data_ptr(): value.untyped_storage().nbytes()}
    parts: Iterator[Any] = iter(())
    if isinstance(value, Mapping):
        parts = iter(cast("Mapping[Any, Any]", value).values())
    elif isinstance(value, (list, tuple)):
        parts = iter(cast("list[Any]", value))
    found: dict[int, int] = {}
    for part in parts:
        found |= _storages(part)
    return found


def say_passed_over(found: Found) -> None:
    """Name every newer checkpoint that did not verify."""
    for each in found.passed_over:
        rank_zero_info(f"passed over: {each}")
