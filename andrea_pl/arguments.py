"""The command's arguments before the parser sees them: what may be reached, and what is shorthand."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import yaml
from jsonargparse import set_parsing_settings
from lightning.pytorch.strategies import Strategy

from andrea_pl.errors import UserError
from andrea_pl.resuming import NEWEST
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
"""What a configuration file may name as a class."""

TRUST_FLAG = "--trust_imports"
DRIFT_FLAG = "--allow_drift"
RESUME_FLAG = "--resume"

TRUST_HELP = (
    f"A configuration may name classes of {', '.join(TRUSTED_IMPORTS)}; {TRUST_FLAG} NAME on the command "
    "line allows another module or package, NAME, as well."
)

CLIP_STRATEGIES: dict[str, type[Strategy]] = {
    each.strategy_name: each
    for each in (ClipSingleDeviceStrategy, ClipDDPStrategy, ClipModelParallelStrategy)
}
"""The strategies that carry the clip hook, by the names they are registered under."""

REPLACED_WHOLE = {"data.sources": "[]", "data.curriculum.mixture": "null", "trainer.callbacks": "[]"}
"""Keys whose later value has nothing of an earlier one, and what they are emptied by."""


def _check_configuration(path: Path) -> None:
    """Name a configuration file that holds nothing or no text; the parser's own words name no file."""
    try:
        if not path.read_text(encoding="utf-8").strip():
            raise UserError(f"{path}: an empty configuration; start from one of the shipped configs")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 (byte {error.start}); convert the file, with iconv say"
        ) from error


def restrict(arguments: list[str]) -> list[str]:
    """Close what a configuration file could reach; take the names that the user trusts.

    Returns:
        The arguments as the parser takes them.

    Raises:
        UserError: If a configuration is empty or no text, or a flag lacks its value.
    """
    kept, trusted = _take(TRUST_FLAG, "the name of a module or package", arguments)
    kept, allowed = _take(DRIFT_FLAG, "a key, such as trainer.max_steps", kept)
    allowed = [key for each in allowed for key in each.split(",")]
    if allowed:
        kept.append(f"{DRIFT_FLAG}={json.dumps(allowed)}")
    kept = _name_newest(kept)
    for before, argument in pairwise(["", *kept]):
        path = argument.partition("=")[2] if argument.startswith("--config=") else argument
        if (before in ("-c", "--config") or path != argument) and Path(path).is_file():
            _check_configuration(Path(path))
    kept = _name_strategy_class(_replace_whole(kept))
    set_parsing_settings(config_read_mode_urls_enabled=False, config_read_mode_fsspec_enabled=False)
    try:
        set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=[*TRUSTED_IMPORTS, *trusted])
    except ValueError as error:
        raise UserError(f"{TRUST_FLAG}: {error}") from error
    return kept


def _take(flag: str, what: str, arguments: list[str]) -> tuple[list[str], list[str]]:
    """Take a flag that may be given several times out of the arguments; return the rest, and its values."""
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


def _name_newest(arguments: list[str]) -> list[str]:
    """Say what `--resume` means where no folder follows it."""
    following = [*arguments[1:], "-"]
    return (
        [
            f"{RESUME_FLAG}={NEWEST}" if argument == RESUME_FLAG and after.startswith("-") else argument
            for argument, after in zip(arguments, following, strict=True)
        ]
        if arguments
        else arguments
    )


def _replace_whole(arguments: list[str]) -> list[str]:
    """Have a later value replace an earlier one where the parser would mix both: lists item by item, say."""
    replaced: list[str] = []
    given: set[str] = set()
    for place, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        following = arguments[place + 1] if place + 1 < len(arguments) else ""
        content: Any = _read_configuration(value or following) if flag in ("-c", "--config") else None
        for key, nothing in REPLACED_WHOLE.items():
            if flag == f"--{key}" or _has(content, key):
                if key in given:
                    replaced.append(f"--{key}={nothing}")
                given.add(key)
        replaced.append(argument)
    return replaced


def _has(content: Any, key: str) -> bool:
    """Say whether nested mappings have a dotted key; options of a class alone, without its path, are none."""
    for part in key.split("."):
        if not isinstance(content, dict) or part not in content:
            return False
        content = cast("dict[str, Any]", content)[part]
    return not isinstance(content, dict) or "class_path" in content


def _read_configuration(path: str) -> Any:
    """Return what a configuration file holds, nothing where the parser will find fault with it."""
    if not Path(path).is_file():
        return {}
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}


def _name_strategy_class(arguments: list[str]) -> list[str]:
    """Write the class where one of our strategies is named and the command line gives it options."""
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
        name = _configured_strategy(arguments)
        if name in CLIP_STRATEGIES:
            named.insert(options[0], f"{flag}={class_path(name)}")
    return named


def class_path(name: str) -> str:
    """Return the class path of one of our strategies, and any other name as it is."""
    found = CLIP_STRATEGIES.get(name)
    return name if found is None else f"{found.__module__}.{found.__qualname__}"


def _configured_strategy(arguments: list[str]) -> str | None:
    """Return the strategy that the last configuration file names, if any names one."""
    name: str | None = None
    for before, argument in pairwise(["", *arguments]):
        path = argument.partition("=")[2] if argument.startswith("--config=") else argument
        if before in ("-c", "--config") or path != argument:
            content = _read_configuration(path)
            trainer = cast("dict[str, Any]", content).get("trainer") if isinstance(content, dict) else None
            named = cast("dict[str, Any]", trainer).get("strategy") if isinstance(trainer, dict) else None
            name = named if isinstance(named, str) else name
    return name
