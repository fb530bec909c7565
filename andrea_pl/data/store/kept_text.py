"""Records in checkpoints the text that a run began with, and finds it again for a resume.

A checkpoint names the store of each source by its content, and holds the tokenizer. A resume uses exactly
these stores, even if the sources' files have changed. A missing store is made again if the text is unchanged;
otherwise the resume is refused.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, cast

from lightning.pytorch.utilities import rank_zero_info

from andrea_pl.data.store.inputs import SourceInput, change_between
from andrea_pl.data.store.preparation import keep_tokenizer, prepare
from andrea_pl.data.store.settings import Preparation, Prepared, decisive_settings
from andrea_pl.data.store.token_store import TokenStore, fingerprint, version_folder
from andrea_pl.data.store.tokenizer import TextTokenizer
from andrea_pl.data.store.versions import all_versions, find_content, note_use, read_inputs, versions
from andrea_pl.errors import UserError

RECORD_FORMAT = 1

MOST_COMBINATIONS = 10_000
"""Maximum number of combinations of stores to compare with a checkpoint that does not name its stores."""


def record_of(preparation: Preparation, prepared: Prepared) -> dict[str, Any]:
    """Return a checkpoint's record of the run's text, as plain values."""
    return {
        "format": RECORD_FORMAT,
        "settings": _settings(preparation),
        "stores": {
            name: {"content": store.content, "folder": str(store.folder.absolute())}
            for name, store in prepared.stores.items()
        },
        "tokenizer": prepared.tokenizer.definition if prepared.tokenizer else None,
    }


def applies(record: Any, preparation: Preparation) -> bool:
    """Return whether a record is complete and has the same sources with the same settings."""
    if not isinstance(record, dict):
        return False
    known = cast("dict[str, Any]", record)
    if known.get("format") != RECORD_FORMAT or known.get("settings") != _settings(preparation):
        return False
    stores, tokenizer = known.get("stores"), known.get("tokenizer")
    names = {source.name for source in preparation.stored}
    return (
        isinstance(stores, dict)
        and cast("dict[str, Any]", stores).keys() == names
        and all(map(_is_entry, cast("dict[str, Any]", stores).values()))
        and (tokenizer is None or isinstance(tokenizer, str))
    )


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    known = cast("dict[str, Any]", entry)
    return all(isinstance(known.get(key), str) for key in ("content", "folder"))


def continue_text(
    record: Mapping[str, Any], preparation: Preparation, path: str, says: bool = True
) -> Prepared:
    """Open the stores that a run began with, and print what has changed in each source since.

    Args:
        record: The record in the run's checkpoint.
        preparation: The current sources.
        path: The checkpoint's path.
        says: Whether to compare the current sources and print changes.

    Raises:
        UserError: If a store is gone and its text has changed.
    """
    tokenizer = _tokenizer(preparation, record["tokenizer"])
    entries = cast("dict[str, dict[str, str]]", record["stores"])
    stores = {name: _find(preparation, name, entry) for name, entry in entries.items()}
    found = {name: store for name, store in stores.items() if store is not None}
    missing = {name: entry for name, entry in entries.items() if name not in found}
    if missing:
        found |= _make_again(preparation, tokenizer, missing, path)
    if says:
        _say_changes(preparation, found)
    return Prepared(tokenizer=tokenizer, stores={name: found[name] for name in entries})


def find_combination(
    preparation: Preparation, text: str, definition: str | None, says: bool = True
) -> Prepared | None:
    """Find the stores of a checkpoint that does not name them, by a checksum of all of them.

    Args:
        preparation: The sources.
        text: The result of `checksum_of` when the checkpoint was saved.
        definition: The checkpoint's tokenizer.
        says: Whether to compare the current sources and print changes.
    """
    names = [source.name for source in preparation.sources if source.kind != "tokens"]
    choices = [_readable(_anywhere(preparation, name)) for name in names]
    for combination in islice(product(*choices), MOST_COMBINATIONS):
        stores = dict(zip(names, combination, strict=True))
        if checksum_of(preparation, stores) == text:
            for store in combination:
                TokenStore.verify(store.folder)
                note_use(store.folder)
            if says:
                _say_changes(preparation, stores)
            return Prepared(tokenizer=_tokenizer(preparation, definition), stores=stores)
    return None


def checksum_of(preparation: Preparation, stores: Mapping[str, TokenStore]) -> str:
    """Return a checksum of all text, from the stores' checksums."""
    return fingerprint(
        [
            fingerprint(source.documents)
            if source.kind == "tokens"
            else stores[source.name].manifest["sha256"]
            for source in preparation.sources
        ]
    )


def say_what_is_evaluated(record: Mapping[str, Any], preparation: Preparation, prepared: Prepared) -> None:
    """Print for each source how the evaluated text differs from that of the run."""
    for name, entry in cast("dict[str, dict[str, str]]", record["stores"]).items():
        store = prepared.stores.get(name)
        if store is None or store.content == entry["content"]:
            continue
        trained = _find(preparation, name, entry)
        change = "other text" if trained is None else change_between(trained, store)
        rank_zero_info(f"{name}: {change} than the run began with; this evaluates the text as it is now")


def refuse_other_text(path: str, cache: Path) -> UserError:
    """Return the error for a checkpoint whose text is gone, from the sources and from the cache."""
    return UserError(
        f"{path}: the text changed since this run began, and what was prepared for it is not in {cache}; put "
        "the text back as it was, or point `cache_dir` at the cache that the run used, or start from its "
        f"weights with `init_from`={path}"
    )


def _settings(preparation: Preparation) -> str:
    """Return a hash of the settings that affect the tokens of a text; its paths do not."""
    sources = [
        {key: value for key, value in decisive_settings(source).items() if key != "paths"}
        for source in preparation.sources
    ]
    shares = [preparation.val_fraction, preparation.test_fraction]
    return fingerprint([sources, preparation.vocab_size, shares, preparation.on_error])


def _find(preparation: Preparation, name: str, entry: Mapping[str, str]) -> TokenStore | None:
    """Open the store of a content, at the run's path or anywhere in the cache."""
    content = entry["content"]
    there = Path(entry["folder"])
    own = preparation.folder / name

    def places() -> Iterator[Path]:
        yield from (there, version_folder(there.with_name(name), content), version_folder(own, content))
        yield from _anywhere(preparation, name)

    store = find_content(places(), content)
    if store is not None:
        note_use(store.folder)
    return store


def _anywhere(preparation: Preparation, name: str) -> Iterator[Path]:
    """Yield the stores of sources with this name, those with these settings first."""
    yield from versions(preparation.folder / name)
    if preparation.cache_dir.is_dir():
        settings = (each for each in sorted(preparation.cache_dir.iterdir()) if each.is_dir())
        others = (each for each in settings if each != preparation.folder)
        yield from chain.from_iterable(all_versions(each).get(name, []) for each in others)


def _tokenizer(preparation: Preparation, definition: str | None) -> TextTokenizer | None:
    """Return the given tokenizer if its file still exists, else the checkpoint's."""
    if preparation.tokenizer and (definition is None or Path(preparation.tokenizer).expanduser().exists()):
        return TextTokenizer.load(preparation.tokenizer)
    return TextTokenizer(definition) if definition else None


def _make_again(
    preparation: Preparation, tokenizer: TextTokenizer | None, missing: Mapping[str, Any], path: str
) -> dict[str, TokenStore]:
    gone = ", ".join(entry["folder"] for entry in missing.values())
    remedy = (
        f"put the text back as it was, or the store into {preparation.cache_dir}, or start from the run's "
        f"weights with `init_from`={path}"
    )
    if preparation.tokenizer is None and tokenizer is not None:
        preparation = keep_tokenizer(preparation, tokenizer)
    try:
        made = prepare(preparation, only=list(missing)).stores
    except UserError as error:
        raise UserError(
            f"{path} needs the text that its run began with, and that is gone from {gone} and cannot be "
            f"prepared again ({error}); {remedy}"
        ) from error
    changed = [name for name, entry in missing.items() if made[name].content != entry["content"]]
    if changed:
        raise UserError(
            f"{path} needs the text that its run began with, and that is gone from {gone}; the text of "
            f"{', '.join(changed)} changed since then. To go on, {remedy}"
        )
    return made


def _say_changes(preparation: Preparation, stores: Mapping[str, TokenStore]) -> None:
    for source in preparation.sources:
        store = stores.get(source.name)
        if store is None:
            continue
        now = SourceInput(source, preparation.vocab_size, preparation.on_error)
        change = now.change_from(store, read_inputs(store))
        if change is not None:
            rank_zero_info(f"{source.name}: {change}; this run keeps the text it started with")


def _readable(folders: Iterator[Path]) -> list[TokenStore]:
    """Open the stores, each content only once."""
    stores: dict[str, TokenStore] = {}
    for folder in folders:
        with suppress(UserError):
            store = TokenStore(folder)
            stores.setdefault(store.content, store)
    return list(stores.values())
