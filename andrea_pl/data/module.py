"""The data module: sources in, windows out."""

import os
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset
from typing_extensions import override

from andrea_callbacks.coherence import known_units
from andrea_pl.data.dataset import DynamicPaddingCollator, TokenizedDataset
from andrea_pl.data.documents import TextSource
from andrea_pl.data.loader import MicroBatchLoader, TextWindowLoader, WindowReader
from andrea_pl.data.prepare import Preparation, Prepared, keep_tokenizer, open_prepared, prepare
from andrea_pl.data.tokenizer import TextTokenizer
from andrea_pl.data.windows import EpochSampler
from andrea_pl.errors import UserError

Split = Literal["train", "val", "test"]

PAD_TOKEN_ID = 0

WORD_TOKENS = 5_000_000
"""About how many tokens of the training text are read to learn its words."""


class TextDataModule(pl.LightningDataModule):
    """Text sources, prepared once and served as windows.

    An update is the set of its sequences, drawn without replacement within an epoch. How the set is cut into
    micro-batches is only how it fits: sequences are sorted by length and cut by a budget of padded tokens.

    Args:
        sources: The text.
        vocab_size: Size of the vocabulary: merges + 256 bytes + 1 end-of-document token. The model is linked
            to it.
        block_size: Longest sequence in tokens; longer documents are cut into consecutive blocks.
        sequences_per_update: Sequences in one update.
        micro_batch_tokens: Most padded tokens in a micro-batch, which bounds memory.
        micro_batch_sequences: Most sequences in a micro-batch; no limit when left out.
        val_fraction: Share of documents held out for validation, decided by a hash of each document's
            content.
        test_fraction: Share of documents held out for the test, decided likewise.
        shuffle: Whether each epoch has an order of its own.
        seed: Decides the orders.
        num_workers: Processes that read and collate ahead; 0 does it between updates.
        tokenizer: A `tokenizer.json` to use; one is learnt from the training documents when left out.
        on_error: `raise` stops at input that cannot be read; `skip` leaves it out, counts it and says so.
        cache_dir: Folder for tokenizers and token stores; `$XDG_CACHE_HOME/andrea_pl` or `~/.cache/andrea_pl`
            when left out. Settings that differ get folders of their own.

    Raises:
        UserError: If a value cannot work; the message names it.
    """

    def __init__(
        self,
        sources: list[TextSource],
        vocab_size: int = 2305,
        block_size: int = 256,
        sequences_per_update: int = 32,
        micro_batch_tokens: int = 1024,
        micro_batch_sequences: int | None = None,
        val_fraction: float = 0.05,
        test_fraction: float = 0.0,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        tokenizer: str | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        counts = {
            "vocab_size": vocab_size,
            "block_size": block_size,
            "sequences_per_update": sequences_per_update,
            "micro_batch_tokens": micro_batch_tokens,
            "micro_batch_sequences": micro_batch_sequences,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise UserError(f"data.{name} must be at least 1, got {value}")
        if num_workers < 0:
            raise UserError(f"data.num_workers must be at least 0, got {num_workers}")
        if val_fraction < 0 or test_fraction < 0 or val_fraction + test_fraction >= 1:
            raise UserError(
                "data.val_fraction and data.test_fraction must be at least 0 and leave something to train "
                f"on, got {val_fraction} and {test_fraction}"
            )
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.sequences_per_update = sequences_per_update
        self.micro_batch_tokens = micro_batch_tokens
        self.micro_batch_sequences = micro_batch_sequences
        self.shuffle = shuffle
        self.seed = seed
        self.num_workers = num_workers
        self.preparation = Preparation(
            sources=sources,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            on_error=on_error,
            cache_dir=_cache_dir(cache_dir),
        )
        self._prepared: Prepared | None = None
        self._parts: dict[Split, list[TokenizedDataset]] = {}

    @property
    def source_names(self) -> list[str]:
        """Names of the sources; the position is the `source_id`."""
        return [source.name for source in self.preparation.sources]

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """The tokenizer that wrote the tokens, None where it is not known. Needs `setup`."""
        return self._opened().tokenizer

    def describe(self, document_id: int) -> str:
        """Return the source and the place, `name file:line`, that a document came from. Needs `setup`."""
        for source, first, count in self._numbering():
            if first <= document_id < first + count:
                stores = self._opened().stores
                place = (
                    stores[source].describe(document_id - first)
                    if source in stores
                    else f"#{document_id - first}"
                )
                return f"{source} {place}"
        raise UserError(f"there is no document {document_id}")

    def known_words(self) -> set[str]:
        """Return the words of the training text, as `andrea_callbacks.coherence` counts them. Needs `setup`.

        Of a large text every n-th document is read, so that some millions of tokens are. Empty where no
        tokenizer is known.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            return set()
        parts = [part.sequences for part in self._parts["train"]]
        tokens = sum(len(document) for part in parts for document in part)
        every = -(-tokens // WORD_TOKENS)
        return known_units(
            tokenizer.decode([int(token) for token in part[at]])
            for part in parts
            for at in range(0, len(part), max(every, 1))
        )

    def use_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Prepare the text with the tokenizer of a checkpoint, unless `data.tokenizer` names one."""
        if self.preparation.tokenizer is None and self.preparation.text:
            self.preparation = keep_tokenizer(self.preparation, tokenizer)

    @override
    def prepare_data(self) -> None:
        """Write what is missing; Lightning calls this on one process of each machine."""
        prepare(self.preparation)

    @override
    def setup(self, stage: str | None = None) -> None:
        """Open what was prepared, on every rank; switch validation off where nothing is to be held out."""
        if stage == "fit" and self.trainer is not None and not self._wants_validation():
            self.trainer.limit_val_batches = 0
        if self._prepared is None:
            self._prepared = open_prepared(self.preparation)
            self._refuse_large_vocabulary(self._prepared.tokenizer)
            self._parts = {split: self._build_parts(split) for split in ("train", "val", "test")}

    @override
    def train_dataloader(self) -> TextWindowLoader:
        """Return the loader of windows.

        Raises:
            UserError: If nothing is left to train on.
        """
        trainer = self.trainer
        overfits = float(getattr(trainer, "overfit_batches", 0)) > 0
        reader = self._reader("train", shuffle=self.shuffle, repeat=overfits)
        if not len(reader.lengths):
            raise UserError(
                f"no training sequence in {', '.join(self.source_names)}: every document has fewer than two "
                "tokens or is held out; give more text or lower data.val_fraction"
            )
        lost = sum(part.labelless_documents for part in self._parts["train"])
        if lost:
            rank_zero_info(f"{lost} documents of a single token have no label and teach nothing")
        loader = TextWindowLoader(
            reader, self.num_workers, self._pin_memory(), epoch=trainer.current_epoch if trainer else 0
        )
        if trainer is not None:
            limit = trainer.limit_train_batches
            loader.limit = int(limit * len(loader)) if isinstance(limit, float) else limit
        return loader

    @override
    def val_dataloader(self) -> MicroBatchLoader | list[Any]:
        """Return the loader of held-out micro-batches; an empty list where nothing is to be held out."""
        is_evaluation = self.trainer is not None and self.trainer.state.fn == "validate"
        return self._held_out("val") if is_evaluation or self._wants_validation() else []

    @override
    def test_dataloader(self) -> MicroBatchLoader:
        """Return the loader of the test documents' micro-batches."""
        return self._held_out("test")

    @override
    def predict_dataloader(self) -> MicroBatchLoader:
        """Return the loader of the validation documents' micro-batches, for a loss per sequence."""
        return self._held_out("val")

    def _wants_validation(self) -> bool:
        sources = self.preparation.sources
        return self.preparation.val_fraction > 0 or any(each.split == "val" for each in sources)

    def _held_out(self, split: Split) -> MicroBatchLoader:
        reader = self._reader(split)
        if not len(reader.lengths):
            fraction = {"val": self.preparation.val_fraction, "test": self.preparation.test_fraction}.get(
                split
            )
            remedy = f"raise data.{split}_fraction" if fraction else f"set data.{split}_fraction"
            without = "; data.val_fraction 0 trains without" if split == "val" and fraction else ""
            raise UserError(
                f"no document is held out for {split}: data.{split}_fraction is {fraction} of "
                f"{self._count_documents()} documents; {remedy}, cut files into documents with a source's "
                f"document_separator, or give a source with split: {split}{without}"
            )
        return MicroBatchLoader(reader, self.num_workers, self._pin_memory())

    def _count_documents(self) -> int:
        return sum(count for _, _, count in self._numbering())

    def _reader(self, split: Split, shuffle: bool = False, repeat: bool = False) -> WindowReader:
        self._opened()
        parts = self._parts[split]
        dataset = cast("ConcatDataset[dict[str, Any]]", ConcatDataset(parts) if len(parts) != 1 else parts[0])
        lengths: NDArray[np.int64] = np.concatenate([part.lengths for part in parts])
        return WindowReader(
            dataset,
            lengths,
            EpochSampler(len(lengths), self.sequences_per_update, self.seed, shuffle, repeat),
            DynamicPaddingCollator(PAD_TOKEN_ID),
            self.micro_batch_tokens,
            self.micro_batch_sequences,
            rank=self.trainer.global_rank if self.trainer else 0,
            world_size=self.trainer.world_size if self.trainer else 1,
        )

    def _build_parts(self, split: Split) -> list[TokenizedDataset]:
        parts: list[TokenizedDataset] = []
        stores = self._opened().stores
        for number, (source, (_, first, _)) in enumerate(
            zip(self.preparation.sources, self._numbering(), strict=True)
        ):
            if source.kind == "tokens":
                self._refuse_foreign_ids(source)
                deal = self.preparation.split_of_tokens
                chosen = [at for at, each in enumerate(source.documents) if deal(source, each) == split]
                share = [source.documents[at] for at in chosen]
                part = TokenizedDataset(share, self.block_size, number, [first + at for at in chosen])
            else:
                documents = stores[source.name].split(split)
                part = TokenizedDataset(documents, self.block_size, number, first + documents.documents)
            parts.append(part)
        return parts

    def _numbering(self) -> list[tuple[str, int, int]]:
        """Return name, first document id and number of documents of each source."""
        stores = self._opened().stores
        numbering: list[tuple[str, int, int]] = []
        first = 0
        for source in self.preparation.sources:
            count = len(source.documents) if source.kind == "tokens" else len(stores[source.name].records)
            numbering.append((source.name, first, count))
            first += count
        return numbering

    def _opened(self) -> Prepared:
        if self._prepared is None:
            raise RuntimeError("TextDataModule: call prepare_data() and setup() first")
        return self._prepared

    def _refuse_large_vocabulary(self, tokenizer: TextTokenizer | None) -> None:
        if tokenizer is not None and tokenizer.vocab_size > self.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} ids and data.vocab_size is {self.vocab_size}; set "
                f"data.vocab_size to {tokenizer.vocab_size}"
            )

    def _refuse_foreign_ids(self, source: TextSource) -> None:
        for number, document in enumerate(source.documents):
            for token in document:
                if not 0 <= token < self.vocab_size:
                    raise UserError(
                        f"source {source.name!r}, document {number}: token id {token} is outside 0 … "
                        f"{self.vocab_size - 1}; set data.vocab_size to at least {token + 1}"
                    )

    def _pin_memory(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"


def _cache_dir(given: str | None) -> Path:
    if given is not None:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "andrea_pl"
