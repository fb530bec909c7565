"""The command's parser: errors are one line with the nearest key, and long lists take linear time."""

import dataclasses
import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, Union, cast, get_args, get_origin, get_type_hints

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from andrea_pl.cli.paths import is_path_key
from andrea_pl.data.sources.documents import TextSource

RECORDS: dict[str, type] = {"data.sources": TextSource}
"""Keys with a list of records, which may be long. jsonargparse takes quadratic time for such a list, and
checks it seven times."""

TRUST_FLAG = "--trust_imports"
LIBRARY_REMEDY = "Add the import path to import_path_allowlist in set_parsing_settings to allow it"

LONGEST = 600
"""Maximum length of a message. The parser's list of other types that a value is not is cut off."""

NOISE = (
    r" *- Problem with given class_path 'lightning.Callback':\n.*\n",
    # around the fault of a value that may also be null
    r"(?m)^ *(?:- )?(?:Does not validate against any of the Union subtypes|Subtypes: .*|Errors:|Expected a "
    r"<class 'NoneType'>.*|Given value type: .*|Given value: (?:NestedArg|Namespace|\[?\{).*)(?:\n|$)",
    # what every class is told to be, for a class whose own fault is named already
    r"(?<=\n) *- Not a valid subclass of \w+.*\n *Subclass types expect one of:(?:\n *- .*)*",
)
"""Parts of the parser's messages besides the fault itself."""

UNKNOWN = re.compile(
    r"(?P<said>(?:Subcommand '\w+'|Option|Group '(?P<group>[\w.]+)')(?: does not accept option)? "
    r"?'(?P<key>[^'\n]+)'(?: is not accepted)?(?: before subcommand \S+)?|unrecognized arguments: "
    r"(?P<flag>-\S+)(?:.*))"
)

CHOICE = r"invalid choice: '([^']+)' \(choose from ([^)]+)\)"
ATTRIBUTE = r"module '([\w.]+)' has no attribute '(\w+)'"
PARSER_KEY = r'Parser key "([^"]+)":?'
CLASS_PATH = r"Problem with given class_path '([^']+)':"
UNEXPECTED = r"(?s)Unexpected config: .*"
"""Other messages of the parser. tests/cli/test_parser.py provokes each of them."""


class RefusedArguments(SystemExit):
    """The parser refused the arguments: exit code 2.

    Args:
        message: The parser's message.
        program: The command whose help lists the options.
    """

    def __init__(self, message: str, program: str) -> None:
        super().__init__(2)
        self.message = message
        self.program = program


class CommandParser(LightningArgumentParser):
    """A parser that keeps its subcommands, so that commands unknown to LightningCLI can be added."""

    subcommand_action: Any = None

    @override
    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        """Add the subcommands, and keep their action."""
        self.subcommand_action = super().add_subcommands(*args, **kwargs)
        return self.subcommand_action

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an error of one line, with the nearest key and the flag that trusts a module."""
        parser = cast(CommandParser, getattr(ex, "subcommand_parser", None) or self)
        message = with_nearest(message, parser.known_keys())
        if not self.exit_on_error:
            super().error(message, ex)
        program = parser.prog.replace(" [options]", "").replace("__main__.py", "andrea")
        raise RefusedArguments(message, program) from ex

    def known_keys(self) -> list[str]:
        """Return every key that the parser accepts."""
        return [str(action.dest) for action in self._actions if action.dest not in ("help", "==SUPPRESS==")]

    def _check_value_key(
        self, action: Any, value: Any, key: str, cfg: Any, append: bool = False
    ) -> Any:  # the parser's own method, which each value of each source passes
        record = RECORDS.get(action.dest)
        if record is None or append or not isinstance(value, list):
            return super()._check_value_key(action, value, key, cfg, append=append)
        items = cast("list[Any]", value)
        return [self._check_record(action, record, item, f"{key}[{at}]") for at, item in enumerate(items)]

    def _check_record(self, action: Any, record: type, item: Any, key: str) -> Any:
        """Check a single record. One whose values already have their types needs no conversion."""
        ready = as_record(record, item)
        if ready is not None:
            return ready
        try:
            return super()._check_value_key(action, [item], key, None)[0]
        except TypeError as error:
            place = f'Parser key "{key}"'
            raise TypeError(str(error).replace(f'Parser key "{action.dest}"', place, 1)) from error


def as_record(record: type, item: Any) -> Namespace | None:
    """Return a record as the parser would, None if the parser would have to convert, refuse or merge a value.

    Args:
        record: A dataclass.
        item: A mapping of its values, or a namespace that already has all of them.
    """
    if isinstance(item, Namespace):
        options = cast("dict[str, Any]", vars(item.get("init_args", item)))
        return item if _fits(record, options) and len(options) == len(dataclasses.fields(record)) else None
    if not isinstance(item, dict) or not _fits(record, cast("dict[str, Any]", item)):
        return None
    values: dict[str, Any] = {}
    for each in dataclasses.fields(record):
        if each.name in item:
            values[each.name] = item[each.name]
        elif each.default is not dataclasses.MISSING:
            values[each.name] = each.default
        elif each.default_factory is not dataclasses.MISSING:
            values[each.name] = each.default_factory()
        else:
            return None
    named = Namespace(class_path=_class_path(record), init_args=Namespace(**values))
    named["__subclasses_disabled__"] = True
    return named


def _class_path(record: type) -> str:
    package = record.__module__.partition(".")[0]
    is_public = getattr(sys.modules.get(package), record.__name__, None) is record
    return f"{package if is_public else record.__module__}.{record.__name__}"


def _fits(record: type, values: Mapping[str, Any]) -> bool:
    hints = _hints(record)
    return all(name in hints and _is_of(value, hints[name]) for name, value in values.items())


@cache
def _hints(record: type) -> dict[str, Any]:
    return get_type_hints(record)


def _is_of(value: Any, hint: Any) -> bool:
    """Return whether a value has a type without conversion."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_is_of(value, each) for each in get_args(hint))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if origin is list:
        of = get_args(hint)[0]
        return isinstance(value, list) and all(_is_of(each, of) for each in cast("list[Any]", value))
    return type(value) is hint


def with_nearest(message: str, known: Iterable[str]) -> str:
    """Return a message about an unknown key with the nearest known one."""
    found = UNKNOWN.search(message)
    if found is None:
        return _with_nearest_choice(message)
    key = found["key"] or found["flag"].lstrip("-").partition("=")[0].removesuffix("+")
    near = nearest(f"{found['group']}.{key}" if found["group"] else key, known)
    if near is None or "did you mean" in message:
        return message
    said = found["said"]
    hint = f"--{near}" if found["flag"] else repr(near.removeprefix(f"{found['group']}."))
    return message.replace(said, f"{said}; did you mean {hint}?", 1)


def nearest(key: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the known key most similar to an unknown one, None if none is similar.

    Args:
        key: The unknown key.
        known: The known keys.
        likeness: Least similarity ratio, as difflib computes it.
    """
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=likeness)
    return close[0] if close else None


def _with_nearest_choice(message: str) -> str:
    """Return a message about an unknown subcommand, or class of a module, with the nearest known one."""
    choice, missing = re.search(CHOICE, message), re.search(ATTRIBUTE, message)
    if choice is not None:
        near = nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
        return message if near is None else f"{message}; did you mean {near}?"
    if missing is not None:
        near = nearest(missing[2], dir(sys.modules.get(missing[1])))
        said = missing[0]
        return message if near is None else message.replace(said, f"{said}; did you mean {near!r}?", 1)
    return message


def explain(refused: RefusedArguments, given: Iterable[tuple[str, str]]) -> str:
    """Return one line about refused arguments.

    Args:
        refused: The parser's error.
        given: Every string on the command line and in configuration files, with its key. If one names a file
            that was read in place of a value, the line names that file, but none of its contents.
    """
    message = refused.message
    read = next(filter(None, (file_in_place(key, given) for key in _named_keys(message))), None)
    if read is not None:
        where, path = read
        near = re.search(r"did you mean '[\w.]+'\?", message)
        hint = f"; in it, {near[0]}" if near else ""
        said = f"{where}: {path} is a file, and what it holds cannot be the value of {where}{hint}"
    else:
        said = shortened(message)
    return f"{said} ({refused.program} --help lists every key)"


def _named_keys(message: str) -> list[str]:
    """Return the keys in a message, the outermost first."""
    unknown = UNKNOWN.search(message)
    keys = [re.split(r"[^\w.]", key)[0] for key in re.findall(PARSER_KEY, message)[:1]]
    return keys + ([unknown["key"]] if unknown is not None and unknown["key"] else [])


def file_in_place(key: str, given: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    """Return key and path of a file given as the value of a key, or of one above or below it, or None."""
    for other, value in given:
        is_related = other == key or other.startswith(f"{key}.") or key.startswith(f"{other}.")
        if is_related and not is_path_key(other) and is_file(value):
            return other, value
    return None


def is_file(value: str) -> bool:
    """Return whether a text names an existing file, or a device such as /dev/stdin."""
    try:
        path = Path(value).expanduser()
        return path.exists() and not path.is_dir()
    except (OSError, ValueError, RuntimeError):
        return False


def shortened(message: str) -> str:
    """Return the parser's message as one line, reduced to the fault."""
    for noise in NOISE:
        message = re.sub(noise, "", message) or message
    remedy = f"{TRUST_FLAG} NAME allows it, on the command line, if you trust NAME"
    message = message.replace(LIBRARY_REMEDY, remedy)
    message = re.sub(CLASS_PATH, r"\1:", re.sub(PARSER_KEY, r"\1:", message))
    message = re.sub(UNEXPECTED, "no configuration: keys with values are expected", message)
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    text = ""
    for line in filter(None, lines):
        text += line if not text else f" {line}" if text.endswith((":", ";", ",")) else f"; {line}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
