"""Removes old stores from the cache.

A store stays while a process has it open, while it matches the current text, while a folder of checkpoints
that were trained on it exists, and for `GRACE_DAYS` after its last use. Everything else in the cache stays.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from andrea_pl.data.store.locking import LOCK_NAME, preparing, taken
from andrea_pl.data.store.token_store import HELD
from andrea_pl.data.store.versions import DAY, all_versions, keepers, last_used, sweep_temporaries
from andrea_pl.errors import UserError

GRACE_DAYS = 1
"""Days for which a store stays after its last use, for runs that have not saved a checkpoint yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Something removed from the cache."""

    path: Path
    size: int
    """Bytes."""


def prune(cache: Path) -> list[Removed]:
    """Remove unused stores of a cache, and what killed processes left.

    Args:
        cache: The cache's folder, `data.cache_dir`.

    Returns:
        The removed stores and files.

    Raises:
        UserError: If something cannot be removed; the message names it.
    """
    removed: list[Removed] = []
    for settings in sorted(cache.iterdir()) if cache.is_dir() else []:
        if not settings.is_dir() or not _is_ours(settings):
            continue
        try:
            with preparing(settings) as is_alone:
                removed += [Removed(path=each, size=0) for each in sweep_temporaries(settings, is_alone)]
                for stores in all_versions(settings).values():
                    # the first is of the text as it is now, or was when the source was last prepared
                    removed += [_remove(store) for store in stores[1:] if _is_unused(store)]
        except OSError as error:
            raise UserError(
                f"{settings} cannot be pruned ({error.strerror or error}); check its owner and permissions"
            ) from error
    return removed


def _is_ours(settings: Path) -> bool:
    """Return whether a preparation made this folder of the cache."""
    return (settings / LOCK_NAME).exists() or any(settings.glob("*/manifest.json"))


def _is_unused(store: Path) -> bool:
    if keepers(store) or time.time() - last_used(store) < GRACE_DAYS * DAY:
        return False
    with taken(store / HELD) as is_free:
        return is_free


def _remove(store: Path) -> Removed:
    size = sum(each.stat().st_size for each in store.rglob("*") if each.is_file())
    aside = store.with_name(f".{store.name}.pruned")  # swept later, if this is killed half-way
    store.rename(aside)
    shutil.rmtree(aside)
    return Removed(path=store, size=size)
