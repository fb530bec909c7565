"""Prepares the command's arguments for the parser: trusted imports, and shorthand flags."""

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from jsonargparse import set_parsing_settings
from lightning.pytorch.strategies import Strategy

from andrea_pl.cli.configuration import (
    CONFIG_FLAGS,
    bound_values,
    flag_values,
    read_configuration,
    strings_of,
)
from andrea_pl.cli.parser import TRUST_FLAG, nearest
from andrea_pl.cli.paths import PROTOCOL_FLAG, expand, trust_protocols
from andrea_pl.cli.renamed import UsageError, new_key, translate_arguments
from andrea_pl.errors import UserError
from andrea_pl.runs.resume import NEWEST
from andrea_pl.strategies import ClipDDPStrategy, ClipModelParallelStrategy, ClipSingleDeviceStrategy

TRUSTED_IMPORTS = [
    "andrea_callbacks",
    "andrea_pl",
    "lightning.fabric.plugins",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.plugins",
    "lightning.pytorch.profilers",
    "lightning.pytorch.strategies",
    "torch.optim",
]
"""Packages whose classes a configuration file may name."""

DRIFT_FLAG = "--allow_drift"
ALONE = {"--resume": NEWEST, "--verify": "true", "--prune": "true"}
"""Values of flags that are given without a value."""

TRUST_HELP = (
    f"A configuration may name classes of {', '.join(TRUSTED_IMPORTS)}; {TRUST_FLAG} NAME on the command "
    "line allows another module or package, NAME, as well. Paths may name a storage by s3://, gs:// or "
    f"az://; {PROTOCOL_FLAG} NAME allows another protocol."
)

CLIP_STRATEGIES: dict[str, type[Strategy]] = {
    each.strategy_name: each
    for each in (ClipSingleDeviceStrategy, ClipDDPStrategy, ClipModelParallelStrategy)
}
"""The strategies with the clip hook, by their registered names."""

REPLACED_WHOLE = {"data.sources": "[]", "data.curriculum.mixture": "null", "trainer.callbacks": "[]"}
"""Keys whose later value replaces an earlier one entirely, and their empty values."""


SPEC_WORDS = ("class_path", "init_args", "dict_kwargs")


def restrict(arguments: list[str]) -> list[str]:
    """Restrict what a configuration file can import, and prepare the arguments.

    Returns:
        The arguments for the parser.

    Raises:
        UserError: If a configuration is empty or not text, or a flag lacks its value.
    """
    arguments = translate_arguments(arguments)
    kept, trusted = _take(TRUST_FLAG, "the name of a module or package", arguments)
    kept, allowed = _take(DRIFT_FLAG, "a key, such as trainer.max_steps", kept)
    allowed = [new_key(key) for each in allowed for key in each.split(",")]
    if allowed:
        kept.append(f"{DRIFT_FLAG}={json.dumps(allowed)}")
    kept, protocols = _take(PROTOCOL_FLAG, "the name of a protocol, such as hf", kept)
    trust_protocols(protocols)
    kept = _expand_configurations(_complete(kept))
    contents = {path: _read_with_included(path) for path in configurations(kept)}
    _refuse_mistyped_words(contents)
    kept = _name_strategy_class(_replace_whole(kept, contents), contents)
    bound_values()
    set_parsing_settings(config_read_mode_urls_enabled=False, config_read_mode_fsspec_enabled=False)
    try:
        set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=[*TRUSTED_IMPORTS, *trusted])
    except ValueError as error:
        raise UserError(f"{TRUST_FLAG}: {error}") from error
    return kept


def _take(flag: str, what: str, arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without a flag that may occur several times, and the flag's values."""
    kept: list[str] = []
    values: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == flag:
            value = next(rest, None)
            if value is None or value.startswith("--"):
                raise UserError(f"{flag} needs {what}")
            values.append(value)
        elif argument.startswith(f"{flag}="):
            values.append(argument.partition("=")[2])
        else:
            kept.append(argument)
    return kept, values


def _complete(arguments: list[str]) -> list[str]:
    """Add the default values to flags that are given without a value."""
    following = [*arguments[1:], "-"][: len(arguments)]
    return [
        f"{argument}={ALONE[argument]}" if argument in ALONE and after.startswith("-") else argument
        for argument, after in zip(arguments, following, strict=True)
    ]


def configurations(arguments: list[str]) -> list[str]:
    """Return the configuration files on a command line, each once, without those given as text."""
    paths = [value for flag, value in flag_values(arguments) if f"--{flag}" in CONFIG_FLAGS or flag == "c"]
    return [path for path in dict.fromkeys(paths) if path and not _is_text(path)]


def _is_text(value: str) -> bool:
    """Return whether a configuration is given as text instead of a file."""
    return value.lstrip().startswith("{") or "\n" in value or ": " in value


def _read_with_included(path: str, including: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a configuration, and check those that its key `config` includes.

    Raises:
        UsageError: If one cannot be parsed, or includes itself.
    """
    if path in including:
        raise UsageError(f"{path}: the key config leads back to this file; remove it")
    content = read_configuration(path)
    included: Any = content.get("config")
    for each in cast("list[Any]", included if isinstance(included, list) else [included]):
        if isinstance(each, str) and not _is_text(each):
            _read_with_included(str(Path(path).parent / each), (*including, path))
    return content


def given_texts(arguments: list[str]) -> list[tuple[str, str]]:
    """Return every text of a command line and its configuration files, with its key."""
    texts = flag_values(arguments)
    for path in configurations(arguments):
        try:
            texts += strings_of(read_configuration(path))
        except (UserError, OSError):
            continue
    return texts


def _expand_configurations(arguments: list[str]) -> list[str]:
    """Expand `~` where a shell did not, as in `--config=~/mine.yaml`."""
    expanded: list[str] = []
    for before, argument in pairwise(["", *arguments]):
        flag, given, value = argument.partition("=")
        if flag in CONFIG_FLAGS and given:
            argument = f"{flag}={expand(value, flag)}" if value.startswith("~") else argument
        elif before in CONFIG_FLAGS and argument.startswith("~"):
            argument = expand(argument, before)
        expanded.append(argument)
    return expanded


def _refuse_mistyped_words(contents: Mapping[str, Any]) -> None:
    """Refuse a misspelt `class_path` or `init_args`, which the parser would take for something else."""
    for path, content in contents.items():
        for key in _keys_of(content):
            near = nearest(key, SPEC_WORDS, likeness=0.85)
            if near is not None and key not in SPEC_WORDS:
                raise UsageError(f"{path}: there is no key {key!r}; did you mean {near!r}?")


def _keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, part in cast("Mapping[Any, Any]", value).items():
            yield str(key)
            yield from _keys_of(part)
    elif isinstance(value, list):
        for part in cast("list[Any]", value):
            yield from _keys_of(part)


def _replace_whole(arguments: list[str], contents: Mapping[str, Any]) -> list[str]:
    """Make a later value replace an earlier one where the parser would merge both, such as lists by item."""
    replaced: list[str] = []
    given: set[str] = set()
    for place, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        following = arguments[place + 1] if place + 1 < len(arguments) else ""
        content: Any = contents.get(value or following) if flag in CONFIG_FLAGS else None
        for key, nothing in REPLACED_WHOLE.items():
            if flag == f"--{key}" or _has(content, key):
                if key in given:
                    replaced.append(f"--{key}={nothing}")
                given.add(key)
        replaced.append(argument)
    return replaced


def _has(content: Any, key: str) -> bool:
    """Return whether nested mappings have a dotted key. Options of a class without its path do not count."""
    for part in key.split("."):
        if not isinstance(content, dict) or part not in content:
            return False
        content = cast("dict[str, Any]", content)[part]
    return not isinstance(content, dict) or "class_path" in content


def _name_strategy_class(arguments: list[str], contents: Mapping[str, Any]) -> list[str]:
    """Replace a strategy's registered name by its class if the command line gives it options."""
    flag = "--trainer.strategy"
    options = [place for place, argument in enumerate(arguments) if argument.startswith(f"{flag}.")]
    if not options:
        return arguments
    named: list[str] = []
    name: str | None = None
    for before, argument in pairwise(["", *arguments]):
        is_name = argument.startswith(f"{flag}=") or before == flag
        name = argument.removeprefix(f"{flag}=") if is_name else name
        named.append(argument.replace(name, class_path(name)) if is_name and name else argument)
    if name is None:
        name = _configured_strategy(contents)
        if name in CLIP_STRATEGIES:
            named.insert(options[0], f"{flag}={class_path(name)}")
    return named


def class_path(name: str) -> str:
    """Return the class path of one of our strategies, and any other name unchanged."""
    found = CLIP_STRATEGIES.get(name)
    return name if found is None else f"{found.__module__}.{found.__qualname__}"


def _configured_strategy(contents: Mapping[str, Any]) -> str | None:
    """Return the strategy that the last configuration file names, or None."""
    name: str | None = None
    for content in contents.values():
        trainer = cast("dict[str, Any]", content).get("trainer")
        named = cast("dict[str, Any]", trainer).get("strategy") if isinstance(trainer, dict) else None
        name = named if isinstance(named, str) else name
    return name
