"""Prepares token stores from sources: learns the tokenizer, splits and encodes documents, detects changes.

Changed text gets a new store beside the old one, which stays for the runs that were trained on it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from lightning.pytorch.utilities import rank_zero_info

from andrea_pl.data.store.inputs import SourceInput, documents_of
from andrea_pl.data.store.learning import Learnt, inputs_of, learn_tokenizer, mark_of
from andrea_pl.data.store.locking import preparing
from andrea_pl.data.store.settings import Preparation, Prepared, refuse_mixture
from andrea_pl.data.store.token_store import (
    SPLITS,
    TokenStore,
    disk_error,
)
from andrea_pl.data.store.tokenizer import TextTokenizer
from andrea_pl.data.store.versions import (
    name_current,
    note_use,
    read_inputs,
    replace_text,
    sweep_temporaries,
    versions,
    write_inputs,
)
from andrea_pl.data.store.writing import write_source
from andrea_pl.errors import UserError


def prepare(preparation: Preparation, only: Sequence[str] | None = None, verify: bool = False) -> Prepared:
    """Write missing or outdated stores, and print what was done.

    If several processes prepare one folder, one does the work and the others wait for it.

    Args:
        preparation: What to prepare.
        only: Names of the needed sources; by default all.
        verify: Whether to compare all documents with their stores, even if no size or time has changed.

    Returns:
        The opened stores and their tokenizer.

    Raises:
        UserError: If input cannot be read, there is no text, or the disk is full.
    """
    prepared = None if verify else _Pass(preparation, only).find()
    if prepared is not None:
        return prepared
    try:
        with preparing(preparation.folder) as is_alone:
            swept = sweep_temporaries(preparation.folder, is_alone)
            if swept:
                rank_zero_info(
                    f"{preparation.folder}: removed what an unfinished preparation left: "
                    f"{', '.join(each.name for each in swept)}"
                )
            return _Pass(preparation, only, verify).write()
    except OSError as error:
        raise disk_error(preparation.folder, error) from error


def open_prepared(preparation: Preparation) -> Prepared:
    """Open the stores that `prepare` wrote last.

    Raises:
        UserError: If a store is missing.
    """
    tokenizer = None
    if preparation.tokenizer:
        tokenizer = TextTokenizer.load(preparation.tokenizer)
    elif preparation.text:
        tokenizer = TextTokenizer.load(preparation.folder / "tokenizer.json")
    stores: dict[str, TokenStore] = {}
    for source in preparation.stored:
        plain = preparation.folder / source.name
        stores[source.name] = TokenStore(next(iter(versions(plain)), plain).resolve())
    return Prepared(tokenizer=tokenizer, stores=stores)


def keep_tokenizer(preparation: Preparation, tokenizer: TextTokenizer) -> Preparation:
    """Return a preparation with a given tokenizer, saved in the cache under its fingerprint.

    If the cache already holds the unchanged text with exactly that tokenizer, the preparation does not
    change.
    """
    learnt = Learnt.read(preparation.folder)
    if learnt is not None and learnt.tokenizer.fingerprint == tokenizer.fingerprint:
        inputs = [
            SourceInput(source, preparation.vocab_size, preparation.on_error) for source in preparation.stored
        ]
        if learnt.inputs == inputs_of(each for each in inputs if not each.is_token_file):
            return preparation
    path = preparation.cache_dir / f"tokenizer-{tokenizer.fingerprint[:16]}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != tokenizer.definition:
            replace_text(path, tokenizer.definition)
    except OSError as error:
        raise disk_error(path, error) from error
    return replace(preparation, tokenizer=str(path))


class _Pass:
    """A snapshot of all sources, each listed once, and the work to do.

    Args:
        preparation: What to prepare.
        only: Names of the needed sources; by default all.
        verify: Whether to compare documents even if sizes and times agree.
    """

    def __init__(self, preparation: Preparation, only: Sequence[str] | None, verify: bool = False) -> None:
        self.preparation = preparation
        self.folder = preparation.folder
        self.verify = verify
        self.inputs = {
            source.name: SourceInput(source, preparation.vocab_size, preparation.on_error)
            for source in preparation.stored
        }
        refuse_mixture(preparation, [*self.inputs.values()])
        self.needed = [name for name in self.inputs if only is None or name in only]
        self.changed: set[str] = set()
        """Sources whose documents match no store."""
        self.verified: set[Path] = set()

    @property
    def text(self) -> list[SourceInput]:
        """The sources that need a tokenizer."""
        return [each for each in self.inputs.values() if not each.is_token_file]

    def find(self) -> Prepared | None:
        """Open the stores if all are current by sizes and times; None if there is work to do."""
        tokenizer = None
        if self.preparation.tokenizer:
            tokenizer = TextTokenizer.load(self.preparation.tokenizer)
        elif self.text:
            learnt = Learnt.read(self.folder)
            if learnt is None or learnt.inputs != inputs_of(self.text):
                return None
            tokenizer = learnt.tokenizer
        stores: dict[str, TokenStore] = {}
        for name in self.needed:
            found = self.find_store(name, tokenizer, compare=False)
            if isinstance(found, str):
                return None
            stores[name] = found
        return Prepared(tokenizer=tokenizer, stores=stores)

    def write(self) -> Prepared:
        """Do the work: learn the tokenizer, write stores, and open all."""
        tokenizer = self.tokenizer()
        seen: dict[int, str] = {}
        stores: dict[str, TokenStore] = {}
        for name in self.needed:
            found = self.find_store(name, tokenizer)
            if isinstance(found, str):
                rank_zero_info(f"preparing source {name!r}: {found}")
                self.inputs[name].source.report_passed_over()
                found = write_source(self.preparation, self.inputs[name], tokenizer, seen)
            else:
                records = found.records
                splits = [SPLITS[number] for number in cast("list[int]", records["split"].tolist())]
                seen |= dict(zip(cast("list[int]", records["digest"].tolist()), splits, strict=True))
            name_current(self.folder / name, found.folder)
            stores[name] = found
        return Prepared(tokenizer=tokenizer, stores=stores)

    def tokenizer(self) -> TextTokenizer | None:
        """Return the given tokenizer, or the one learnt from exactly this text; else learn it."""
        if self.preparation.tokenizer:
            return TextTokenizer.load(self.preparation.tokenizer)
        if not self.text:
            return None
        inputs = inputs_of(self.text)
        learnt = Learnt.read(self.folder)
        if learnt is not None:
            found = [self.find_store(each.source.name, learnt.tokenizer) for each in self.text]
            is_known = learnt.inputs == inputs and not self.changed
            if is_known or not any(isinstance(each, str) for each in found):
                if not is_known:
                    Learnt(tokenizer=learnt.tokenizer, inputs=inputs).write(self.folder)
                return learnt.tokenizer
        tokenizer = learn_tokenizer(self.preparation)
        Learnt(tokenizer=tokenizer, inputs=inputs).write(self.folder)
        return tokenizer

    def find_store(
        self, name: str, tokenizer: TextTokenizer | None, compare: bool = True
    ) -> TokenStore | str:
        """Return the complete store of a source's current text, or why there is none.

        Args:
            name: The source's name.
            tokenizer: The tokenizer of its tokens.
            compare: Whether documents may be read to detect changes.
        """
        each = self.inputs[name]
        reasons: list[str] = []
        for folder in versions(self.folder / name):
            try:
                store = TokenStore(folder)
                reason = self._why_other(each, store, tokenizer, compare)
                if reason is None:
                    self._verify(folder)
                    return store
                reasons.append(reason)
            except UserError as error:
                reasons.append(f"what was prepared cannot be read ({error})")
        return reasons[0] if reasons else "not prepared yet"

    def _verify(self, folder: Path) -> None:
        if folder not in self.verified:
            TokenStore.verify(folder)
            self.verified.add(folder)
            note_use(folder)

    def _why_other(
        self, each: SourceInput, store: TokenStore, tokenizer: TextTokenizer | None, compare: bool
    ) -> str | None:
        """Return why a store does not match the current text, or None."""
        recorded = read_inputs(store)
        agrees = each.agrees(recorded)
        is_other = store.manifest["tokenizer"] != (None if each.is_token_file else mark_of(tokenizer))
        if agrees and not self.verify:
            if not is_other and recorded != each.entries:
                write_inputs(store.folder, each.entries)  # of an earlier version, which did not note all
            return "the tokenizer changed" if is_other else None
        if compare and each.may_agree(recorded) and each.documents == documents_of(store):
            write_inputs(store.folder, each.entries)
            return "the tokenizer changed" if is_other else None
        self.changed.add(each.source.name)
        return "its input changed, though sizes and times did not" if agrees else "its input changed"
