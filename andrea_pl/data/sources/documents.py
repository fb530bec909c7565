"""Text sources, their documents, and the handling of unreadable input."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from lightning.pytorch.utilities import rank_zero_info

from andrea_pl.data.sources.content import UNREADABLE, content_fault, read_fault
from andrea_pl.data.sources.files import (
    FORMATS,
    Found,
    find_files,
    format_of_name,
    open_bytes,
    open_seekable,
    shown,
)
from andrea_pl.data.sources.listing import listed
from andrea_pl.data.sources.plain_text import read_text_file
from andrea_pl.data.sources.python_text import PythonPart, python_documents, python_fingerprint
from andrea_pl.data.sources.records import AnyDocument, Document
from andrea_pl.deprecation import old_options
from andrea_pl.errors import UserError

Format = Literal["text", "jsonl", "parquet", "tokens"]
TokenDtype = Literal["uint16", "uint32"]
LARGEST_ID = {"uint16": 2**16 - 1, "uint32": 2**32 - 1}
"""Largest id of each dtype of token files."""


@old_options(floor="min_weight")
@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """A named source of text, whose share and losses are followed separately.

    Args:
        name: Letters, digits, `-` and `_`; names the source in logs and in the cache.
        kind: `files` reads `paths`; `python` reads the text in every Python installation; `tokens` uses
            `documents`.
        paths: Files, folders or globs of .txt, .md, .rst, .jsonl, .parquet, or .bin (token ids, raw as
            nanoGPT writes them or with llm.c's header), each possibly compressed as .gz. A document is a text
            file, a line of .jsonl or a row of .parquet, from its `text`, its `question` and `answer`, or its
            `messages` (a list of `role` and `content`). Hidden files (`.name`) are skipped unless a path
            names them.
        format: Type of all files: `text`, `jsonl`, `parquet` or `tokens`. By default the extension decides.
            With a format, a folder gives the files with its extensions, and a glob every file that it
            matches.
        document_separator: String at which text files are cut into documents; it is dropped.
        part: For `python`: `docstrings` (question and answer), `topics` (long prose), `readmes` (lists), or
            `all`.
        documents: For `tokens`: lists of token ids, used without a tokenizer and without an end-of-document
            token.
        end_of_document: For .bin files: the id that ends a document. By default the file is cut into pieces
            of 8,192 tokens, each treated as a document.
        token_dtype: For raw .bin files: `uint16` or `uint32`. By default llm.c's header decides; a file
            without a header is uint16.
        split: `hash` assigns documents to training, validation and test by their content. The other values
            assign all documents to one split.
        val_fraction: Share of this source's documents held out for validation; by default
            `data.val_fraction`.
        weight: Relative share under the mixture `Fixed`; by default 1.
        min_weight: Least weight in a mixture, before weights are normalised.
        max_epochs: Maximum number of passes over the text in a run; None for no limit.
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
    min_weight: float = 0.0
    max_epochs: float | None = None
    token_dtype: TokenDtype | None = None

    def __post_init__(self) -> None:
        """Refuse a source that cannot give any text."""
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
        self._check_tokens()
        if self.val_fraction is not None and not 0 <= self.val_fraction < 1:
            raise UserError(f"source {self.name!r}: val_fraction must lie in [0, 1), got {self.val_fraction}")
        for name, value, most in (("weight", self.weight, math.inf), ("min_weight", self.min_weight, 1.0)):
            if value is not None and not (0 <= value <= most and math.isfinite(value)):
                to = f"to {most:g}" if math.isfinite(most) else "on, and finite"
                raise UserError(f"source {self.name!r}: {name} must lie from 0 {to}, got {value}")
        if self.max_epochs is not None and not self.max_epochs > 0:
            raise UserError(f"source {self.name!r}: max_epochs must be more than 0, got {self.max_epochs}")

    def _check_tokens(self) -> None:
        """Refuse invalid options of token files."""
        if self.token_dtype is not None and (self.kind != "files" or self.token_dtype not in LARGEST_ID):
            raise UserError(
                f"source {self.name!r}: token_dtype must be {' or '.join(LARGEST_ID)}, for kind files; got "
                f"{self.token_dtype!r} for kind {self.kind}"
            )
        dtype = self.token_dtype or "uint32"
        largest = LARGEST_ID[dtype]
        if self.end_of_document is not None and not 0 <= self.end_of_document <= largest:
            raise UserError(
                f"source {self.name!r}: end_of_document={self.end_of_document} must lie from 0 to {largest}, "
                f"the largest id of {dtype}"
            )

    @property
    def is_weighed(self) -> bool:
        """Whether an option is set that only a mixture uses."""
        return self.weight is not None or self.min_weight > 0 or self.max_epochs is not None

    @property
    def is_token_file(self) -> bool:
        """Whether the source consists of token files that another program wrote."""
        if self.kind != "files":
            return False
        kinds = {self.format_of(file) == "tokens" for file in self.files()}
        if len(kinds) > 1:
            raise UserError(
                f"source {self.name!r} mixes .bin token files and text: give each a source of its own"
            )
        return kinds == {True}

    def settings(self) -> dict[str, Any]:
        """Return the settings that the prepared tokens depend on, as plain values."""
        paths = [str(Path(path).expanduser().absolute()) for path in self.paths]
        kept = {key: value for key, value in asdict(self).items() if key not in MIXING}
        if self.token_dtype is None:
            del kept["token_dtype"]  # stores of before it existed stay valid
        return {**kept, "paths": paths}

    def format_of(self, file: Path) -> str:
        """Return a file's format."""
        return self.format or cast(str, format_of_name(file.name))

    def files(self) -> list[Path]:
        """Expand the paths, in a fixed order.

        Raises:
            UserError: If a path matches nothing, or names a file of an unknown format.
        """
        return list(self._found().files)

    def report_passed_over(self) -> None:
        """Print which files in the source's folders and globs are not read."""
        passed = self._found().describe()
        if passed:
            rank_zero_info(f"source {self.name!r} passes over {passed}")

    def _found(self) -> Found:
        return listed(
            (self.name, tuple(self.paths), self.format),
            lambda: find_files(self.name, self.paths, self.format),
        )

    def fingerprint(self) -> list[Any]:
        """Return values that change with the input: path, size and time of files, or the installed Python."""
        if self.kind == "python":
            return python_fingerprint()
        found = self._found()
        stats = [(real, file.stat()) for file, real in zip(found.files, found.real, strict=True)]
        return [[real, stat.st_size, stat.st_mtime_ns] for real, stat in stats]

    def read(self, problems: "Problems") -> Iterator[AnyDocument]:
        """Yield the documents of a text source, reading one file at a time."""
        if self.kind == "python":
            yield from python_documents(self.part)
            return
        for file in self.files():
            yield from self._read_file(file, problems)

    def _read_file(self, file: Path, problems: "Problems") -> Iterator[AnyDocument]:
        kind = self.format_of(file)
        try:
            fault = content_fault(file, kind)
            if fault is None:
                yield from _READERS[kind](file, self, problems)
                return
        except UNREADABLE as error:
            fault = read_fault(error)
        problems.report(shown(file), *fault)


MIXING = ("weight", "min_weight", "max_epochs")
"""Options of a source that do not affect its prepared tokens."""


class Problems:
    """Collects input that cannot be read.

    Args:
        policy: `raise` raises at the first problem; `skip` counts problems and keeps the messages.
    """

    def __init__(self, policy: Literal["raise", "skip"]) -> None:
        self.policy = policy
        self.messages: list[str] = []
        self.found_separator = False
        """Whether any text file contained its source's `document_separator`."""

    def report(self, place: str, fault: str, remedy: str) -> None:
        """Raise or record a problem.

        Args:
            place: The file and, if there is one, the line.
            fault: What is wrong there.
            remedy: What the user can do besides `on_error: skip`.
        """
        message = f"{place}: {fault}"
        if self.policy == "raise":
            raise UserError(f"{message}; {remedy}, or set `on_error` to skip to leave it out")
        self.messages.append(message)


def _decode(file: Path, raw: bytes, line: int, problems: Problems) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line += raw[: error.start].count(b"\n")
        problems.report(
            f"{shown(file)}:{line}",
            f"not UTF-8 (byte 0x{raw[error.start]:02x})",
            "convert the file, for example with iconv",
        )
        return None


def _report_empty(file: Path, problems: Problems) -> None:
    problems.report(shown(file), "empty file", "remove it")


def _read_text(file: Path, source: TextSource, problems: Problems) -> Iterator[AnyDocument]:
    return read_text_file(file, source.document_separator, problems)


def _read_jsonl(file: Path, source: TextSource, problems: Problems) -> Iterator[Document]:
    del source
    count = 0
    with open_bytes(file) as lines:
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
                problems.report(f"{shown(file)}:{number}", f"broken JSON ({error})", "mend the line")
                continue
            text = _record_text(record, f"{shown(file)}:{number}", problems)
            if text is not None:
                yield Document(text=text, origin=str(file), line=number)
    if not count:
        _report_empty(file, problems)


def _read_parquet(file: Path, source: TextSource, problems: Problems) -> Iterator[Document]:
    try:
        import pyarrow  # pyright: ignore[reportMissingTypeStubs]
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise UserError(
            f"{file}: reading .parquet needs pyarrow; pip install 'andrea-pl[parquet]'"
        ) from error
    del source
    if not file.stat().st_size:
        _report_empty(file, problems)
        return
    arrow_error = cast("type[Exception]", cast(Any, pyarrow).ArrowException)
    row = 0
    with open_seekable(file) as content:
        rows = _parquet_rows(cast(Any, parquet), content)
        while True:
            try:
                record, names = next(rows)
            except StopIteration:
                break
            except (ValueError, OSError, arrow_error) as error:
                problems.report(f"{shown(file)}:{row + 1}", f"broken parquet ({error})", "write it again")
                return
            row += 1
            text = _record_text(record, f"{shown(file)}:{row}", problems, names)
            if text is not None:
                yield Document(text=text, origin=str(file), line=row)
    if not row:
        _report_empty(file, problems)


def _parquet_rows(parquet: Any, content: BinaryIO) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the rows of a table with only its text columns, and the names of all columns."""
    table = parquet.ParquetFile(content)
    names = list(table.schema_arrow.names)
    columns = [name for name in names if name in TEXT_KEYS]
    for batch in table.iter_batches(batch_size=1024, columns=columns or None):
        for record in batch.to_pylist():
            yield record, names


TEXT_KEYS = ("text", "question", "answer", "messages")
"""Keys of a record that are read."""


def _record_text(
    record: Any, place: str, problems: Problems, names: Sequence[str] | None = None
) -> str | None:
    """Return the text of a record of any of the three shapes."""
    remedy = "give 'text', or 'question' and 'answer', or 'messages' with 'role' and 'content', all strings"
    if not isinstance(record, dict):
        problems.report(place, f"a {type(record).__name__} where an object is expected", remedy)
        return None
    fields = cast(dict[str, Any], record)
    parts = _record_parts(fields)
    if parts is None:
        problems.report(place, *_missing_text(fields, names or list(fields), remedy))
        return None
    for key, part in parts:
        if not isinstance(part, str):
            kind = "missing or null" if part is None else f"a {type(part).__name__}"
            problems.report(place, f"a value that should be a string is not ({key!r} is {kind})", remedy)
            return None
    text = "".join(part for _, part in parts)
    if not text.strip():
        problems.report(place, "empty text", "remove the record")
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        problems.report(place, "half a surrogate pair, which no UTF-8 can hold", "mend the escape")
        return None
    return text


def _record_parts(fields: dict[str, Any]) -> list[tuple[str, Any]] | None:
    """Return the parts of a record's text with their keys, None if it has none of the three shapes."""
    messages = fields.get("messages")
    if fields.get("text") is not None:
        return [("text", fields["text"])]
    if fields.get("question") is not None and fields.get("answer") is not None:
        question, answer = fields["question"], fields["answer"]
        return [
            ("", "Question: "),
            ("question", question),
            ("", "\nAnswer: "),
            ("answer", answer),
            ("", "\n"),
        ]
    if not isinstance(messages, list) or not messages:
        return None
    parts: list[tuple[str, Any]] = []
    for message in cast(list[Any], messages):
        turn = cast(dict[str, Any], message) if isinstance(message, dict) else {}
        parts += [("role", turn.get("role")), ("", ": "), ("content", turn.get("content")), ("", "\n")]
    return parts


def _missing_text(fields: dict[str, Any], names: Sequence[str], remedy: str) -> tuple[str, str]:
    """Return why a record has no text, and the remedy."""
    for key in TEXT_KEYS:
        if key in fields and fields[key] is None:
            return f"{key!r} is null", "fill it in, or remove the record"
    messages = fields.get("messages")
    if messages == []:
        return "'messages' is empty", "fill it in, or remove the record"
    if messages is not None:
        return f"'messages' is a {type(messages).__name__} where a list is expected", remedy
    return f"missing key (found: {', '.join(map(str, names)) or 'none'})", remedy


_READERS: dict[str, Callable[[Path, TextSource, Problems], Iterator[AnyDocument]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}
