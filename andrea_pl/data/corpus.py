"""The prepared text of all sources: document ids, where documents came from, and their sequences.

document_id   0 … of the first source, then those of the second, …; a source's documents keep their order
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import ConcatDataset, Dataset

from andrea_callbacks import known_units
from andrea_pl.data.mixing.plan import Pool
from andrea_pl.data.sources.documents import TextSource
from andrea_pl.data.store.kept_text import checksum_of
from andrea_pl.data.store.repetition import repetition
from andrea_pl.data.store.settings import Preparation, Prepared
from andrea_pl.data.windows.dataset import Item, TokenizedDataset
from andrea_pl.errors import UserError

Split = Literal["train", "val", "test"]

WORD_TOKENS = 5_000_000
"""Approximate number of training tokens that are read to collect known words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbered:
    """A source and the ids of its documents."""

    source: TextSource
    number: int
    first: int
    count: int


class Corpus:
    """The text that a run trains and evaluates on.

    Args:
        preparation: The sources and their splits.
        prepared: The stores and the tokenizer.
        vocab_size: Number of ids.
        block_size: Maximum number of tokens in a sequence.

    Raises:
        UserError: If a token id is not in the vocabulary.
    """

    def __init__(
        self, preparation: Preparation, prepared: Prepared, vocab_size: int, block_size: int
    ) -> None:
        self.preparation = preparation
        self.prepared = prepared
        self.tokenizer = prepared.tokenizer
        self.stores = prepared.stores
        self._refuse_foreign_ids(vocab_size)
        self._sources = self._number()
        self.parts = {split: self._cut(split, block_size) for split in ("train", "val", "test")}
        """The sequences of each source, by split."""

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(each.count for each in self._sources)

    @property
    def checksum(self) -> str:
        """A checksum of all text, from the stores' checksums."""
        return checksum_of(self.preparation, self.stores)

    def dataset(self, split: Split) -> tuple[Dataset[Item], Any]:
        """Return the sequences of a split, ordered by source, and (N,) numbers of tokens."""
        parts = self.parts[split]
        joined = parts[0] if len(parts) == 1 else cast("Dataset[Item]", ConcatDataset(parts))
        return joined, np.concatenate([part.lengths for part in parts])

    def describe(self, document_id: int) -> str:
        """Return the source and the place, `name file:line`, that a document came from."""
        found = self._find(document_id)
        if found.source.name not in self.stores:
            return f"{found.source.name} #{document_id - found.first}"
        place = self.stores[found.source.name].describe(document_id - found.first)
        return f"{found.source.name} {place}"

    def locate(self, document_id: int, offset: int) -> str:
        """Return the source and the place, as `describe` does, of a token within a document.

        In text files this is the token's own line. A record of a table has one line.
        """
        found = self._find(document_id)
        source, store = found.source, self.stores.get(found.source.name)
        if store is None or not offset or self.tokenizer is None or source.kind != "files":
            return self.describe(document_id)
        record = store.records[document_id - found.first]
        if source.format_of(Path(store.origin(record))) != "text":
            return self.describe(document_id)
        before = store.tokens[record["start"] : record["start"] + offset]
        lines = sum(text.count("\n") for text in self.tokenizer.decode_in_parts(before))
        return f"{source.name} {store.describe(document_id - found.first, lines)}"

    def known_words(self) -> set[str]:
        """Return the words of the training text; empty without a tokenizer.

        In a large text only every n-th document is read, and in a long document every n-th part, so that a
        few million tokens are read.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            return set()
        parts = [part.sequences for part in self.parts["train"]]
        every = -(-sum(len(document) for part in parts for document in part) // WORD_TOKENS)
        documents = (np.asarray(part[at]) for part in parts for at in range(0, len(part), max(every, 1)))
        return known_units(
            text
            for document in documents
            for text in tokenizer.decode_in_parts(
                document, -(-len(document) // WORD_TOKENS), whole_words=True
            )
        )

    def pools(self) -> list[Pool]:
        """Return the training sequences of each source, with their numbers in `dataset`."""
        pools: list[Pool] = []
        first = 0
        for source, part in zip(self.preparation.sources, self.parts["train"], strict=True):
            store = self.stores.get(source.name)
            texts = [np.asarray(each) for each in source.documents]
            pools.append(
                Pool(
                    name=source.name,
                    first=first,
                    count=len(part),
                    tokens=int(part.lengths.sum()),
                    weight=1.0 if source.weight is None else source.weight,
                    min_weight=source.min_weight,
                    max_epochs=math.inf if source.max_epochs is None else source.max_epochs,
                    repetition=repetition(np.concatenate(texts)) if store is None else store.repetition,
                )
            )
            first += len(part)
        return pools

    def _number(self) -> list[_Numbered]:
        numbered: list[_Numbered] = []
        first = 0
        for number, source in enumerate(self.preparation.sources):
            is_tokens = source.kind == "tokens"
            count = len(source.documents) if is_tokens else len(self.stores[source.name].records)
            numbered.append(_Numbered(source=source, number=number, first=first, count=count))
            first += count
        return numbered

    def _find(self, document_id: int) -> _Numbered:
        for each in self._sources:
            if each.first <= document_id < each.first + each.count:
                return each
        raise UserError(f"there is no document {document_id}")

    def _cut(self, split: str, block_size: int) -> list[TokenizedDataset]:
        """Return the sequences of each source's documents of a split."""
        parts: list[TokenizedDataset] = []
        for each in self._sources:
            source = each.source
            if source.kind == "tokens":
                deal = self.preparation.split_of_tokens
                chosen = [at for at, ids in enumerate(source.documents) if deal(source, ids) == split]
                share = [source.documents[at] for at in chosen]
                ids = [each.first + at for at in chosen]
                parts.append(TokenizedDataset(share, block_size, each.number, ids))
            else:
                share = self.stores[source.name].split(split)
                parts.append(TokenizedDataset(share, block_size, each.number, each.first + share.documents))
        return parts

    def _refuse_foreign_ids(self, vocab_size: int) -> None:
        if self.tokenizer is not None and self.tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"the tokenizer has {self.tokenizer.vocab_size} ids and `vocab_size` is {vocab_size}; set "
                f"`vocab_size` to {self.tokenizer.vocab_size}"
            )
        for source in self.preparation.sources:
            for number, document in enumerate(source.documents if source.kind == "tokens" else ()):
                foreign = next((token for token in document if not 0 <= token < vocab_size), None)
                if foreign is not None:
                    raise UserError(
                        f"source {source.name!r}, document {number}: token id {foreign} is outside 0 … "
                        f"{vocab_size - 1}; set `vocab_size` to at least {foreign + 1}"
                    )


def refuse_empty_training(corpus: Corpus) -> None:
    """Refuse text without a training sequence; print how many documents have no label.

    Raises:
        UserError: If there is no sequence.
    """
    parts = corpus.parts["train"]
    if not any(len(part) for part in parts):
        names = ", ".join(source.name for source in corpus.preparation.sources)
        raise UserError(
            f"no training sequence in {names}: every document has fewer than two tokens or is held out; give "
            "more text or lower `val_fraction`"
        )
    lost = sum(part.labelless_documents for part in parts)
    if lost:
        rank_zero_info(f"{lost} documents of a single token have no label and teach nothing")


def empty_split(corpus: Corpus, split: Split) -> UserError:
    """Return the error for a split without documents."""
    preparation = corpus.preparation
    fraction = {"val": preparation.val_fraction, "test": preparation.test_fraction}.get(split)
    remedy = f"raise `{split}_fraction`" if fraction else f"set `{split}_fraction`"
    without = "; `val_fraction` 0 trains without" if split == "val" and fraction else ""
    return UserError(
        f"no document is held out for {split}: `{split}_fraction` is {fraction} of {corpus.documents} "
        f"documents; {remedy}, cut files into documents with a source's document_separator, or give a source "
        f"with split: {split}{without}"
    )
