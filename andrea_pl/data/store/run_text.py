"""Chooses the text that a run trains on: the current text, or the text that a resumed run began with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl

from andrea_pl.data.store.kept_text import (
    applies,
    checksum_of,
    continue_text,
    find_combination,
    record_of,
    refuse_other_text,
)
from andrea_pl.data.store.preparation import open_prepared, prepare
from andrea_pl.data.store.settings import Preparation, Prepared
from andrea_pl.data.store.versions import note_run


class RunText:
    """The text of a datamodule's run, prepared on one process and opened on all.

    A checkpoint names the stores that its run began with (`record`). For one of an earlier version, which
    does not, a checksum of all text is compared (`checksum`).
    """

    def __init__(self) -> None:
        self._record: dict[str, Any] | None = None
        self._checksum: str | None = None
        self._tokenizer: str | None = None
        self._path = ""
        self._ready: Prepared | None = None  # what this process has prepared, before it is opened
        self._noted: set[str] = set()

    @property
    def is_kept(self) -> bool:
        """Whether a checkpoint names the stores."""
        return self._record is not None

    def keep(self, checkpoint: Mapping[str, Any], key: str, preparation: Preparation, path: str) -> bool:
        """Use the text of a checkpoint; return whether it differs from the text used so far.

        Args:
            checkpoint: A checkpoint that a fit with the datamodule saved.
            key: The checkpoint's key for the datamodule's state.
            preparation: The sources.
            path: The checkpoint's path, for messages.
        """
        record = cast("dict[str, Any] | None", checkpoint.get(key))
        self._path = path
        if record is not None and applies(record, preparation):
            is_new, self._record, self._checksum = self._record != record, record, None
            return is_new
        block = cast("dict[str, Any]", checkpoint.get("andrea_pl") or {})
        self._record, self._checksum = None, _saved_checksum(checkpoint)
        self._tokenizer = cast("str | None", block.get("tokenizer"))
        return True

    def prepare(self, preparation: Preparation, verify: bool) -> None:
        """Prepare missing text, on one process of each machine."""
        if self._record is not None:
            self._ready = continue_text(self._record, preparation, self._path)
        elif self._checksum is not None:
            found = find_combination(preparation, self._checksum, self._tokenizer)
            self._ready = found or prepare(preparation)
        else:
            self._ready = prepare(preparation, verify=verify)

    def open(self, preparation: Preparation, trainer: pl.Trainer | None) -> Prepared:
        """Open the text on every rank.

        Raises:
            UserError: If the text that a resume needs is gone.
        """
        ready, self._ready = self._ready, None
        self._noted = set()
        if self._record is not None:
            return ready or continue_text(self._record, preparation, self._path, says=False)
        if trainer is None or trainer.world_size == 1:
            return ready or open_prepared(preparation)
        # rank zero's stores, though another process may prepare other text meanwhile
        own = (ready or open_prepared(preparation)) if trainer.is_global_zero else None
        record = trainer.strategy.broadcast(record_of(preparation, own) if own else None)
        return own or continue_text(cast("dict[str, Any]", record), preparation, "this run", says=False)

    def replacement(self, preparation: Preparation, prepared: Prepared, says: bool) -> Prepared | None:
        """Return the checkpoint's text if other text is open, else None.

        Args:
            preparation: The sources.
            prepared: The opened text.
            says: Whether to print for each source what has changed since the run began.

        Raises:
            UserError: If that text is gone.
        """
        if self._record is not None:
            if _contents(record_of(preparation, prepared)) == _contents(self._record):
                return None
            return continue_text(self._record, preparation, self._path, says=says)
        if self._checksum is None or self._checksum == checksum_of(preparation, prepared.stores):
            return None
        found = find_combination(preparation, self._checksum, self._tokenizer)
        if found is None:
            raise refuse_other_text(self._path, preparation.cache_dir)
        return found

    def note_checkpoints(self, trainer: pl.Trainer, prepared: Prepared) -> None:
        """Record in the cache where a trainer's checkpoints are, so that `prune` keeps their stores."""
        for run in set(_checkpoint_folders(trainer)) - self._noted:
            self._noted.add(run)
            for store in prepared.stores.values():
                note_run(store.folder, run)


def _contents(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the content ids of a record's stores, by source."""
    entries = cast("dict[str, dict[str, str]]", record["stores"])
    return {name: entry["content"] for name, entry in entries.items()}


def _saved_checksum(checkpoint: Mapping[str, Any]) -> str | None:
    """Return the checksum of the text that a checkpoint's loader has read, or None."""
    found: Any = checkpoint
    try:
        found = found["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]["order"]["text"]
    except (KeyError, IndexError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _checkpoint_folders(trainer: pl.Trainer) -> list[str]:
    """Return the known folders of a trainer's checkpoints."""
    given = [getattr(each, "dirpath", None) for each in trainer.checkpoint_callbacks]
    logs = [getattr(each, "log_dir", None) for each in trainer.loggers]
    folders = [str(each) for each in given if each] or [str(each) for each in logs if each]
    folders = folders or [str(trainer.default_root_dir)]
    return [each if "://" in each else str(Path(each).absolute()) for each in folders]
