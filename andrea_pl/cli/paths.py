"""Expands paths in a configuration and on the command line, and checks where they lead.

A value's key decides whether it is a path (`PATH_WORDS`). Other values, such as a prompt or a separator, may
begin with `~` and are not changed. Paths are expanded only here, after the command has parsed its arguments.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from lightning.pytorch.utilities import rank_zero_warn

from andrea_pl.errors import UserError

PATH_WORDS = frozenset(
    (
        "path",
        "paths",
        "dir",
        "dirpath",
        "directory",
        "folder",
        "file",
        "files",
        "output",
        "resume",
        "tokenizer",
    )
)
"""Last words of keys that hold a path: `ckpt_path`, `default_root_dir`, `cache_dir` …"""

PATH_KEYS = frozenset(("init_from", "config"))
"""Other keys that hold a path."""

NOT_PATHS = frozenset(("class_path",))

NAME_KEYS = frozenset(("name", "version", "sub_dir", "filename"))
"""Keys of loggers, callbacks and profilers that hold a name within another folder."""

OURS = ("andrea_callbacks.", "andrea_pl.", "lightning.", "pytorch_lightning.")
"""Packages whose keys are known. In other classes, `name` may mean something else."""

LOGGED = ("trainer.logger", "trainer.default_root_dir")
"""Folders in which a logger expands variables, but nothing else does."""

PROTOCOLS = frozenset(
    ("file", "local", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"),
)
"""Protocols of storage that paths may use; `--trust_protocols NAME` adds one."""

PROTOCOL_FLAG = "--trust_protocols"

_trusted: set[str] = set()


def trust_protocols(names: Iterable[str]) -> None:
    """Allow exactly these protocols besides `PROTOCOLS`."""
    _trusted.clear()
    _trusted.update(name.strip().removesuffix("://").lower() for name in names)


def is_path_key(key: str) -> bool:
    """Return whether a dotted key holds a path, by its last part."""
    name = key.rpartition(".")[2]
    return name in PATH_KEYS or (name not in NOT_PATHS and name.rpartition("_")[2] in PATH_WORDS)


def resolve(values: Any) -> Any:
    """Return nested values with every path expanded, and every other string as UTF-8.

    Args:
        values: Mappings, namespaces with `items`, lists and plain values, as the parser returns them.

    Raises:
        UserError: If a path names an unknown user or a protocol that is not allowed, or a name leaves its
            folder.
    """
    _refuse_names(values)
    return map_strings(values, _resolved)


def expand_home(values: Any) -> Any:
    """Return nested values with `~` in paths expanded, without messages or errors, to compare two runs."""
    return map_strings(values, lambda key, value: _home(value) or value if is_path_key(key) else value)


def map_strings(value: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Return nested values with a function applied to each string and its key (for lists, the list's key)."""
    if isinstance(value, str):
        return change(key, value)
    if isinstance(value, list):
        return [map_strings(each, change, key) for each in cast("list[Any]", value)]
    if isinstance(value, Mapping):
        parts = cast("Mapping[str, Any]", value)
        return {name: map_strings(each, change, _joined(key, name)) for name, each in parts.items()}
    if _is_namespace(value):
        copy: Any = value.clone()
        for name, each in cast("dict[str, Any]", vars(copy)).items():
            setattr(copy, name, map_strings(each, change, _joined(key, name)))
        return copy
    return value


def expand(path: str, key: str) -> str:
    """Return a path with `~` replaced by the user's home folder, and `~name` by that of `name`.

    Args:
        path: The given path.
        key: The path's key, for messages.

    Raises:
        UserError: If there is no such user or home folder, or the path's protocol is not allowed.
    """
    if "\0" in path:
        raise UserError(f"{key}: {path!r} holds a NUL, which no path can")
    refuse_protocols(path, key)
    if not path.startswith("~"):
        return _as_named_on_disk(path)
    expanded = _home(path)
    first = Path(path).parts[0]
    if expanded is None:
        if Path(path).exists() and first != "~":
            return path
        reason = "no home folder is known here (set HOME)" if first == "~" else f"no user {first[1:]!r}"
        raise UserError(f"{key}: {path}: {reason}; write ./{path} for a file or folder of that name")
    if Path(first).exists():
        rank_zero_warn(
            f"{key}: {path} is {expanded}. A folder named {first} is here too, where earlier versions kept "
            f"checkpoints: move what you still need out of it, or write ./{path} to go on there"
        )
    return _as_named_on_disk(expanded)


def refuse_protocols(path: str, key: str) -> None:
    """Refuse a path with a protocol that is not allowed, before anything connects to it.

    Raises:
        UserError: If one of its protocols is neither in `PROTOCOLS` nor trusted by the user.
    """
    for protocol in protocols_of(path):
        if protocol in ("http", "https") and protocol not in _trusted:
            what = "checkpoints are" if key in ("ckpt_path", "init_from") else "this is"
            raise UserError(f"{key}: {path}: {what} not fetched from the web; download it first")
        if protocol not in PROTOCOLS | _trusted:
            raise UserError(
                f"{key}: {path}: {protocol} is no storage that is used unasked; download it first, or allow "
                f"it with {PROTOCOL_FLAG} {protocol} on the command line, if you trust it"
            )


def protocols_of(path: str) -> list[str]:
    """Return the protocols that fsspec would see in a path, each link of a chain (`a::b://c`) included."""
    links = path.split("::")
    found = [link.partition("://")[0].lower() for link in links if "://" in link]
    if len(links) > 1:
        found += [link.lower() for link in links if re.fullmatch(r"[A-Za-z0-9+.-]+", link)]
    if path.lower().startswith("data:"):
        found.append("data")
    return found


def refuse_leading_out(name: str, key: str) -> None:
    """Refuse a name that would leave its folder.

    Raises:
        UserError: If it contains `..`, is absolute, or is anything that a logger would expand.
    """
    parts = name.replace("\\", "/").split("/")
    fault = None
    if ".." in parts or Path(name).is_absolute():
        fault = "leads out of its folder"
    elif name.startswith("~") or ("$" in name and key.startswith("trainer.logger")):
        fault = "would be expanded"
    elif "://" in name or "::" in name or "\0" in name:
        fault = "is no name of a file or folder"
    if fault:
        raise UserError(f"{key}: {name!r} {fault}; give a plain name, and the folder by save_dir or dirpath")


def _resolved(key: str, value: str) -> str:
    if is_path_key(key):
        if key.startswith(LOGGED) and re.search(r"\$[\w{]", value):
            raise UserError(
                f"{key}: {value}: variables are not expanded in a configuration, where a logger and "
                "checkpoints would take them for two folders; write the folder itself"
            )
        return expand(value, key)
    return as_text(value)


def _refuse_names(value: Any, key: str = "") -> None:
    """Refuse names that leave their folder, for all classes of this library and of Lightning."""
    if isinstance(value, list):
        for each in cast("list[Any]", value):
            _refuse_names(each, key)
        return
    parts = _parts(value)
    if str(parts.get("class_path", "")).startswith(OURS):
        for option, named in _parts(parts.get("init_args")).items():
            if option in NAME_KEYS and isinstance(named, str):
                refuse_leading_out(named, f"{key}.{option}")
    for name, each in parts.items():
        _refuse_names(each, _joined(key, name))


def _parts(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    return cast("dict[str, Any]", vars(value)) if _is_namespace(value) else {}


def _is_namespace(value: Any) -> bool:
    """Return whether a value is one of the parser's namespaces."""
    return hasattr(value, "__dict__") and hasattr(value, "clone")


def as_text(value: str) -> str:
    """Return an argument as UTF-8 if the process decoded it with another encoding (`LANG=C`)."""
    if value.isascii():
        return value
    try:
        return os.fsencode(value).decode("utf-8")
    except UnicodeError:
        return value


def _as_named_on_disk(path: str) -> str:
    """Return a path that this process can open, whatever its file-system encoding."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return path.encode("utf-8", "surrogateescape").decode(sys.getfilesystemencoding(), "surrogateescape")
    return path


def _home(path: str) -> str | None:
    """Return a path with `~` expanded, None if that is impossible; other paths unchanged."""
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)  # noqa: PTH111  pathlib raises, and drops a final slash
    return None if expanded == path else expanded


def _joined(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)
