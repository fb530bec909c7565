"""Translates old names of options and classes before anything is parsed or compared.

Configurations, command lines and the settings in checkpoints may use the old names for one more minor
version. An old name in a configuration or on the command line causes one warning.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import yaml
from lightning.pytorch.utilities import rank_zero_warn

from andrea_pl.errors import UserError


class UsageError(UserError):
    """Arguments, or a configuration, that cannot be parsed: exit code 2."""


OPTIONS = {
    "model.lr_floor": "min_lr_ratio",
    "data.curriculum.share_of": "weight_unit",
    "data.curriculum.hard_clip": "min_clip_coefficient",
    "data.sources.floor": "min_weight",
}
"""Old keys of a configuration, without list indices, and the last parts of their new keys."""

CLASS_MODULES = {
    "andrea_callbacks": (
        "clip_norm",
        "coherence",
        "console",
        "detector",
        "finite",
        "journal",
        "layout",
        "moments",
        "resume",
        "sources",
        "spikes",
        "updates",
    ),
    "andrea_pl": (
        "checkpoint",
        "data.curriculum",
        "data.documents",
        "data.mixtures",
        "language",
        "saving",
        "strategies.hook",
        "strategies.parallel",
        "strategies.single",
        "update",
    ),
}
"""Old modules in the class paths of each package; now the class path is the package and the class."""

_MOVED = tuple(f"{package}.{module}." for package, modules in CLASS_MODULES.items() for module in modules)

Note = Callable[[str, str], None]
"""Takes an old name and its new one."""


def new_key(key: str) -> str:
    """Return the new key of a renamed option, and any other key unchanged.

    Example:
        >>> new_key("model.lr_floor"), new_key("data.sources.0.floor"), new_key("model.lr")
        ('model.min_lr_ratio', 'data.sources.0.min_weight', 'model.lr')
    """
    renamed = OPTIONS.get(".".join(part for part in key.split(".") if not part.isdecimal()))
    return key if renamed is None else f"{key.rpartition('.')[0]}.{renamed}"


def new_class_path(path: str) -> str:
    """Return the new class path of a moved class, and any other text unchanged.

    Example:
        >>> new_class_path("andrea_pl.saving.DurableCheckpoint"), new_class_path("torch.optim.AdamW")
        ('andrea_pl.DurableCheckpoint', 'torch.optim.AdamW')
    """
    name = path.rpartition(".")[2]
    if name[:1].isupper() and any(path == f"{module}{name}" for module in _MOVED):
        return f"{path.partition('.')[0]}.{name}"
    return path


def translate(value: Any, note: Note | None = None, key: str = "") -> Any:
    """Return nested settings with old names replaced.

    Args:
        value: Mappings, lists and plain values.
        note: Called for every old name.
        key: The value's key in the configuration.

    Raises:
        UsageError: If an option is given by both its old and its new name.
    """
    if isinstance(value, Mapping):
        translated: dict[Any, Any] = {}
        for name, part in cast("Mapping[Any, Any]", value).items():
            place = f"{key}.{name}" if key else str(name)
            renamed = OPTIONS.get(place)
            if renamed is not None and renamed in value:
                raise UsageError(f"{place} is called {new_key(place)} now, and both are given; remove one")
            if renamed is not None and note is not None:
                note(place, new_key(place))
            translated[name if renamed is None else renamed] = translate(part, note, place)
        return translated
    if isinstance(value, list):
        return [translate(each, note, key) for each in cast("list[Any]", value)]
    if isinstance(value, str):
        renamed = new_class_path(value)
        if renamed != value and note is not None:
            note(value, renamed)
        return renamed
    return value


def translate_arguments(arguments: Iterable[str]) -> list[str]:
    """Return a command line with old names replaced, in flags and in their values."""
    translated: list[str] = []
    before = ""
    for argument in arguments:
        flag, given, value = argument.partition("=")
        if argument.startswith("--"):
            key = new_key(flag[2:])
            if key != flag[2:]:
                note_renamed(flag, f"--{key}")
            translated.append(f"--{key}{given}{_translate_value(key, value)}")
            before = key
        else:
            translated.append(_translate_value(before, argument))
            before = ""
    return translated


def _translate_value(key: str, value: str) -> str:
    """Translate a value on the command line. A value with options inside is YAML."""
    key = key.removesuffix("+")
    if value[:1] not in "[{" or not any(option.startswith(f"{key}.") for option in OPTIONS):
        return new_class_path(value)
    try:
        content = yaml.safe_load(value)
    except yaml.YAMLError:
        return value  # which the parser refuses
    renamed = translate(content, note_renamed, key)
    return value if renamed == content else json.dumps(renamed)


_noted: set[str] = set()


def note_renamed(old: str, new: str) -> None:
    """Warn once about an old name."""
    if old not in _noted:
        _noted.add(old)
        rank_zero_warn(
            f"{old} is called {new} now; the old name goes in the next minor version", category=FutureWarning
        )
