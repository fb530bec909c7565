"""Where text comes from: sources, the documents in them, and what to do with input that cannot be read."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from glob import glob
from pathlib import Path
from typing import Any, Literal, cast

from andrea_pl.data.listing import listed
from andrea_pl.data.plain_text import read_text_file
from andrea_pl.data.python_text import PythonPart, python_documents, python_fingerprint
from andrea_pl.data.records import AnyDocument, Document
from andrea_pl.errors import UserError

FORMATS = {
    "text": (".txt", ".md", ".rst"),
    "jsonl": (".jsonl",),
    "parquet": (".parquet",),
    "tokens": (".bin",),
}
SUFFIXES = tuple(suffix for suffixes in FORMATS.values() for suffix in suffixes)
FORMAT_OF = {suffix: name for name, suffixes in FORMATS.items() for suffix in suffixes}

Format = Literal["text", "jsonl", "parquet", "tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """One source of text, named so that its share and its losses can be followed.

    Args:
        name: Letters, digits, `-` and `_`; names the source in logs and in the cache.
        kind: `files` reads `paths`; `python` reads the text that every Python installation has; `tokens`
            takes `documents` as they stand.
        paths: Files, folders or globs of .txt, .md, .rst, .jsonl, .parquet, or nanoGPT's raw uint16 .bin. A
            text file is one document; a line of .jsonl or a row of .parquet is one, from its `text`, its
            `question` and `answer`, or its `messages` (a list of `role` and `content`).
        format: What the files are, whatever they are called: `text`, `jsonl`, `parquet` or `tokens`. Told by
            their names when left out.
        document_separator: Cuts text files into documents at this string, which is dropped.
        part: For `python`: `docstrings` (question and answer), `topics` (long prose), `readmes` (lists), or
            `all`.
        documents: For `tokens`: lists of token ids, used without a tokenizer and without an end-of-document
            token.
        end_of_document: For .bin files: the id after which a document ends. Left out, the file is cut into
            pieces of 8,192 tokens, each treated as a document.
        split: `hash` deals documents to training, validation and test by their content; the others take all.
        val_fraction: Share of its documents held out for validation; `data.val_fraction` when left out.
        weight: Its share under the mixture `Fixed`, in relation to the other sources'; 1 when left out.
        floor: Least weight in a mixture, before weights are normalised.
        max_epochs: How often its text may be gone through in a run; then it is drawn no more. Without limit
            when left out.
    """

    name: str
    kind: Literal["files", "python", "tokens"] = "files"
    paths: list[str] = field(default_factory=list[str])
    document_separator: str | None = None
    part: PythonPart = "all"
    documents: list[list[int]] = field(default_factory=list[list[int]])
    end_of_document: int | None = None
    split: Literal["hash", "train", "val", "test"] = "hash"
    format: Format | None = None
    val_fraction: float | None = None
    weight: float | None = None
    floor: float = 0.0
    max_epochs: float | None = None

    def __post_init__(self) -> None:
        """Refuse a source that can give nothing."""
        if not self.name or not all(letter.isalnum() or letter in "-_" for letter in self.name):
            raise UserError(f"source name {self.name!r}: use letters, digits, '-' and '_' only")
        if self.kind == "files" and not self.paths:
            raise UserError(
                f"source {self.name!r} has no paths: give files, folders or globs, or kind: python"
            )
        if self.kind != "files" and self.paths:
            raise UserError(f"source {self.name!r} is of kind {self.kind} and reads no paths: remove them")
        if self.kind == "tokens" and not self.documents:
            raise UserError(f"source {self.name!r} of kind tokens has no documents: give lists of token ids")
        if self.document_separator == "":
            raise UserError(f"source {self.name!r}: document_separator must not be empty")
        if self.format is not None and (self.kind != "files" or self.format not in FORMATS):
            raise UserError(
                f"source {self.name!r}: format must be one of {', '.join(FORMATS)}, for kind files; got "
                f"{self.format!r} for kind {self.kind}"
            )
        if self.val_fraction is not None and not 0 <= self.val_fraction < 1:
            raise UserError(f"source {self.name!r}: val_fraction must lie in [0, 1), got {self.val_fraction}")
        for name, value, most in (("weight", self.weight, math.inf), ("floor", self.floor, 1.0)):
            if value is not None and not (0 <= value <= most and math.isfinite(value)):
                to = f"to {most:g}" if math.isfinite(most) else "on, and finite"
                raise UserError(f"source {self.name!r}: {name} must lie from 0 {to}, got {value}")
        if self.max_epochs is not None and not self.max_epochs > 0:
            raise UserError(f"source {self.name!r}: max_epochs must be more than 0, got {self.max_epochs}")

    @property
    def is_weighed(self) -> bool:
        """Whether it has an option that only a mixture heeds."""
        return self.weight is not None or self.floor > 0 or self.max_epochs is not None

    @property
    def is_token_file(self) -> bool:
        """Whether the source is made of raw token files, which no tokenizer of ours wrote."""
        if self.kind != "files":
            return False
        kinds = {self.format_of(file) == "tokens" for file in self.files()}
        if len(kinds) > 1:
            raise UserError(
                f"source {self.name!r} mixes .bin token files and text: give each a source of its own"
            )
        return kinds == {True}

    def settings(self) -> dict[str, Any]:
        """Return what the prepared tokens depend on, as plain values."""
        paths = [str(Path(path).expanduser().absolute()) for path in self.paths]
        kept = {key: value for key, value in asdict(self).items() if key not in MIXING}
        return {**kept, "paths": paths}

    def format_of(self, file: Path) -> str:
        """Return what a file is."""
        return self.format or FORMAT_OF[file.suffix]

    def files(self) -> list[Path]:
        """Expand the paths, in a fixed order.

        Raises:
            UserError: If a path matches nothing or names a file of an unknown kind.
        """
        return listed(
            (self.name, tuple(self.paths), self.format),
            lambda: [file for path in self.paths for file in _expand(self.name, path, self.format)],
        )

    def fingerprint(self) -> list[Any]:
        """Return what changes with the input: path, size and time of files, or the installed Python."""
        if self.kind == "python":
            return python_fingerprint()
        stats = [(file, file.stat()) for file in self.files()]
        return [[str(file.resolve()), stat.st_size, stat.st_mtime_ns] for file, stat in stats]

    def read(self, problems: "Problems") -> Iterator[AnyDocument]:
        """Yield the documents of a text source, reading one file at a time."""
        if self.kind == "python":
            yield from python_documents(self.part)
            return
        for file in self.files():
            yield from _READERS[self.format_of(file)](file, self, problems)


MIXING = ("weight", "floor", "max_epochs")
"""Options of a source that its prepared tokens do not depend on."""


class Problems:
    """Input that could not be read: an error, or counted and passed over.

    Args:
        policy: `raise` stops at the first; `skip` counts them and keeps the messages.
    """

    def __init__(self, policy: Literal["raise", "skip"]) -> None:
        self.policy = policy
        self.messages: list[str] = []
        self.found_separator = False
        """Whether a text file held its source's `document_separator`."""

    def report(self, place: str, fault: str, remedy: str) -> None:
        """Raise or note one problem.

        Args:
            place: The file and, where there is one, the line.
            fault: What is wrong there.
            remedy: What the user can do, besides `on_error: skip`.
        """
        message = f"{place}: {fault}"
        if self.policy == "raise":
            raise UserError(f"{message}; {remedy}, or set data.on_error to skip to leave it out")
        self.messages.append(message)


def _expand(source: str, path: str, known: str | None) -> list[Path]:
    found = Path(path).expanduser()
    if found.is_dir():
        wanted = SUFFIXES if known is None else FORMATS[known]
        files = sorted(file for file in found.rglob("*") if file.is_file() and file.suffix in wanted)
    elif found.is_file():
        files = [found]
    else:
        matches = (Path(match) for match in glob(str(found), recursive=True))  # noqa: PTH207  (absolute too)
        files = sorted(match for match in matches if match.is_file())
    if not files:
        raise UserError(
            f"source {source!r}: nothing matches {path!r} (looked in {Path.cwd()}); give an existing file, a "
            f"folder or a glob of {', '.join(SUFFIXES)}"
        )
    for file in files:
        if known is None and file.suffix not in SUFFIXES:
            raise UserError(
                f"source {source!r}: {file} has no known kind; rename it to one of {', '.join(SUFFIXES)}, or "
                f"give the source a format: {', '.join(FORMATS)}"
            )
    return files


def _decode(file: Path, raw: bytes, line: int, problems: Problems) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line += raw[: error.start].count(b"\n")
        problems.report(
            f"{file}:{line}",
            f"not UTF-8 (byte 0x{raw[error.start]:02x})",
            "convert the file, for example with iconv",
        )
        return None


def _report_empty(file: Path, problems: Problems) -> None:
    problems.report(str(file), "empty file", "remove it")


def _read_text(file: Path, source: TextSource, problems: Problems) -> Iterator[AnyDocument]:
    return read_text_file(file, source.document_separator, problems)


def _read_jsonl(file: Path, source: TextSource, problems: Problems) -> Iterator[Document]:
    del source
    count = 0
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if not raw.strip():
                continue
            count += 1
            line = _decode(file, raw.removeprefix(b"\xef\xbb\xbf"), number, problems)
            if line is None:
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                problems.report(f"{file}:{number}", f"broken JSON ({error})", "mend the line")
                continue
            text = _record_text(record, f"{file}:{number}", problems)
            if text is not None:
                yield Document(text=text, origin=str(file), line=number)
    if not count:
        _report_empty(file, problems)


def _read_parquet(file: Path, source: TextSource, problems: Problems) -> Iterator[Document]:
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise UserError(
            f"{file}: reading .parquet needs pyarrow; pip install 'andrea-pl[parquet]'"
        ) from error
    del source
    if not file.stat().st_size:
        _report_empty(file, problems)
        return
    row = 0
    try:
        table = cast(Any, parquet).ParquetFile(file)
        for batch in table.iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                row += 1
                text = _record_text(record, f"{file}:{row}", problems)
                if text is not None:
                    yield Document(text=text, origin=str(file), line=row)
    except (ValueError, OSError) as error:  # what pyarrow raises is one or the other
        problems.report(f"{file}:{row + 1}", f"broken parquet ({error})", "write it again")
        return
    if not row:
        _report_empty(file, problems)


def _record_text(record: Any, place: str, problems: Problems) -> str | None:
    """Return the text of one record, whichever of the three shapes it has."""
    remedy = "give 'text', or 'question' and 'answer', or 'messages' with 'role' and 'content', all strings"
    if not isinstance(record, dict):
        problems.report(place, f"a {type(record).__name__} where an object is expected", remedy)
        return None
    fields = cast(dict[str, Any], record)
    messages = fields.get("messages")
    if fields.get("text") is not None:
        parts = [fields["text"]]
    elif fields.get("question") is not None and fields.get("answer") is not None:
        parts = ["Question: ", fields["question"], "\nAnswer: ", fields["answer"], "\n"]
    elif isinstance(messages, list) and messages:
        parts: list[Any] = []
        for message in cast(list[Any], messages):
            turn = cast(dict[str, Any], message) if isinstance(message, dict) else {}
            parts += [turn.get("role"), ": ", turn.get("content"), "\n"]
    else:
        problems.report(place, f"missing key (found: {', '.join(map(str, fields)) or 'none'})", remedy)
        return None
    if not all(isinstance(part, str) for part in parts):
        problems.report(place, "a value that should be a string is not", remedy)
        return None
    text = "".join(parts)
    if not text.strip():
        problems.report(place, "empty text", "remove the record")
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        problems.report(place, "half a surrogate pair, which no UTF-8 can hold", "mend the escape")
        return None
    return text


_READERS: dict[str, Callable[[Path, TextSource, Problems], Iterator[AnyDocument]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}
