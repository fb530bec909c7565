"""Reads and checks configuration files before the parser sees them; errors are one line."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from jsonargparse import get_loader, set_loader

from andrea_pl.cli.renamed import UsageError, note_renamed, translate
from andrea_pl.errors import UserError

DEEPEST = 100
"""Maximum levels of nesting; the shipped configurations have six."""

MOST_REPEATED = 100_000
"""Maximum number of values after expanding aliases. A file of a few lines could stand for billions."""

MOST_BYTES = 64 * 2**20

CONFIG_FLAGS = ("-c", "--config")

ROOTS = ("model", "data", "trainer")
"""Top-level keys with options below them; any other mapping may belong to a subcommand."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_load = cast("Callable[[str], Any]", get_loader("yaml"))


def read_configuration(given: str) -> dict[str, Any]:
    """Read a configuration file. A pipe, which can be read only once, is left to the parser and empty here.

    Raises:
        UsageError: If there is no such file, or it is not valid YAML for a configuration.
        UserError: If it is empty, or not text.
    """
    if "://" in given:
        raise UsageError(f"{given}: a configuration is not fetched from anywhere; download it first")
    path = Path(given)
    if path.exists() and not path.is_file() and not path.is_dir():
        return {}
    text = _read_text(path)
    try:
        _check_nesting(text)
        _check_node(_compose(text))
        content: Any = yaml.load(text, Loader=_Loader)  # noqa: S506  a safe loader
    except yaml.YAMLError as error:
        raise UsageError(_explain(path, text, error)) from error
    except ValueError as error:  # what a number or a date cannot be made of
        raise UsageError(f"{path}: {_one_line(error)}; write another value") from error
    if content is None:
        raise UserError(f"{path}: an empty configuration; start from one of the shipped configs")
    if not isinstance(content, dict):
        raise UsageError(
            f"{path}: no configuration: keys with values are expected, such as trainer: or data:, and it "
            f"holds {_kind(content)}"
        )
    return translate_roots(cast("dict[str, Any]", content))


def translate_roots(content: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration, which may be nested under a subcommand, with old names replaced."""
    translated = cast("dict[str, Any]", translate(content, note_renamed))
    for name, part in translated.items():
        if isinstance(part, dict) and name not in ROOTS:
            translated[name] = translate(part, note_renamed)
    return translated


def bound_values() -> None:
    """Make the parser refuse values that would take forever, on the command line and in files."""
    set_loader("yaml", _load_bounded, exceptions=(yaml.YAMLError,))


def _load_bounded(text: str) -> Any:
    try:
        if any(mark in text for mark in "[{&\n"):
            _check_nesting(text)
            _check_node(_compose(text), duplicates=True)
        content = _load(text)
        return translate_roots(cast("dict[str, Any]", content)) if isinstance(content, dict) else content
    except (ValueError, RecursionError) as error:
        raise yaml.YAMLError(_one_line(error)) from error


def _compose(text: str) -> yaml.Node | None:
    return cast("yaml.Node | None", yaml.compose(text, Loader=_Loader))


class _TooMuch(yaml.MarkedYAMLError):
    """A small document that expands to something huge."""


def _read_text(path: Path) -> str:
    if not path.is_file():
        what = "a folder, not a configuration file" if path.is_dir() else "no such configuration file"
        raise UsageError(f"{path}: {what}{_nearest_file(path)}")
    if path.stat().st_size > MOST_BYTES:
        raise UsageError(f"{path}: {path.stat().st_size:,} bytes are no configuration")
    raw = path.read_bytes()
    if not raw.strip():
        raise UserError(f"{path}: an empty configuration; start from one of the shipped configs")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 (byte {error.start}); convert the file, with iconv say"
        ) from error
    odd = next((at for at, sign in enumerate(text) if sign < " " and sign not in "\t\n\r\x85"), None)
    if odd is not None:
        line = text.count("\n", 0, odd) + 1
        raise UsageError(f"{path}:{line}: the control character {text[odd]!r}; remove it")
    return text


def _nearest_file(path: Path) -> str:
    """Return a hint at the file that was probably meant."""
    if path.is_dir():
        names = sorted(each.name for each in path.glob("*.yaml"))[:3]
        return f"; it holds {', '.join(names)}" if names else ""
    siblings = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else f" (looked in {Path.cwd()})"


def _check_nesting(text: str) -> None:
    """Refuse a document that is nested too deeply, before anything recurses over it."""
    depth = 0
    fault = f"nested more than {DEEPEST} levels deep"
    try:
        for event in cast("Iterator[yaml.Event]", yaml.parse(text, Loader=_Loader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise _TooMuch(None, None, fault, event.start_mark)
    except yaml.MarkedYAMLError as error:
        if "nesting depth" in str(error.problem):  # libyaml's own bound, which looks ahead
            raise _TooMuch(None, None, fault, cast(Any, error).problem_mark) from error
        raise


def _check_node(root: yaml.Node | None, *, duplicates: bool = False) -> None:
    """Refuse duplicate keys, aliases that contain themselves, and aliases that expand to too many values.

    Args:
        root: The document, or None.
        duplicates: Whether duplicate keys are allowed.
    """
    sizes: dict[int, int] = {}
    inside: set[int] = set()

    def size(node: yaml.Node) -> int:
        if id(node) in inside:
            raise _TooMuch(None, None, "an alias that stands for what it is in", node.start_mark)
        if id(node) not in sizes:
            inside.add(id(node))
            sizes[id(node)] = 1 + sum(map(size, _parts(node, duplicates)))
            inside.discard(id(node))
        return sizes[id(node)]

    if root is not None and size(root) > MOST_REPEATED + 2 * len(sizes):
        raise _TooMuch(
            None, None, f"aliases that stand for {size(root):,} values; write them out", root.start_mark
        )


def _parts(node: yaml.Node, duplicates: bool) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return cast("list[yaml.Node]", node.value)
    if not isinstance(node, yaml.MappingNode):
        return []
    first: dict[str, int] = {}
    parts: list[yaml.Node] = []
    for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
        parts += [key, value]
        if duplicates or not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
            continue
        name = str(key.value)
        line = cast(Any, key.start_mark).line + 1
        if first.setdefault(name, line) != line:
            fault = f"{name!r} is given twice, first in line {first[name]}; remove one"
            raise yaml.MarkedYAMLError(None, None, fault, key.start_mark)
    return parts


def _explain(path: Path, text: str, error: yaml.YAMLError) -> str:
    """Return file, line and fault, without the file's own text."""
    mark = cast("yaml.Mark | None", getattr(error, "problem_mark", None))
    fault = str(getattr(error, "problem", None) or _one_line(error))
    if mark is None:
        return f"{path}: {fault}; mend the YAML"
    lines: list[str] = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if line.startswith("\t") or line.lstrip(" ").startswith("\t"):
        fault = "a tab, which YAML does not take for indentation; write spaces"
    elif "another document" in fault:
        fault = "a second document; a configuration file holds one: remove the line ---, or make it two files"
    elif "constructor for the tag" in fault:
        fault = f"{fault.rpartition('tag ')[2]} is a tag, and a configuration has plain values; remove it"
    elif not isinstance(error, _TooMuch) and "remove one" not in fault:
        fault += "; mend the YAML"
    return f"{path}:{mark.line + 1}: {fault}"


def _kind(content: Any) -> str:
    return {"list": "a list", "str": "text"}.get(kind := type(cast(object, content)).__name__, f"a {kind}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def flag_values(arguments: list[str]) -> list[tuple[str, str]]:
    """Return the flags of a command line, without dashes, with their values."""
    following = [*arguments, ""][1:]
    values: list[tuple[str, str]] = []
    for argument, after in zip(arguments, following, strict=True):
        if argument.startswith("-") and argument.strip("-"):
            flag, given, value = argument.partition("=")
            values.append((flag.lstrip("-").removesuffix("+"), value if given else after))
    return values


def strings_of(value: Any, key: str = "") -> list[tuple[str, str]]:
    """Return every string in nested mappings and lists, with its dotted key."""
    if isinstance(value, str):
        return [(key, value)]
    found: list[tuple[str, str]] = []
    if isinstance(value, Mapping):
        for name, part in cast("Mapping[Any, Any]", value).items():
            found += strings_of(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for part in cast("list[Any]", value):
            found += strings_of(part, key)
    return found
