"""Token stores: the memory-mapped tokens of one source, and a record of their input.

<store>/manifest.json   settings and input of the tokens, their number, and the checksums of the other files
        tokens.bin      all tokens, uint16 or uint32, document after document
        documents.npy   one record per document: start, length, bytes, split and origin

These three files never change. A hash of their contents identifies a store (`content_id`).
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from andrea_callbacks.numerics.atomic_write import checksum, synchronize_folder
from andrea_pl.data.store.locking import hold
from andrea_pl.data.store.repetition import repetition
from andrea_pl.errors import UserError

FORMAT_VERSION = 5
FILES = ("tokens.bin", "documents.npy")
HELD = "documents.npy"
"""The file on which processes that use a store hold a shared lock."""
DTYPES = ("<u2", "<u4")
MANIFEST = {
    "dtype": str,
    "tokens": int,
    "documents": int,
    "repetition": float,
    "origins": list,
    "sha256": dict,
}
"""Required keys of a manifest and their types."""
TABLE_DOCUMENTS = 1 << 16
"""Number of records to collect before they become an array, which takes a fifth of their memory."""
SPLITS = ("train", "val", "test")

RECORD = np.dtype(
    [
        ("start", "<i8"),
        ("tokens", "<i8"),
        ("bytes", "<i8"),
        ("split", "u1"),
        ("origin", "<i4"),
        ("line", "<i8"),
        ("digest", "<u8"),
    ]
)


class TokenStore:
    """A prepared source, opened for reading. `--prune` does not remove it while it is open.

    Args:
        folder: A folder that `StoreWriter` wrote.

    Raises:
        UserError: If the folder holds no complete store.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        descriptor = hold(self.folder / HELD)
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor)
        self.manifest: dict[str, Any] = read_manifest(self.folder)
        table = self.folder / "documents.npy"
        try:
            self.records: NDArray[Any] = np.load(table, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{table} cannot be read ({error}); delete {self.folder}") from error
        if self.manifest["dtype"] not in DTYPES:
            raise UserError(
                f"{self.folder}/manifest.json names the dtype {self.manifest['dtype']!r}, which is none of "
                f"tokens; delete {self.folder}"
            )
        dtype = np.dtype(self.manifest["dtype"])
        file = self.folder / "tokens.bin"
        expected = self.manifest["tokens"] * dtype.itemsize
        size = file.stat().st_size if file.exists() else 0
        if size != expected:
            raise UserError(
                f"{file} has {size} bytes where its manifest says {expected}; delete {self.folder}"
            )
        if self.records.dtype != RECORD or not _lies_within(self.records, self.manifest["tokens"]):
            raise UserError(f"{table} is no table of documents in {file}; delete {self.folder}")
        self.tokens: NDArray[Any] = np.memmap(file, dtype=dtype, mode="r") if expected else np.empty(0, dtype)

    @staticmethod
    def verify(folder: Path) -> None:
        """Read a store's files to their end and compare them with its manifest.

        Raises:
            UserError: If a file has changed; the message names it.
        """
        expected = cast("dict[str, str]", read_manifest(folder)["sha256"])
        for name in FILES:
            try:
                found = checksum(folder / name)
            except OSError as error:
                raise UserError(f"{folder / name} cannot be read ({error.strerror or error})") from error
            if found != expected.get(name):
                raise UserError(f"{folder / name} is not what its manifest says (SHA-256 {found[:12]})")

    @property
    def content(self) -> str:
        """What the store is known by; see `content_id`."""
        return content_id(self.manifest)

    def split(self, name: str) -> "StoreSplit":
        """Return the documents of one split: `train`, `val` or `test`."""
        return StoreSplit(self, np.flatnonzero(self.records["split"] == SPLITS.index(name)))

    @property
    def repetition(self) -> float:
        """Share of the text that repeats itself; see `andrea_pl.data.store.repetition`."""
        return float(self.manifest["repetition"])

    def describe(self, document: int, lines: int = 0) -> str:
        """Return a document's place, or that of a line in it, as `file:line`."""
        record = self.records[document]
        return f"{self.origin(record)}:{record['line'] + lines}"

    def origin(self, record: Any) -> str:
        """Return the file, or other origin, of a record's document."""
        return self.manifest["origins"][record["origin"]]


class StoreSplit(Sequence[NDArray[Any]]):
    """The documents of one split, read lazily from the memory map.

    Args:
        store: The store.
        documents: Numbers of the documents in the store.
    """

    def __init__(self, store: TokenStore, documents: NDArray[np.int64]) -> None:
        self.store = store
        self.documents = documents
        self.lengths: NDArray[np.int64] = store.records["tokens"][documents]
        """Tokens in each document, including the end-of-document token."""

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: Any) -> Any:
        """Return the tokens of one document as a view of the memory map."""
        record = self.store.records[self.documents[index]]
        start = int(record["start"])
        return self.store.tokens[start : start + int(record["tokens"])]


class StoreWriter:
    """Collects documents into a store under a temporary name, until `writing_store` renames it.

    Args:
        folder: The temporary folder.
        vocab_size: Number of ids, which decides between two and four bytes per token.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder = folder
        self.dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self.documents = 0
        self.tokens = 0
        self.content = ""
        """What the store is known by, once it is closed; see `content_id`."""
        self._file: BinaryIO = (folder / "tokens.bin").open("wb")
        self._begun = 0
        self._records: list[tuple[int, ...]] = []
        self._tables: list[NDArray[Any]] = []
        self._origins: dict[str, int] = {}

    def add(
        self,
        tokens: Sequence[int] | NDArray[Any],
        *,
        size: int,
        split: str,
        origin: str,
        line: int,
        digest: int = 0,
    ) -> None:
        """Append a document of `size` bytes, whose content hashes to `digest`.

        `tokens` follow tokens of the same document that were passed to `write` before.
        """
        self.write(tokens)
        place = self._origins.setdefault(origin, len(self._origins))
        length = self.tokens - self._begun
        self._records.append((self._begun, length, size, SPLITS.index(split), place, line, digest))
        self._begun = self.tokens
        self.documents += 1
        if len(self._records) >= TABLE_DOCUMENTS:
            self._tables.append(np.array(self._records, dtype=RECORD))
            self._records = []

    def write(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Append tokens of a document that `add` will end, so that a long one never fills the memory."""
        self._file.write(np.asarray(tokens, dtype=self.dtype).tobytes())
        self.tokens += len(tokens)

    def close(self, manifest: dict[str, Any]) -> None:
        """Write the table of documents and the manifest, and synchronise everything with the disk."""
        sync_and_close(self._file)
        with (self.folder / "documents.npy").open("wb") as table:
            np.save(table, np.concatenate([*self._tables, np.array(self._records, dtype=RECORD)]))
            sync_and_close(table)
        written = self.folder / "tokens.bin"
        counts = {
            "format": FORMAT_VERSION,
            "dtype": self.dtype.str,
            "tokens": self.tokens,
            "documents": self.documents,
            "repetition": repetition(np.memmap(written, self.dtype, mode="r")) if self.tokens else 0.0,
            "sha256": {name: checksum(self.folder / name) for name in FILES},
        }
        with (self.folder / "manifest.json").open("wb") as text:
            text.write(json.dumps({**manifest, **counts, "origins": list(self._origins)}, indent=1).encode())
            sync_and_close(text)
        self.content = content_id(counts)

    def abandon(self) -> None:
        """Close the open file without finishing the store, and drop its buffer."""
        try:
            self._file.close()
        except OSError:
            return


def _lies_within(records: NDArray[Any], tokens: int) -> bool:
    """Return whether all documents of a table lie within so many tokens."""
    starts, lengths = records["start"], records["tokens"]
    return bool(((starts >= 0) & (lengths >= 0) & (starts + lengths <= tokens)).all())


def sync_and_close(file: BinaryIO) -> None:
    """Synchronise a written file with the disk before it is renamed."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


@contextmanager
def writing_store(folder: Path, vocab_size: int, by_content: bool = False) -> Generator[StoreWriter]:
    """Write a store atomically: under its name there is a complete store or none.

    Args:
        folder: The store's final folder.
        vocab_size: Number of ids.
        by_content: Whether to append the content id to the name, and to use an existing store of that name.
            The writer's `folder` is the final place.

    Raises:
        UserError: If the disk is full or the folder cannot be written. An existing store is unchanged.
    """
    temporary = None
    writer = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        temporary.mkdir()
        writer = StoreWriter(temporary, vocab_size)
        yield writer
        writer.folder = version_folder(folder, writer.content) if by_content else folder
        _install(temporary, writer.folder, may_be_there=by_content)
    except OSError as error:
        raise disk_error(folder, error) from error
    finally:
        if writer is not None:
            writer.abandon()
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _install(temporary: Path, folder: Path, may_be_there: bool) -> None:
    """Rename a complete store to its name, unless another process has put a complete one there."""
    synchronize_folder(temporary)
    while True:
        try:
            temporary.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            synchronize_folder(folder.parent)
            return
        if may_be_there and _is_whole(folder):
            (temporary / "manifest.json").replace(folder / "manifest.json")  # origins may be called otherwise
            return
        aside = temporary.with_name(f"{temporary.name}-{secrets.token_hex(2)}")
        with suppress(FileNotFoundError):
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        TokenStore.verify(folder)
    except UserError:
        return False
    return True


def version_folder(folder: Path, content: str) -> Path:
    """Return the path of a source's store with this content."""
    return folder.with_name(f"{folder.name}.{content}")


def content_id(manifest: Mapping[str, Any]) -> str:
    """Return a store's identity: a hash of its tokens and its table of documents."""
    return fingerprint(manifest["sha256"])


def disk_error(path: Path, error: OSError) -> UserError:
    """Return the error for a path that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"{path}: the disk is full; free some space or point `cache_dir` at another disk")
    place = Path(str(error.filename or path))
    remedy = "check the path and its permissions"
    owner = _other_owner(place) if error.errno in (errno.EACCES, errno.EPERM) else None
    if owner is not None:
        remedy = (
            f"it belongs to {owner}, who can let others write (chmod -R g+rwX, and umask 002 from then on); "
            "or point `cache_dir` at a folder of your own"
        )
    return UserError(f"{place}: {error.strerror or error}; {remedy}")


def _other_owner(path: Path) -> str | None:
    """Return the other user who owns a path that we cannot write, or its folder."""
    there = next((each for each in (path, *path.parents) if os.path.lexists(each)), Path("/"))
    closed = [each for each in (there, there.parent) if not os.access(each, os.W_OK)]
    barred = next((each for each in (there, *closed) if each.lstat().st_uid != os.geteuid()), None)
    if barred is None:
        return None
    try:
        return barred.owner()
    except (KeyError, OSError):
        return f"user {barred.lstat().st_uid}"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a store's manifest.

    Raises:
        UserError: If there is no manifest, or it has another format.
    """
    try:
        manifest: Any = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        version = manifest["format"]
        if version == FORMAT_VERSION:
            for key, kind in MANIFEST.items():
                if not isinstance(manifest[key], kind):
                    raise TypeError(key)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder} holds no complete token store; run andrea prepare") from error
    if version != FORMAT_VERSION:
        raise UserError(f"{folder} is of format {version}, this version reads {FORMAT_VERSION}; delete it")
    return cast(dict[str, Any], manifest)


def fingerprint(value: Any) -> str:
    """Return a short hash of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
