"""The data module: sources in, windows out."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset
from typing_extensions import override

from andrea_callbacks.coherence import known_units
from andrea_callbacks.updates import settle
from andrea_pl.data.continuing import (
    applies,
    checksum_of,
    continue_text,
    find_combination,
    record_of,
    refuse_other_text,
    say_what_is_evaluated,
)
from andrea_pl.data.curriculum import Curriculum, CurriculumSampler, Pool
from andrea_pl.data.dataset import DynamicPaddingCollator, TokenizedDataset
from andrea_pl.data.documents import TextSource
from andrea_pl.data.listing import listed_once
from andrea_pl.data.loader import MicroBatchLoader, TextWindowLoader, WindowReader
from andrea_pl.data.mixtures import Fixed
from andrea_pl.data.prepare import (
    TOKENIZER_SAMPLE_BYTES,
    Preparation,
    Prepared,
    keep_tokenizer,
    open_prepared,
    prepare,
)
from andrea_pl.data.repetition import repetition
from andrea_pl.data.tokenizer import TextTokenizer
from andrea_pl.data.versions import note_run
from andrea_pl.data.windows import EpochSampler, WindowSampler
from andrea_pl.errors import UserError

Split = Literal["train", "val", "test"]

PAD_TOKEN_ID = 0

WORD_TOKENS = 5_000_000
"""About how many tokens of the training text are read to learn its words."""


class TextDataModule(pl.LightningDataModule):
    """Text sources, prepared once and served as windows.

    An update is the set of its sequences. How the set is cut into micro-batches is only how it fits:
    sequences are sorted by length and cut by a budget of padded tokens. Without a curriculum every sequence
    of every source is drawn once an epoch, in random order. With one, sources are drawn by weight, each
    without replacement within its own epochs.

    A checkpoint names the prepared text that its run began with. A resume goes on with that, whatever became
    of the sources' files; a fresh fit, and an evaluation, use the text as it is now.

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
        curriculum: How sources are mixed. Left out, and no source has a weight, floor or max_epochs: not at
            all. Left out, and one has: by `Fixed` weights.
        shuffle: Whether each epoch has an order of its own; with a curriculum it always has.
        seed: Decides the orders, and what a curriculum draws.
        num_workers: Processes that read and collate ahead; 0 does it between updates.
        prefetch_factor: Windows that each of them reads ahead.
        tokenizer: A `tokenizer.json` to use; one is learnt from the training documents when left out.
        on_error: `raise` stops at input that cannot be read; `skip` leaves it out, counts it and says so.
        cache_dir: Folder for tokenizers and token stores; `$XDG_CACHE_HOME/andrea_pl` or `~/.cache/andrea_pl`
            when left out. Settings that differ get folders of their own.
        tokenizer_sample_bytes: Bytes of training text that a tokenizer is learnt from, at most. Of more text,
            pieces are chosen by a hash of their content.

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
        curriculum: Curriculum | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        tokenizer: str | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        cache_dir: str | None = None,
        tokenizer_sample_bytes: int = TOKENIZER_SAMPLE_BYTES,
    ) -> None:
        super().__init__()
        counts = {
            "vocab_size": vocab_size,
            "block_size": block_size,
            "sequences_per_update": sequences_per_update,
            "micro_batch_tokens": micro_batch_tokens,
            "micro_batch_sequences": micro_batch_sequences,
            "prefetch_factor": prefetch_factor,
            "tokenizer_sample_bytes": tokenizer_sample_bytes,
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
        for source in sources:
            if (source.val_fraction or 0) + test_fraction >= 1:
                raise UserError(
                    f"source {source.name!r}: val_fraction {source.val_fraction} and data.test_fraction "
                    f"{test_fraction} leave nothing to train on"
                )
        if curriculum is None and any(source.is_weighed for source in sources):
            curriculum = Curriculum()
        if curriculum is not None and not shuffle:
            raise UserError(
                "data.shuffle=false and a mixture of sources exclude each other; drop one of them"
            )
        if curriculum is not None:
            _check_curriculum(curriculum, sources, num_workers, prefetch_factor)
        self.curriculum = curriculum
        self.prefetch_factor = prefetch_factor
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
            tokenizer_sample_bytes=tokenizer_sample_bytes,
        )
        self._prepared: Prepared | None = None
        self._ready: Prepared | None = None
        """What this process has prepared, before `setup`."""
        self._kept: tuple[dict[str, Any], str] | None = None
        """What a checkpoint notes of its run's text, and the checkpoint."""
        self._kept_checksum: tuple[str, str | None, str] | None = None
        """For a checkpoint that notes no more: a checksum of that text, its tokenizer, and the checkpoint."""
        self._noted: set[str] = set()
        self._parts: dict[Split, list[TokenizedDataset]] = {}
        self._sampler: CurriculumSampler | None = None

    @property
    def source_names(self) -> list[str]:
        """Names of the sources; the position is the `source_id`."""
        return [source.name for source in self.preparation.sources]

    @property
    def hyperparameters(self) -> dict[str, int | float | str | bool]:
        """What an update is made of, for TensorBoard."""
        options: dict[str, int | float | str | bool] = {
            "sequences_per_update": self.sequences_per_update,
            "block_size": self.block_size,
            "sources": ", ".join(self.source_names),
        }
        if self.curriculum is not None:
            mixture = self.curriculum.mixture
            options["mixture"] = Fixed.__name__ if mixture is None else type(mixture).__name__
            names = ("share_of", "warmup_updates", "reward_lag", "hard_clip", "repetition_penalty")
            options |= {f"curriculum.{name}": getattr(self.curriculum, name) for name in names}
        return options

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

    def locate(self, document_id: int, offset: int) -> str:
        """Return the source and the place, as `describe` does, of a token within a document. Needs `setup`.

        In text files that is the token's own line; a record of a table has one line for all of it.
        """
        tokenizer = self._opened().tokenizer
        for number, (name, first, count) in enumerate(self._numbering()):
            source = self.preparation.sources[number]
            if not first <= document_id < first + count or name not in self._opened().stores:
                continue
            store = self._opened().stores[name]
            record = store.records[document_id - first]
            is_text = source.kind == "files" and source.format_of(Path(store.origin(record))) == "text"
            if offset and is_text and tokenizer is not None:
                before = store.tokens[record["start"] : record["start"] + offset]
                lines = sum(text.count("\n") for text in tokenizer.decode_in_parts(before))
                return f"{name} {store.describe(document_id - first, lines)}"
        return self.describe(document_id)

    def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
        """Tell the mixture what became of an update: the losses of its sources, and whether to trust them."""
        sampler = self._sampler
        if sampler is None or not sampler.learns:
            return
        losses = report.get("source_losses")
        if losses is None and report["outcome"] == "applied":
            raise UserError(
                f"the mixture {type(sampler.mixture).__name__} learns from the loss of each source, and "
                f"{type(trainer.lightning_module).__name__} reports none: have its loss_sum call "
                "note_losses, or take Fixed or Proportional"
            )
        known = {source: loss for source, loss in enumerate(losses or ()) if loss is not None}
        is_calm = float(report.get("clip_coefficient", 1.0)) >= sampler.curriculum.hard_clip
        sampler.observe(report["update"], known, teaches=report["outcome"] == "applied" and is_calm)

    def source_figures(self, update: int) -> Mapping[str, Any]:
        """Return what a mixture had to do with an update: see `andrea_callbacks.protocols.MixesSources`."""
        sampler = self._sampler
        delivery = None if sampler is None else sampler.delivery(update)
        if sampler is None or delivery is None:
            return {}
        names = self.source_names
        return {
            "phase": delivery.phase,
            "phase_length": delivery.phase_length,
            "weight": dict(zip(names, delivery.weights, strict=True)),
            "epochs": dict(zip(names, delivery.epochs, strict=True)),
            "reward": {names[source]: reward for source, reward in sampler.rewards.items()},
        }

    def known_words(self) -> set[str]:
        """Return the words of the training text, as `andrea_callbacks.coherence` counts them. Needs `setup`.

        Of a large text every n-th document is read, and of a long document every n-th part, so that some
        millions of tokens are. Empty where no tokenizer is known.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            return set()
        parts = [part.sequences for part in self._parts["train"]]
        every = -(-sum(len(document) for part in parts for document in part) // WORD_TOKENS)
        documents = (np.asarray(part[at]) for part in parts for at in range(0, len(part), max(every, 1)))
        return known_units(
            text
            for document in documents
            for text in tokenizer.decode_in_parts(
                document, -(-len(document) // WORD_TOKENS), whole_words=True
            )
        )

    def use_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Prepare the text with the tokenizer of a checkpoint, unless `data.tokenizer` names one."""
        if self.preparation.tokenizer is None and self.preparation.text:
            self.preparation = keep_tokenizer(self.preparation, tokenizer)

    def keep_text_of(self, checkpoint: Mapping[str, Any], path: str | Path = "the checkpoint") -> None:
        """Go on with the text that a checkpoint's run began with; for a resume.

        `andrea fit --resume` and `LanguageModule` call it. Called before `prepare_data`, it spares preparing
        the text as it is now.

        Args:
            checkpoint: A checkpoint that a fit with this datamodule saved. One of an earlier version names no
                store: it is compared by a checksum.
            path: Where it is, for messages.

        Raises:
            UserError: If `setup` was called and that text is gone.
        """
        record = cast("dict[str, Any] | None", checkpoint.get(type(self).__qualname__))
        if record is not None and applies(record, self.preparation):
            if self._kept is None or self._kept[0] != record:
                self._kept = record, str(path)
                self._kept_checksum = None
                if self._prepared is not None and not self._is_text_of(record):
                    first = self.trainer is None or self.trainer.is_global_zero
                    self._open(continue_text(record, self.preparation, str(path), says=first))
            return
        text = _saved_checksum(checkpoint)
        self._kept = None
        block = cast("dict[str, Any]", checkpoint.get("andrea_pl") or {})
        tokenizer = cast("str | None", block.get("tokenizer"))
        self._kept_checksum = None if text is None else (text, tokenizer, str(path))
        if self._prepared is not None:
            self._compare_checksum()

    @property
    def keeps_text(self) -> bool:
        """Whether the stores are those that a checkpoint names."""
        return self._kept is not None

    def _is_text_of(self, record: dict[str, Any]) -> bool:
        return record_of(self.preparation, self._opened())["stores"].keys() == record[
            "stores"
        ].keys() and all(
            self._opened().stores[name].content == entry["content"]
            for name, entry in record["stores"].items()
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint notes of the text, and note in the cache where checkpoints are."""
        if self._prepared is None or self.trainer is None:
            return {}
        if self.trainer.is_global_zero:
            for run in set(_checkpoint_folders(self.trainer)) - self._noted:
                self._noted.add(run)
                for store in self._prepared.stores.values():
                    note_run(store.folder, run)
        return record_of(self.preparation, self._prepared)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the run's text in a fit; say in an evaluation how the text differs from it."""
        if self.trainer is None or self._prepared is None or not applies(state_dict, self.preparation):
            return
        if self.trainer.state.fn == "fit":
            self.keep_text_of(
                {type(self).__qualname__: state_dict}, self.trainer.ckpt_path or "the checkpoint"
            )
        else:
            say_what_is_evaluated(state_dict, self.preparation, self._prepared)

    @override
    def prepare_data(self, verify: bool = False) -> None:
        """Write what is missing; Lightning calls this on one process of each machine.

        Args:
            verify: Compare every document with what was prepared, also where no size or time has changed.
        """
        with listed_once():
            if self._kept is not None:
                record, path = self._kept
                self._ready = continue_text(record, self.preparation, path)
            elif self._kept_checksum is not None:
                text, tokenizer, _ = self._kept_checksum
                self._ready = find_combination(self.preparation, text, tokenizer) or prepare(self.preparation)
            else:
                self._ready = prepare(self.preparation, verify=verify)

    @override
    def setup(self, stage: str | None = None) -> None:
        """Open what was prepared, on every rank; switch validation off where nothing is to be held out."""
        if stage == "fit" and self.trainer is not None and not self._wants_validation():
            self.trainer.limit_val_batches = 0
        if self._prepared is None:
            with listed_once():
                kept = self._kept
                self._open(self._agree(self._ready) if kept is None else self._continued(*kept))
        self._ready = None
        self._compare_checksum()

    def _open(self, prepared: Prepared) -> None:
        self._refuse_large_vocabulary(prepared.tokenizer)
        self._prepared = prepared
        self._noted = set()
        self._parts = {split: self._build_parts(split) for split in ("train", "val", "test")}

    def _continued(self, record: dict[str, Any], path: str) -> Prepared:
        return self._ready or continue_text(record, self.preparation, path, says=False)

    def _agree(self, ready: Prepared | None) -> Prepared:
        """Return the stores that rank zero has, though another process may prepare other text meanwhile."""
        if self.trainer is None or self.trainer.world_size == 1:
            return ready or open_prepared(self.preparation)
        is_first = self.trainer.is_global_zero
        own = (ready or open_prepared(self.preparation)) if is_first else None
        record = self.trainer.strategy.broadcast(record_of(self.preparation, own) if own else None)
        return own or continue_text(cast("dict[str, Any]", record), self.preparation, "this run", says=False)

    def _compare_checksum(self) -> None:
        """Compare the text with that of a checkpoint which names no store; find that, or refuse to resume."""
        if self._kept_checksum is None:
            return
        text, tokenizer, path = self._kept_checksum
        if text == self._checksum():
            return
        found = find_combination(self.preparation, text, tokenizer)
        if found is None:
            raise refuse_other_text(path, self.preparation.cache_dir)
        self._open(found)

    @override
    def train_dataloader(self) -> TextWindowLoader:
        """Return the loader of windows.

        Raises:
            UserError: If nothing is left to train on.
        """
        trainer = self.trainer
        reader = self._reader("train")
        if not len(reader.lengths):
            raise UserError(
                f"no training sequence in {', '.join(self.source_names)}: every document has fewer than two "
                "tokens or is held out; give more text or lower data.val_fraction"
            )
        lost = sum(part.labelless_documents for part in self._parts["train"])
        if lost:
            rank_zero_info(f"{lost} documents of a single token have no label and teach nothing")
        loader = TextWindowLoader(
            reader,
            self._build_sampler(len(reader.lengths)),
            self.num_workers,
            self._pin_memory(),
            epoch=trainer.current_epoch if trainer else 0,
            prefetch_factor=self.prefetch_factor,
            text=self._checksum(),
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
        preparation = self.preparation
        return any(
            each.split == "val" or (each.split == "hash" and preparation.val_fraction_of(each) > 0)
            for each in preparation.sources
        )

    def _build_sampler(self, count: int) -> WindowSampler:
        """Return what decides the windows, going on with a curriculum where the trainer goes on."""
        trainer = self.trainer
        repeat = float(getattr(trainer, "overfit_batches", 0)) > 0
        if self.curriculum is None:
            return EpochSampler(count, self.sequences_per_update, self.seed, self.shuffle, repeat)
        before = self._sampler
        self._sampler = sampler = CurriculumSampler(
            self._pools(),
            self.curriculum,
            self.sequences_per_update,
            self.seed,
            repeat,
            next_update=None if trainer is None else lambda: trainer.global_step + 1,
            settle=None if trainer is None else lambda: settle(trainer.lightning_module),
        )
        _compare_with_run(sampler, trainer)
        if before is not None and trainer is not None and trainer.global_step:
            sampler.load_state_dict(before.state_dict())
        texts = ", ".join(
            f"{pool.name} ({pool.count:,} sequences, repetition {pool.repetition:.2f})"
            for pool in sampler.pools
        )
        rank_zero_info(
            f"{type(sampler.mixture).__name__} mixes by shares of {self.curriculum.share_of}, "
            f"{sampler.windows_per_epoch:,} updates an epoch: {texts}"
        )
        return sampler

    def _pools(self) -> list[Pool]:
        """Return the training sequences of each source, as they are numbered in the loader's data set."""
        pools: list[Pool] = []
        first = 0
        for source, part in zip(self.preparation.sources, self._parts["train"], strict=True):
            store = self._opened().stores.get(source.name)
            texts = [np.asarray(each) for each in source.documents]
            pools.append(
                Pool(
                    name=source.name,
                    first=first,
                    count=len(part),
                    tokens=int(part.lengths.sum()),
                    weight=1.0 if source.weight is None else source.weight,
                    floor=source.floor,
                    max_epochs=math.inf if source.max_epochs is None else source.max_epochs,
                    repetition=repetition(np.concatenate(texts)) if store is None else store.repetition,
                )
            )
            first += len(part)
        return pools

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

    def _reader(self, split: Split) -> WindowReader:
        self._opened()
        parts = self._parts[split]
        dataset = cast("ConcatDataset[dict[str, Any]]", ConcatDataset(parts) if len(parts) != 1 else parts[0])
        lengths: NDArray[np.int64] = np.concatenate([part.lengths for part in parts])
        return WindowReader(
            dataset,
            lengths,
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

    def _checksum(self) -> str:
        """Return a checksum of all text, by those of its stores."""
        return checksum_of(self.preparation, self._opened().stores)

    def _pin_memory(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"


def _check_curriculum(
    curriculum: Curriculum, sources: list[TextSource], num_workers: int, prefetch_factor: int
) -> None:
    """Refuse what cannot work together, before any text is prepared."""
    names = [source.name for source in sources]
    for name in curriculum.warmup_sources:
        if name not in names:
            known = ", ".join(names)
            raise UserError(
                f"data.curriculum.warmup_sources names {name!r}, and the sources are {known}; name these"
            )
    mixture = Fixed() if curriculum.mixture is None else curriculum.mixture
    for source in sources:
        if source.weight is not None and not mixture.uses_weights:
            raise UserError(
                f"source {source.name!r} has a weight, which {type(mixture).__name__} does not use: give it "
                "a floor instead, or leave data.curriculum.mixture out for fixed weights"
            )
    ahead = num_workers * prefetch_factor + 1 if num_workers else 0
    if mixture.learns and ahead > curriculum.reward_lag:
        raise UserError(
            f"{num_workers} workers, each {prefetch_factor} windows ahead, ask for windows {ahead} updates "
            f"before they are trained on, and data.curriculum.reward_lag is {curriculum.reward_lag}: raise "
            f"it to {ahead}, or lower data.num_workers or data.prefetch_factor"
        )


def _compare_with_run(sampler: CurriculumSampler, trainer: pl.Trainer | None) -> None:
    """Refuse a run that is longer than all sources' `max_epochs` allow; name one that is all warm-up."""
    if trainer is None or sampler.repeat:
        return
    limits = [trainer.max_steps] if trainer.max_steps > 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        limit = trainer.limit_train_batches
        windows = sampler.windows_per_epoch
        limits.append(
            trainer.max_epochs * (int(limit * windows) if isinstance(limit, float) else min(limit, windows))
        )
    warmup = sampler.curriculum.warmup_updates
    if limits and warmup >= min(limits):
        rank_zero_warn(
            f"data.curriculum.warmup_updates={warmup} is as long as the run of {min(limits):,} updates: "
            f"sources other than {', '.join(sampler.curriculum.warmup_sources)} are never drawn"
        )
    supply = sum(pool.supply for pool in sampler.pools)
    updates = supply // sampler.sequences_per_update
    if limits and min(limits) > updates:
        raise UserError(
            f"the sources' max_epochs allow {updates:,.0f} updates, and the run has {min(limits):,}; raise "
            "max_epochs, leave it out for one source, or shorten the run"
        )


def _saved_checksum(checkpoint: Mapping[str, Any]) -> str | None:
    """Return the checksum of the text that a checkpoint's loader has read, None where it has none."""
    found: Any = checkpoint
    try:
        found = found["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]["order"]["text"]
    except (KeyError, IndexError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _checkpoint_folders(trainer: pl.Trainer) -> list[str]:
    """Return where a trainer's checkpoints are, as far as that can be told."""
    given = [getattr(each, "dirpath", None) for each in trainer.checkpoint_callbacks]
    logs = [getattr(each, "log_dir", None) for each in trainer.loggers]
    folders = [str(each) for each in given if each] or [str(each) for each in logs if each]
    folders = folders or [str(trainer.default_root_dir)]
    return [each if "://" in each else str(Path(each).absolute()) for each in folders]


def _cache_dir(given: str | None) -> Path:
    if given is not None:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base).expanduser() if base else Path.home() / ".cache") / "andrea_pl"
    except RuntimeError as error:
        raise UserError(
            "no home folder is known here to keep prepared text in; set data.cache_dir, or the environment "
            "variable HOME or XDG_CACHE_HOME"
        ) from error
