"""Compares a checkpoint's settings with those of a resume."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from lightning.pytorch.utilities import rank_zero_info

from andrea_pl.errors import UserError

KEY = "andrea_config"
"""The checkpoint's key for the settings of its run."""

ONLY_THIS_CALL = ("config", "ckpt_path", "init_from", "resume", "allow_drift")
"""Options of a single call, not of a run."""

FREE = (
    "trainer.logger",
    "trainer.default_root_dir",
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    "trainer.enable_checkpointing",
    "trainer.log_every_n_steps",
    "trainer.num_sanity_val_steps",
    "trainer.profiler",
    "trainer.max_time",
    "data.cache_dir",
    "data.num_workers",
    "data.prefetch_factor",
    "data.tokenizer",
    "model.network.vocab_size",
    "model.network.block_size",
)
"""Settings that affect where a run is written and how long it takes, but not what it trains. The tokenizer
and the network's sizes, which may be left out, are compared with the checkpoint's own elsewhere."""

FIXED = ("model.optimizer", "model.schedule", "model.network")
"""Settings that a resume cannot change, since the state in the checkpoint depends on them."""

ABSENT = "not set"


def compare_settings(
    checkpoint: Mapping[str, Any],
    ours: Mapping[str, Any],
    path: str,
    allowed: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Refuse a resume with other settings than the checkpoint's.

    Args:
        checkpoint: A checkpoint written by a command. One without settings passes.
        ours: The nested settings of this call.
        path: The checkpoint's path.
        allowed: Keys that may differ, with everything below them. A warning names unknown keys.
        defaults: The nested defaults. An older checkpoint may lack newer settings, which then had their
            defaults.

    Raises:
        UserError: If other settings differ (the message has both values), or a setting that a resume cannot
            change.
    """
    theirs = cast("Mapping[str, Any] | None", checkpoint.get(KEY))
    if theirs is None:
        return
    here, there = _flat(_relevant(ours)), _flat(_relevant(theirs))
    usual = _flat(_relevant(defaults or {}))
    there |= {key: value for key, value in usual.items() if key in here and key not in there}
    for key in allowed:
        is_free = any(_covers(each, key) for each in FREE)
        if not is_free and not any(_covers(key, each) for each in here | there):
            rank_zero_info(f"--allow_drift {key}: there is no such setting, here or in the checkpoint")
    differing = [key for key in sorted(here | there) if here.get(key, ABSENT) != there.get(key, ABSENT)]
    fixed = [key for key in differing if any(_covers(each, key) for each in FIXED)]
    drifted = [key for key in differing if not any(_covers(each, key) for each in allowed)]

    def said(keys: list[str]) -> str:
        both = ((key, there.get(key, ABSENT), here.get(key, ABSENT)) for key in keys)
        return _some([f"{key}: checkpoint {theirs!r}, here {ours!r}" for key, theirs, ours in both])

    if fixed:
        raise UserError(
            f"{path} was written by other settings, which a resume cannot change: {said(fixed)}; put them "
            "back, or take the weights alone with --init_from"
        )
    if drifted:
        keys = " ".join(f"--allow_drift {key}" for key in drifted[:4])
        raise UserError(
            f"{path} was written by other settings: {said(drifted)}. Put them back, or let them differ: "
            f"{keys}"
        )
    if differing:
        rank_zero_info(f"goes on with other settings, as allowed: {said(differing)}")


def _relevant(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings without options of a single call, and without checkpoint callbacks."""
    kept = {key: value for key, value in settings.items() if key not in ONLY_THIS_CALL}
    trainer = dict(kept.get("trainer") or {})
    callbacks: Any = trainer.get("callbacks")
    if isinstance(callbacks, list):
        each_of = cast("list[Any]", callbacks)
        trainer["callbacks"] = [each for each in each_of if "Checkpoint" not in str(_class_of(each))] or None
    return kept | {"trainer": trainer}


def _class_of(value: Any) -> Any:
    return cast("dict[str, Any]", value).get("class_path") if isinstance(value, dict) else value


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings and lists as dotted keys, without those that may always differ."""
    if any(_covers(each, prefix) for each in FREE):
        return {}
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping) and value:
        parts = cast("Mapping[Any, Any]", value).items()
    elif isinstance(value, (list, tuple)) and any(
        isinstance(each, (dict, list)) for each in cast("Any", value)
    ):
        parts = enumerate(cast("list[Any]", value))
    elif prefix:
        return {prefix: list(cast("Any", value)) if isinstance(value, tuple) else value}
    flat: dict[str, Any] = {}
    for key, part in parts:
        flat |= _flat(part, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _covers(key: str, other: str) -> bool:
    return other == key or other.startswith(f"{key}.")


def _some(said: Sequence[str]) -> str:
    more = f"; and {len(said) - 6} more" if len(said) > 6 else ""
    return "; ".join(said[:6]) + more
