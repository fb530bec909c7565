"""Checkpoint files: written atomically, verified before they are read, never unpickled.

<folder>/update-000040.ckpt        the output of torch.save
         update-000040.ckpt.json   its manifest: size and SHA-256 of the current and the coming content
         final-000040.ckpt         weights that a callback put in place at the end, such as an average
         .andrea-*.part            a temporary file; the next start removes one left by a kill
"""

import errno
import hashlib
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from andrea_callbacks.hooks.packages import twin_of, with_twin
from andrea_callbacks.numerics.atomic_write import (
    make_folder_durably,
    replace_durably,
    write_all,
)
from andrea_pl.errors import UserError
from andrea_pl.runs.manifest import (
    KEPT_CONTENTS,
    SUFFIX,
    Content,
    fault_of,
    manifest_path,
    read_manifest,
    write_manifest,
)


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints that a kill, a full disk or a power cut cannot tear, and reads no pickle.

    A local file is streamed into a temporary file in the same folder while its checksum is computed, then
    synchronised and renamed. Its manifest is on the disk before that. If a file has a manifest, it is loaded
    only if both agree. Only tensors and plain values are loaded. Any rank may load; Lightning saves on rank
    zero.

    Lightning's own IO writes and reads paths of other file systems (`s3://`, `gs://` …). Whether a file
    appears there atomically depends on the storage. It has no manifest, and damage is found when it is
    loaded. `http://` and `https://` are refused.

    Raises:
        UserError: If a file cannot be written (the message names the path and the bytes written), does not
            agree with its manifest, or holds more than tensors and plain values.
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
            write_manifest(local, [content, *read_manifest(local)[:KEPT_CONTENTS]])

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
        """Verify and load a checkpoint. `weights_only=False` is refused."""
        if weights_only is False:
            raise UserError(f"{path}: weights_only=False would run what a checkpoint says; it is never used")
        return read_checkpoint(path, map_location)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, then its manifest."""
        super().remove_checkpoint(path)
        local = _local_path(path)
        if local is not None:
            manifest_path(local).unlink(missing_ok=True)


class _HashingStream:
    """The stream that torch.save writes to: it writes a descriptor, hashes and counts."""

    def __init__(self) -> None:
        self.descriptor = -1
        self.digest = hashlib.sha256()
        self.size = 0
        self.fault: OSError | None = None

    def write(self, content: Any) -> int:
        """Write the whole content."""
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
        """Do nothing: `write` is not buffered."""


def read_checkpoint(path: str | Path, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """Verify a checkpoint by its manifest, if it has one, and load it.

    Args:
        path: A local file, or a path of another file system that fsspec supports, except http.
        map_location: Device for the tensors.
        mmap: Whether to leave tensors in the file until they are used, to read only the rest.

    Raises:
        UserError: If it does not exist, is damaged, or holds more than tensors and plain values.
    """
    local = _local_path(path)
    if local is not None:
        _refuse_missing(local)
        fault = fault_of(local) if read_manifest(local) else None
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


def _local_path(path: Any) -> Path | None:
    """Return a local path, None for a path of another file system.

    Raises:
        UserError: If it is a web address.
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
    """Rename a folder that is in the way of a file."""
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
    """Return the sizes in bytes of all tensor storages in nested values, each once."""
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


def use_durable_io(trainer: pl.Trainer) -> None:
    """Give a trainer a `DurableCheckpointIO`, unless it has another IO than Lightning's own."""
    given = trainer.strategy.checkpoint_io
    if type(given) in (TorchCheckpointIO, twin_of(TorchCheckpointIO)):
        trainer.strategy.checkpoint_io = DurableCheckpointIO()
    elif not isinstance(given, DurableCheckpointIO):
        rank_zero_warn(
            f"checkpoints are written by {type(given).__name__}, as safely as it does, and without a "
            "manifest, so that --resume does not take them"
        )
