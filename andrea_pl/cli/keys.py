"""Writes full keys of options into messages: a library class's `max_norm` is the command's model.max_norm."""

import inspect
import re
from functools import cache

from andrea_pl.data.mixing.curriculum import Curriculum
from andrea_pl.data.module import TextDataModule
from andrea_pl.language.module import LanguageModule
from andrea_pl.network import TransformerConfig

OWNERS: tuple[tuple[str, type], ...] = (
    ("model.network", TransformerConfig),
    ("data.curriculum", Curriculum),
    ("model", LanguageModule),
    ("data", TextDataModule),
)
"""Keys of a configuration and the classes with their options. For a shared name the last one wins."""

FLAGS = ("init_from", "resume", "ckpt_path", "allow_drift")


def with_full_keys(message: str) -> str:
    """Return a library class's message with its quoted options replaced by their configuration keys.

    Example:
        >>> with_full_keys("`max_norm` must be more than 0; `init_from` takes the weights")
        'model.max_norm must be more than 0; --init_from takes the weights'
    """
    return re.sub(r"`([a-z_]+(?:\.[a-z_]+)*)`", lambda found: _keys().get(found[1], found[0]), message)


@cache
def _keys() -> dict[str, str]:
    keys = {flag: f"--{flag}" for flag in FLAGS}
    for prefix, owner in OWNERS:
        for name in inspect.signature(owner).parameters:
            keys[name] = f"{prefix}.{name}"
            if prefix == "model.network":
                keys[f"network.{name}"] = f"{prefix}.{name}"
    return keys
