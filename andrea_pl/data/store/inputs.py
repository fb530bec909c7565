"""What a source's input is now, and how it differs from what a store was made from.

At every start paths, sizes and times are compared: of files the time of the content (`mtime`) and of the
entry (`ctime`), which `cp -p` and `touch -r` cannot set back. Where they differ and the sizes do not, or when
asked for, all documents are read and compared with those in the store, by a hash of each.
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
"""Path, size and time of the content: what manifests hold of each file."""

COLUMNS = ("digest", "bytes", "line", "origin")
"""What a store's records say of a document besides its place."""

COUNTED_BYTES = 1 << 30
"""Changes of a source up to this size are told in documents, which takes reading it; above, in files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What tells two documents apart without their text."""

    digest: int
    size: int
    line: int
    origin: str


class SourceInput:
    """The input of one source, looked at once.

    Args:
        source: The source.
        vocab_size: Number of ids, for token files.
        on_error: What to do with input that cannot be read.
    """

    def __init__(self, source: TextSource, vocab_size: int, on_error: Literal["raise", "skip"]) -> None:
        self.source = source
        self.vocab_size = vocab_size
        self.on_error: Literal["raise", "skip"] = on_error

    @cached_property
    def files(self) -> list[Path]:
        """The files, in a fixed order; none for other kinds."""
        return self.source.files() if self.source.kind == "files" else []

    @cached_property
    def is_token_file(self) -> bool:
        """Whether the files hold tokens that no tokenizer of ours wrote."""
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
        """What manifests hold of it."""
        if self.source.kind != "files":
            return self.entries
        return [entry[:STAMPS] for entry in self.entries]

    def agrees(self, recorded: list[Any]) -> bool:
        """Say whether nothing has changed by what was recorded; earlier versions recorded no `ctime`."""
        return recorded in (self.entries, self.stamps)

    def may_agree(self, recorded: list[Any]) -> bool:
        """Say whether the documents may be the same although something has changed."""
        if self.source.kind != "files":
            return True
        return [entry[1] for entry in recorded] == [entry[1] for entry in self.entries]

    @cached_property
    def documents(self) -> str:
        """A hash of all documents as they are now; see `documents_of`."""
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
        """Say in a few words what has changed since a store was made; None where nothing has."""
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
    """Return a hash of a store's documents, that of their source as long as its text stays what it was."""
    origins: list[str] = store.manifest["origins"]
    columns = [cast("list[int]", store.records[name].tolist()) for name in COLUMNS]
    return _hash_of(
        Row(digest=each[0], size=each[1], line=each[2], origin=cast(str, origins[each[3]]))
        for each in zip(*columns, strict=True)
    )


def change_between(old: TokenStore, new: TokenStore) -> str:
    """Say in a few words how the documents of two stores differ."""
    return change_of_documents(_digests_of(old), _digests_of(new))


def change_of_documents(old: Iterable[int], new: Iterable[int]) -> str:
    """Say in a few words how documents differ, each known by a hash.

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
