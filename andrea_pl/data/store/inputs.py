"""Compares a source's current input with the input that a store was made from.

Every start compares paths, sizes and times of files: that of the content (`mtime`), and that of the inode
(`ctime`), which `cp -p` and `touch -r` cannot set back. If only times differ, or on request, all documents
are read and compared with those in the store, by a hash of each.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from andrea_pl.data.sources.documents import Problems, TextSource
from andrea_pl.data.sources.token_files import token_pieces
from andrea_pl.data.store.token_store import TokenStore
from andrea_pl.errors import UserError

STAMPS = 3
"""Path, size and `mtime`: a manifest's entry for a file."""

COLUMNS = ("digest", "bytes", "line", "origin")
"""Fields of a document's record in a store, except its place."""

COUNTED_BYTES = 1 << 30
"""Largest source, in bytes, whose changes are reported in documents, which requires reading it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The fields that identify a document without its text."""

    digest: int
    size: int
    line: int
    origin: str


class SourceInput:
    """A snapshot of one source's input.

    Args:
        source: The source.
        vocab_size: Number of ids, for token files.
        on_error: What to do about unreadable input.
    """

    def __init__(self, source: TextSource, vocab_size: int, on_error: Literal["raise", "skip"]) -> None:
        self.source = source
        self.vocab_size = vocab_size
        self.on_error: Literal["raise", "skip"] = on_error

    @cached_property
    def files(self) -> list[Path]:
        """The files in a fixed order; empty for other kinds of sources."""
        return self.source.files() if self.source.kind == "files" else []

    @cached_property
    def is_token_file(self) -> bool:
        """Whether the files hold tokens that another program wrote."""
        kinds = {self.source.format_of(file) == "tokens" for file in self.files}
        return self.source.is_token_file if len(kinds) > 1 else kinds == {True}

    @cached_property
    def entries(self) -> list[Any]:
        """Path, size, `mtime` and `ctime` in ns of each file; or Python's release and distributions."""
        if self.source.kind != "files":
            return self.source.fingerprint()
        stats = [(file, file.stat()) for file in self.files]
        return [[str(f.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for f, stat in stats]

    @property
    def stamps(self) -> list[Any]:
        """The input as recorded in manifests."""
        if self.source.kind != "files":
            return self.entries
        return [entry[:STAMPS] for entry in self.entries]

    def agrees(self, recorded: list[Any]) -> bool:
        """Return whether the input equals a record; records of earlier versions have no `ctime`."""
        return recorded in (self.entries, self.stamps)

    def may_agree(self, recorded: list[Any]) -> bool:
        """Return whether the documents may be unchanged although the input has changed."""
        if self.source.kind != "files":
            return True
        return [entry[1] for entry in recorded] == [entry[1] for entry in self.entries]

    @cached_property
    def documents(self) -> str:
        """A hash of all current documents; see `documents_of`."""
        return _hash_of(self.rows())

    def rows(self) -> Iterator[Row]:
        """Read all documents.

        Raises:
            UserError: If one cannot be read.
        """
        problems = Problems(self.on_error)
        if self.is_token_file:
            for _, size, mark, document in token_pieces(self.source, self.vocab_size, problems):
                yield Row(digest=mark, size=size, line=document.line, origin=document.origin)
            return
        for document in self.source.read(problems):
            yield Row(digest=document.digest, size=document.size, line=document.line, origin=document.origin)

    def change_from(self, store: TokenStore, recorded: list[Any]) -> str | None:
        """Return a short description of changes since a store was made, or None."""
        try:
            if self.agrees(recorded):
                return None
            if self.source.kind == "files" and sum(entry[1] for entry in self.entries) > COUNTED_BYTES:
                return _change_of_files(recorded, self.entries)
            if self.may_agree(recorded) and self.documents == documents_of(store):
                return None
            return change_of_documents(_digests_of(store), [row.digest for row in self.rows()])
        except (UserError, OSError) as error:
            return f"cannot be read any more ({error})"


def documents_of(store: TokenStore) -> str:
    """Return a hash of a store's documents, which equals that of their source while its text is unchanged."""
    origins: list[str] = store.manifest["origins"]
    columns = [cast("list[int]", store.records[name].tolist()) for name in COLUMNS]
    return _hash_of(
        Row(digest=each[0], size=each[1], line=each[2], origin=cast(str, origins[each[3]]))
        for each in zip(*columns, strict=True)
    )


def change_between(old: TokenStore, new: TokenStore) -> str:
    """Return a short description of how the documents of two stores differ."""
    return change_of_documents(_digests_of(old), _digests_of(new))


def change_of_documents(old: Iterable[int], new: Iterable[int]) -> str:
    """Return a short description of how two lists of document hashes differ.

    >>> change_of_documents([1, 2], [1, 2, 3])
    '1 document more'
    >>> change_of_documents([1, 2, 3], [1, 4])
    '1 document new, 2 gone'
    """
    before, after = Counter(old), Counter(new)
    more, fewer = (after - before).total(), (before - after).total()
    if not more and not fewer:
        return "the same documents in another order, or under other names"
    if not fewer:
        return f"{_counted(more)} more"
    if not more:
        return f"{_counted(fewer)} fewer"
    return f"{_counted(more)} new, {fewer:,} gone"


def _counted(number: int) -> str:
    return f"{number:,} document{'' if number == 1 else 's'}"


def _change_of_files(recorded: list[Any], entries: list[Any]) -> str:
    before, after = ({each[0]: each[1:STAMPS] for each in side} for side in (recorded, entries))
    both = before.keys() & after.keys()
    changed = sum(before[path] != after[path] for path in both)
    new, gone = len(after) - len(both), len(before) - len(both)
    return f"of its files {new:,} are new, {gone:,} gone, {changed:,} changed"


def _digests_of(store: TokenStore) -> list[int]:
    return cast("list[int]", store.records["digest"].tolist())


def _hash_of(rows: Iterable[Row]) -> str:
    total = hashlib.sha256()
    for row in rows:
        total.update(f"{row.digest} {row.size} {row.line} {row.origin}\n".encode(errors="surrogateescape"))
    return total.hexdigest()
