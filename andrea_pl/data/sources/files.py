"""Finds and opens a source's files."""

import gzip
import io
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, cast

from andrea_pl.errors import UserError

FORMATS = {
    "text": (".txt", ".md", ".rst"),
    "jsonl": (".jsonl",),
    "parquet": (".parquet",),
    "tokens": (".bin",),
}
SUFFIXES = tuple(suffix for suffixes in FORMATS.values() for suffix in suffixes)
FORMAT_OF = {suffix: name for name, suffixes in FORMATS.items() for suffix in suffixes}
GZIP = ".gz"
UNPACKERS = {".zst": "zstd -d", ".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip", ".lz4": "lz4 -d"}
"""Unsupported compressions by extension, and the command that decompresses each."""

_SPECIAL = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
_WILDCARD = re.compile(r"[*?\[]")


def open_bytes(file: Path) -> BinaryIO:
    """Open a file for sequential reading of bytes; a `.gz` file is decompressed."""
    if not is_gzip(file):
        return file.open("rb")
    return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, gzip.open(file))))


@contextmanager
def open_seekable(file: Path) -> Generator[BinaryIO]:
    """Open a file for random access; a `.gz` file is first decompressed into a temporary file."""
    if not is_gzip(file):
        with file.open("rb") as content:
            yield content
        return
    with tempfile.TemporaryFile() as whole:
        with open_bytes(file) as packed:
            shutil.copyfileobj(packed, whole)
        whole.seek(0)
        yield cast(BinaryIO, whole)


def is_gzip(file: Path) -> bool:
    """Return whether a file's name says that it is compressed by gzip."""
    return file.name.lower().endswith(GZIP)


def suffix_of(name: str) -> str:
    """Return a file name's extension in lower case, including a compression's: `.txt`, `.jsonl.gz`."""
    stem, last = _split_suffix(name)
    return _split_suffix(stem)[1] + last if last == GZIP or last in UNPACKERS else last


def format_of_name(name: str) -> str | None:
    """Return a file's format by its name, None if unknown."""
    return FORMAT_OF.get(suffix_of(name).removesuffix(GZIP))


def shown(path: str | Path) -> str:
    """Return a path for a message, quoted if some of its characters are not visible."""
    text = str(path)
    return text if text.isprintable() and text == text.strip() else repr(text)


@dataclass(slots=True, kw_only=True)
class Found:
    """The files that a source's paths name.

    Args:
        files: The files to read, in the order of the paths, sorted within each.
        real: Their paths without links, in the same order.
        passed_over: Paths that are not read, by extension or kind.
    """

    files: list[Path] = field(default_factory=list[Path])
    real: list[str] = field(default_factory=list[str])
    passed_over: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def describe(self) -> str:
        """Return one line with counts of skipped files; empty if there are none."""
        kinds = sorted(self.passed_over, key=lambda kind: (not kind.startswith("."), kind))
        return ", ".join(_describe(kind, self.passed_over[kind]) for kind in kinds) + _how_to_export(
            self.passed_over.get(".arrow", set())
        )


def find_files(source: str, paths: Sequence[str], known: str | None) -> Found:
    """Find the files that paths, folders and globs name, each file once.

    A folder is searched like the glob `FOLDER/**`: linked folders are entered, and hidden names are skipped
    unless a path names them. The case of extensions does not matter. With a given format a folder gives the
    files with its extensions, and a glob everything that it matches.

    Args:
        source: Name of the source, for messages.
        paths: Files, folders and globs.
        known: The format of all files, None if their names decide.

    Raises:
        UserError: If a path gives no file, or is a file of an unknown format.
    """
    found = Found()
    folders: dict[str, str] = {}
    taken: set[str] = set()
    for path in paths:
        search = _Search(known)
        for file, is_link in _real_first(search.expand(source, path)):
            real = os.path.realpath(file) if is_link else _real_path(file, folders)
            if real in taken:
                search.pass_over("second name of a file", file)
                continue
            taken.add(real)
            search.taken.append((Path(file), real))
        for kind, places in search.passed_over.items():
            found.passed_over.setdefault(kind, set()).update(places)
        search.taken.sort(key=lambda each: each[0].parts)
        found.files += [file for file, _ in search.taken]
        found.real += [real for _, real in search.taken]
    return found


def _real_first(candidates: Iterable[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Order candidates so that a file's own name comes before links to it."""
    return sorted(candidates, key=lambda each: (each[1], each[0]))


def _real_path(file: str, folders: dict[str, str]) -> str:
    """Return the path without links of something that is not itself a link; folders are resolved once."""
    folder, _, name = file.rpartition("/")
    if folder not in folders:
        folders[folder] = os.path.realpath(folder or ("/" if file.startswith("/") else "."))
    return f"{folders[folder].rstrip('/')}/{name}"


class _Search:
    """The files that one path names."""

    def __init__(self, known: str | None) -> None:
        self.known = known
        self.enters_folders = False
        self.passed_over: dict[str, set[str]] = {}
        self.taken: list[tuple[Path, str]] = []

    def pass_over(self, kind: str, path: str) -> None:
        self.passed_over.setdefault(kind, set()).add(path)

    def expand(self, source: str, path: str) -> list[tuple[str, bool]]:
        """Return the files that a path names, and whether each is a link."""
        given, mode = _look_up(source, path)
        if mode is not None and stat.S_ISREG(mode):
            self._refuse_unknown(source, given)
            return [(str(given), given.is_symlink())]
        if mode is not None and not stat.S_ISDIR(mode):
            raise UserError(
                f"source {source!r}: {shown(given)} is a {_kind(mode)}, and text is read more than once; "
                "write it into a file and give that"
            )
        if mode is None:
            folder, parts = _parts(given)
            self.enters_folders = "**" in parts
            files = self._filtered(self._glob(folder, parts), None if self.known else SUFFIXES)
        else:
            files = self._filtered(self._below(str(given)), FORMATS[self.known] if self.known else SUFFIXES)
        if not files:
            raise UserError(f"source {source!r}: {self._nothing(path, given)}")
        return files

    def _refuse_unknown(self, source: str, file: Path) -> None:
        if self.known is not None or format_of_name(file.name) is not None:
            return
        remedy = (
            f"rename it to one of {', '.join(SUFFIXES)}, or give the source a format: {', '.join(FORMATS)}"
        )
        suffix = file.suffix.lower()
        if suffix in UNPACKERS:
            remedy = f"it is compressed: decompress it with {UNPACKERS[suffix]}"
        export = _how_to_export({str(file)}) if suffix == ".arrow" else ""
        raise UserError(f"source {source!r}: {shown(file)} has no known kind; {remedy}{export}")

    def _filtered(
        self, candidates: Iterable[tuple[str, bool]], wanted: tuple[str, ...] | None
    ) -> list[tuple[str, bool]]:
        """Keep the files of the wanted extensions, None for any, and count the others."""
        kept: list[tuple[str, bool]] = []
        for file, is_link in candidates:
            suffix = suffix_of(file.rpartition("/")[2])
            if wanted is None or suffix.removesuffix(GZIP) in wanted:
                kept.append((file, is_link))
            else:
                self.pass_over(suffix or "no extension", file)
        return kept

    def _nothing(self, path: str, given: Path) -> str:
        """Return why a path gives no file."""
        if given.is_symlink():
            return (
                f"{shown(given)} is a link to {shown(given.readlink())}, which does not exist; mend the link"
            )
        if re.match(r"\w+://", path):
            return f"{path!r} is an address, and files of this machine are read; download it first"
        known = ", ".join(SUFFIXES if self.known is None else FORMATS[self.known])
        if self.passed_over:
            passed = Found(passed_over=self.passed_over).describe()
            return (
                f"{path!r} gives no file to read, only {passed}; give files of {known}, also with {GZIP}, or "
                f"give the source a format ({', '.join(FORMATS)}) and a glob"
            )
        brackets = (
            "; brackets in a glob stand for one of the characters between them: write [[] for a bracket that "
            "is part of a name"
        )
        return (
            f"nothing matches {path!r} (looked in {Path.cwd()}); give an existing file, a folder or a glob "
            f"of {known}{brackets if '[' in path else ''}"
        )

    def _glob(self, folder: str, parts: Sequence[str]) -> Iterator[tuple[str, bool]]:
        """Yield a pattern's matches below a folder. A part that exists literally is not a pattern."""
        part, rest = parts[0], parts[1:]
        if part == "**":
            yield from self._any_depth(folder, rest)
            return
        literal = f"{folder}/{part}"
        if part != "*" and os.path.lexists(literal):
            yield from self._descend(literal, rest)
        elif _WILDCARD.search(part):
            for entry in self._list(folder):
                if _matches(entry.name, part):
                    yield from self._descend(entry.path, rest)

    def _any_depth(self, folder: str, rest: Sequence[str]) -> Iterator[tuple[str, bool]]:
        if not rest:
            yield from self._below(folder or "/")
            return
        for each, _ in self._folders(folder or "/"):
            yield from self._glob(each.rstrip("/"), rest)

    def _descend(self, path: str, rest: Sequence[str]) -> Iterator[tuple[str, bool]]:
        if not rest:
            yield from self._file(path, Path(path).is_symlink())
        elif Path(path).is_dir():
            yield from self._glob(path, rest)

    def _below(self, folder: str) -> Iterator[tuple[str, bool]]:
        """Yield the files at any depth below a folder."""
        for _, entries in self._folders(folder):
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    yield entry.path, False
                elif not entry.is_dir():
                    yield from self._file(entry.path, entry.is_symlink())

    def _folders(self, root: str) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
        """Yield a folder and all folders below it with entries, each once, preferably without links."""
        entered: set[str] = set()
        folders: list[str] = [root]
        links: list[str] = []
        while folders or links:
            folder = folders.pop() if folders else links.pop(links.index(min(links)))
            real = os.path.realpath(folder)
            if real in entered:
                continue
            entered.add(real)
            entries = self._visible(folder)
            yield folder, entries
            folders += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
            links += [entry.path for entry in entries if entry.is_symlink() and entry.is_dir()]

    def _visible(self, folder: str) -> list[os.DirEntry[str]]:
        visible: list[os.DirEntry[str]] = []
        for entry in self._list(folder):
            if entry.name.startswith("."):
                self.pass_over("hidden", entry.path)
            else:
                visible.append(entry)
        return visible

    def _list(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder or "/") as entries:
                return list(entries)
        except OSError as error:
            self.pass_over(f"folder that cannot be listed, {_reason(error)}", folder)
            return []

    def _file(self, path: str, is_link: bool) -> Iterator[tuple[str, bool]]:
        """Yield a path if it is a regular file; count anything else."""
        try:
            mode = Path(path).stat().st_mode
        except OSError as error:
            self.pass_over("broken link" if is_link else f"unreadable, {_reason(error)}", path)
            return
        if stat.S_ISREG(mode):
            yield path, is_link
        elif not stat.S_ISDIR(mode):
            self.pass_over(_kind(mode), path)
        elif not self.enters_folders:
            self.pass_over("folder, which only ** enters", path)


def _look_up(source: str, path: str) -> tuple[Path, int | None]:
    """Return a path with `~` expanded, and its mode; None if nothing has exactly that name."""
    try:
        given = Path(path).expanduser()
        return given, given.stat().st_mode
    except FileNotFoundError:
        return Path(path).expanduser(), None
    except (OSError, ValueError, RuntimeError) as error:  # no access, a NUL in it, no such user
        raise UserError(f"source {source!r}: {shown(path)} cannot be read ({_reason(error)})") from error


def _parts(pattern: Path) -> tuple[str, list[str]]:
    """Cut a pattern into the folder to start from, without its last slash, and the parts below it."""
    parts = list(pattern.parts)
    return ("", parts[1:] or ["*"]) if pattern.is_absolute() else (".", parts or ["*"])


def _matches(name: str, pattern: str) -> bool:
    """Match a name as a shell does, but ignore the case of known extensions."""
    if name.startswith(".") and not pattern.startswith("."):
        return False
    suffix = suffix_of(pattern)
    if suffix.removesuffix(GZIP) in FORMAT_OF and name.lower().endswith(suffix):
        return fnmatchcase(name[: -len(suffix)], pattern[: -len(suffix)])
    return fnmatchcase(name, pattern)


def _split_suffix(name: str) -> tuple[str, str]:
    dot = name.rfind(".")
    return (name[:dot], name[dot:].lower()) if 0 < dot < len(name) - 1 else (name, "")


def _kind(mode: int) -> str:
    return _SPECIAL.get(stat.S_IFMT(mode), "special file")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _describe(kind: str, places: set[str]) -> str:
    if kind.startswith(".") or kind in ("no extension", "hidden"):
        return f"{shown(kind)} ({len(places)})"
    return f"{kind} ({len(places)}: {shown(min(places))}{', …' if len(places) > 1 else ''})"


def _how_to_export(arrow: set[str]) -> str:
    """Return how to export the Hugging Face dataset that arrow files belong to, if they do."""
    for file in sorted(arrow):
        folder = Path(file).parent
        if (folder.parent / "dataset_dict.json").is_file():
            call = f"datasets.load_from_disk({str(folder.parent)!r})[{folder.name!r}]"
        elif (folder / "state.json").is_file() or (folder / "dataset_info.json").is_file():
            call = f"datasets.load_from_disk({str(folder)!r})"
        else:
            continue
        target = f"{folder.name}.parquet"
        return (
            f"; {shown(folder)} holds a Hugging Face data set that save_to_disk wrote: export it with "
            f"{call}.to_parquet({target!r}), or with to_json, and give that file"
        )
    return ""
