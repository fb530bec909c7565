"""The stores of a source, one for each version of its text.

<cache_dir>/<settings>/<source>.<content>/  a store; its tokens never change
                                  inputs.json   the files when they last had this content
                                  runs/         one file per folder of checkpoints trained on it
                       <source>             a link to the current store; earlier versions wrote a folder
                       .lock                held by the process that prepares
                       .<source>.<random>   a store that is being written
"""

import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from lightning.pytorch.utilities import rank_zero_warn

from andrea_callbacks.numerics.atomic_write import replace_durably, write_all
from andrea_pl.data.store.token_store import (
    TokenStore,
    content_id,
    fingerprint,
    read_manifest,
    version_folder,
)
from andrea_pl.errors import UserError

INPUTS = "inputs.json"
RUNS = "runs"
DAY = 24 * 3600.0
UNSEEN_DAYS = 30
"""Days for which a run on another machine keeps a store, if its folder cannot be seen from here."""


def versions(folder: Path) -> list[Path]:
    """Return the stores of a source: the current one, then the others, most recently used first.

    Args:
        folder: The settings' folder and the source's name.
    """
    pattern = re.compile(re.escape(folder.name) + r"\.[0-9a-f]{16}")
    others = [each for each in _entries(folder.parent) if pattern.fullmatch(each.name) and each.is_dir()]
    others.sort(key=last_used, reverse=True)
    if folder.is_symlink():
        current = folder.with_name(folder.readlink().name)
        return [*(each for each in others if each == current), *(each for each in others if each != current)]
    return [folder, *others] if folder.is_dir() else others


def all_versions(settings: Path) -> dict[str, list[Path]]:
    """Return the stores of every source in a settings' folder, each list as `versions` orders it."""
    names = {
        each.name.partition(".")[0]
        for each in _entries(settings)
        if not each.name.startswith(".") and each.is_dir()
    }
    return {name: versions(settings / name) for name in sorted(names)}


def find_content(folders: Iterator[Path], content: str) -> TokenStore | None:
    """Open the first complete store with a content among some stores, or return None."""
    for folder in folders:
        with suppress(UserError):
            if content_id(read_manifest(folder)) == content:
                store = TokenStore(folder)
                TokenStore.verify(folder)
                return store
    return None


def name_current(folder: Path, store: Path) -> None:
    """Link the source's plain name to the current store; keep a store that had that name.

    Without links or permission to write, the store is still found by its content.
    """
    if store == folder:
        return
    try:
        if folder.is_symlink() and folder.readlink().name == store.name:
            return
        if folder.is_dir() and not folder.is_symlink():
            _keep_earlier(folder)
        link = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        link.symlink_to(store.name)
        try:
            link.replace(folder)
        finally:
            link.unlink(missing_ok=True)
    except OSError:
        return


def _keep_earlier(folder: Path) -> None:
    """Rename a store that an earlier version wrote under the plain name to the name with its content."""
    try:
        own = version_folder(folder, content_id(read_manifest(folder)))
    except UserError:
        own = None
    if own is None or own.exists():
        aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        folder.rename(own)


def read_inputs(store: TokenStore) -> list[Any]:
    """Return the input that last matched a store."""
    try:
        read: Any = json.loads((store.folder / INPUTS).read_text(encoding="utf-8"))
        if isinstance(read, list):
            return cast("list[Any]", read)
    except (OSError, ValueError):
        pass
    return cast("list[Any]", store.manifest.get("inputs") or [])


def write_inputs(store: Path, entries: list[Any]) -> None:
    """Record the input that matches a store. Without permission to write, it is compared again next time."""
    with suppress(OSError):
        replace_text(store / INPUTS, json.dumps(entries))


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text atomically."""
    replace_durably(path, lambda descriptor: write_all(descriptor, text.encode()))


def note_use(store: Path) -> None:
    """Record the use of a store, once a day."""
    with suppress(OSError):
        if time.time() - last_used(store) > DAY:
            os.utime(store / "manifest.json")


def last_used(store: Path) -> float:
    """Return when a store was last used, with a precision of a day; 0 if it is not a store."""
    try:
        return (store / "manifest.json").stat().st_mtime
    except OSError:
        return 0.0


def note_run(store: Path, run: str) -> None:
    """Record that checkpoints in a folder were trained on a store, so that `--prune` keeps it."""
    known = {"folder": run, "machine": socket.gethostname()}
    try:
        (store / RUNS).mkdir(exist_ok=True)
        replace_text(store / RUNS / f"{fingerprint(run)}.json", json.dumps(known))
    except OSError as error:
        rank_zero_warn(
            f"{store / RUNS}: it cannot be noted that {run} needs this text ({error.strerror or error}), and "
            "andrea prepare --prune may remove it; make the folder writable"
        )


def keepers(store: Path) -> list[str]:
    """Return the existing folders of checkpoints that need a store."""
    kept: list[str] = []
    for file in _entries(store / RUNS):
        with suppress(OSError, ValueError, KeyError, TypeError):
            known: Any = json.loads(file.read_text(encoding="utf-8"))
            is_recent = time.time() - file.stat().st_mtime < UNSEEN_DAYS * DAY
            is_unseen = known["machine"] != socket.gethostname() and is_recent
            if "://" in known["folder"] or Path(known["folder"]).exists() or is_unseen:
                kept.append(str(known["folder"]))
    return kept


def sweep_temporaries(folder: Path, is_alone: bool) -> list[Path]:
    """Remove unfinished files of killed processes in a folder of the cache.

    Args:
        folder: The folder.
        is_alone: Whether no other process can be writing there. Otherwise only day-old files are removed.

    Returns:
        The removed files and folders.
    """
    found = [each for each in _entries(folder) if re.fullmatch(r"\..+\.[^.]+", each.name)]
    dead = [each for each in found if is_alone or time.time() - _newest(each) > DAY]
    for each in dead:
        with suppress(OSError):
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
    return dead


def _newest(path: Path) -> float:
    times = [0.0]
    for each in (path, *_entries(path)):
        with suppress(OSError):
            times.append(each.lstat().st_mtime)
    return max(times)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
