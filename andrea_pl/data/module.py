"""The data module: sources in, windows out.

sources ──> store: tokenizer, tokens ──> corpus: numbered documents ──> windows: samplers, loaders
                                              └──> mixing: which source comes next <── losses
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from andrea_callbacks.hooks.reports import UpdateReport
from andrea_pl.data.checks import check_counts, check_fractions, choose_curriculum, compare_with_run
from andrea_pl.data.corpus import Corpus, Split, empty_split, refuse_empty_training
from andrea_pl.data.mixing.curriculum import Curriculum, CurriculumSampler
from andrea_pl.data.mixing.feedback import LossFeedback, mixing_figures, say_mixing, take_losses
from andrea_pl.data.sources.documents import TextSource
from andrea_pl.data.sources.listing import listed_once
from andrea_pl.data.store.cache_folder import cache_folder
from andrea_pl.data.store.kept_text import applies, record_of, say_what_is_evaluated
from andrea_pl.data.store.preparation import keep_tokenizer
from andrea_pl.data.store.run_text import RunText
from andrea_pl.data.store.settings import TOKENIZER_SAMPLE_BYTES, Preparation, Prepared
from andrea_pl.data.store.tokenizer import TextTokenizer
from andrea_pl.data.windows.dataset import DynamicPaddingCollator
from andrea_pl.data.windows.loaders import MicroBatchLoader, TextWindowLoader, WindowReader
from andrea_pl.data.windows.window import EpochSampler, WindowSampler

PAD_TOKEN_ID = 0


class TextDataModule(pl.LightningDataModule):
    """Text sources, prepared once and served as windows.

    An update is a set of sequences. The sequences are sorted by length and cut into micro-batches by a budget
    of padded tokens; the cut does not change the update. Without a curriculum every sequence of every source
    is drawn once per epoch, in random order. With one, sources are drawn by weight, each without replacement
    within its own epochs.

    A checkpoint names the prepared text that its run began with. A resume continues with that text, even if
    the sources' files have changed. A new fit, and an evaluation, use the current text.

    Args:
        sources: The text.
        vocab_size: Size of the vocabulary: merges + 256 bytes + 1 end-of-document token. The model uses it
            too.
        block_size: Longest sequence in tokens. Longer documents are cut into consecutive blocks.
        sequences_per_update: Number of sequences in one update.
        micro_batch_tokens: Maximum number of padded tokens in a micro-batch, which bounds memory.
        micro_batch_sequences: Maximum number of sequences in a micro-batch; None for no limit.
        val_fraction: Share of documents held out for validation, chosen by a hash of their content.
        test_fraction: Share of documents held out for the test, chosen likewise.
        curriculum: How to mix sources. By default sources are not mixed, unless one has a weight, min_weight
            or max_epochs; then they are mixed by `Fixed` weights.
        shuffle: Whether each epoch has its own order; with a curriculum it always has.
        seed: Seed of the orders and of a curriculum's draws.
        num_workers: Number of processes that read and collate ahead; 0 reads between updates.
        prefetch_factor: Number of windows that each process reads ahead.
        tokenizer: Path of a `tokenizer.json`; by default one is learnt from the training documents.
        on_error: What to do about unreadable input: `raise` stops, `skip` skips, counts and reports it.
        cache_dir: Folder for tokenizers and token stores; by default `$XDG_CACHE_HOME/andrea_pl` or
            `~/.cache/andrea_pl`. Different settings use different subfolders.
        tokenizer_sample_bytes: Maximum number of bytes of training text from which a tokenizer is learnt.
            From more text, pieces are chosen by a hash of their content.

    Raises:
        UserError: If a value is invalid; the message names it.
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
        check_counts(
            num_workers,
            vocab_size=vocab_size,
            block_size=block_size,
            sequences_per_update=sequences_per_update,
            micro_batch_tokens=micro_batch_tokens,
            micro_batch_sequences=micro_batch_sequences,
            prefetch_factor=prefetch_factor,
            tokenizer_sample_bytes=tokenizer_sample_bytes,
        )
        check_fractions(sources, val_fraction, test_fraction)
        self.curriculum = choose_curriculum(curriculum, sources, shuffle, num_workers, prefetch_factor)
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
            cache_dir=cache_folder(cache_dir),
            tokenizer_sample_bytes=tokenizer_sample_bytes,
        )
        self._text = RunText()
        self._corpus: Corpus | None = None
        self._sampler: CurriculumSampler | None = None

    @property
    def source_names(self) -> list[str]:
        """Names of the sources; the index is the `source_id`."""
        return [source.name for source in self.preparation.sources]

    @property
    def hyperparameters(self) -> dict[str, int | float | str | bool]:
        """What an update is made of, for TensorBoard."""
        mixing = {} if self.curriculum is None else self.curriculum.hyperparameters
        return mixing | {
            "sequences_per_update": self.sequences_per_update,
            "block_size": self.block_size,
            "sources": ", ".join(self.source_names),
        }

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """The tokens' tokenizer, None if unknown. Needs `setup`."""
        return self.corpus.tokenizer

    @property
    def corpus(self) -> Corpus:
        """The prepared text. Needs `setup`."""
        if self._corpus is None:
            raise RuntimeError("TextDataModule: call prepare_data() and setup() first")
        return self._corpus

    def describe(self, document_id: int) -> str:
        """Return the source and the place, `name file:line`, that a document came from. Needs `setup`."""
        return self.corpus.describe(document_id)

    def locate(self, document_id: int, offset: int) -> str:
        """Return the source and the place of a token within a document. Needs `setup`."""
        return self.corpus.locate(document_id, offset)

    def known_words(self) -> set[str]:
        """Return the words of the training text, as `CoherenceGate` counts them. Needs `setup`."""
        return self.corpus.known_words()

    def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
        """Pass an update's losses to the mixture."""
        if self._sampler is not None:
            take_losses(self._sampler, UpdateReport.of(report), trainer.lightning_module)

    def source_figures(self, update: int) -> Mapping[str, Any]:
        """Return the mixture's figures of an update; see `MixesSources` in `andrea_callbacks`."""
        return {} if self._sampler is None else mixing_figures(self._sampler, self.source_names, update)

    def use_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Prepare text with a checkpoint's tokenizer, unless a tokenizer is given or the text is fixed."""
        if self._text.is_kept or self.preparation.tokenizer is not None:
            return  # files are not looked for where their text is kept: they may be gone
        if self.preparation.text:
            self.preparation = keep_tokenizer(self.preparation, tokenizer)

    def keep_text_of(self, checkpoint: Mapping[str, Any], path: str | Path = "the checkpoint") -> None:
        """Use the text that a checkpoint's run began with, for a resume.

        `andrea fit --resume` and `LanguageModule` call this. If called before `prepare_data`, the current
        text need not be prepared.

        Args:
            checkpoint: A checkpoint that a fit with this datamodule saved. One of an earlier version names no
                store; its text is compared by a checksum.
            path: The checkpoint's path, for messages.

        Raises:
            UserError: If `setup` was called and that text is gone.
        """
        is_new = self._text.keep(checkpoint, type(self).__qualname__, self.preparation, str(path))
        if is_new and self._corpus is not None:
            self._replace_text()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint's record of the text, and record in the cache where checkpoints are."""
        if self._corpus is None or self.trainer is None:
            return {}
        if self.trainer.is_global_zero:
            self._text.note_checkpoints(self.trainer, self._corpus.prepared)
        return record_of(self.preparation, self._corpus.prepared)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """In a fit, use the run's text. In an evaluation, report how the current text differs from it."""
        if self.trainer is None or self._corpus is None or not applies(state_dict, self.preparation):
            return
        if self.trainer.state.fn == "fit":
            checkpoint = {type(self).__qualname__: state_dict}
            self.keep_text_of(checkpoint, self.trainer.ckpt_path or "the checkpoint")
        else:
            say_what_is_evaluated(state_dict, self.preparation, self._corpus.prepared)

    @override
    def prepare_data(self, verify: bool = False) -> None:
        """Prepare missing or outdated text. Lightning calls this on one process of each machine.

        Args:
            verify: Whether to compare every document with the prepared text, even if no size or time changed.
        """
        with listed_once():
            self._text.prepare(self.preparation, verify)

    @override
    def setup(self, stage: str | None = None) -> None:
        """Open the prepared text, on every rank; switch validation off if nothing is held out."""
        if stage == "fit" and self.trainer is not None and not self.preparation.holds_out_validation:
            self.trainer.limit_val_batches = 0
        if self._corpus is None:
            with listed_once():
                self._open(self._text.open(self.preparation, self.trainer))
        self._replace_text()

    def _open(self, prepared: Prepared) -> None:
        self._corpus = Corpus(self.preparation, prepared, self.vocab_size, self.block_size)

    def _replace_text(self) -> None:
        """Open the text that a checkpoint names, instead of the current text."""
        is_first = self.trainer is None or self.trainer.is_global_zero
        found = self._text.replacement(self.preparation, self.corpus.prepared, says=is_first)
        if found is not None:
            self._open(found)

    @override
    def train_dataloader(self) -> TextWindowLoader:
        """Return the loader of windows.

        Raises:
            UserError: If there is nothing to train on.
        """
        trainer = self.trainer
        reader = self._reader("train")
        refuse_empty_training(self.corpus)
        loader = TextWindowLoader(
            reader,
            self._build_sampler(len(reader.lengths)),
            self.num_workers,
            self._pin_memory(),
            epoch=trainer.current_epoch if trainer else 0,
            prefetch_factor=self.prefetch_factor,
            text=self.corpus.checksum,
        )
        if trainer is not None:
            limit = trainer.limit_train_batches
            loader.limit = int(limit * len(loader)) if isinstance(limit, float) else limit
        return loader

    @override
    def val_dataloader(self) -> MicroBatchLoader | list[Any]:
        """Return the loader of held-out micro-batches; an empty list if nothing is held out."""
        is_evaluation = self.trainer is not None and self.trainer.state.fn == "validate"
        return self._held_out("val") if is_evaluation or self.preparation.holds_out_validation else []

    @override
    def test_dataloader(self) -> MicroBatchLoader:
        """Return the loader of the test documents' micro-batches."""
        return self._held_out("test")

    @override
    def predict_dataloader(self) -> MicroBatchLoader:
        """Return the loader of the validation documents' micro-batches, for a loss per sequence."""
        return self._held_out("val")

    def _build_sampler(self, count: int) -> WindowSampler:
        """Return the sampler; it continues a curriculum if the trainer continues."""
        trainer = self.trainer
        repeat = float(getattr(trainer, "overfit_batches", 0)) > 0
        if self.curriculum is None:
            return EpochSampler(count, self.sequences_per_update, self.seed, self.shuffle, repeat)
        before = self._sampler
        self._sampler = sampler = CurriculumSampler(
            self.corpus.pools(),
            self.curriculum,
            self.sequences_per_update,
            self.seed,
            repeat,
            feedback=None if trainer is None else LossFeedback(trainer),
        )
        compare_with_run(sampler, trainer)
        if before is not None and trainer is not None and trainer.global_step:
            sampler.load_state_dict(before.state_dict())
        say_mixing(sampler)
        return sampler

    def _held_out(self, split: Split) -> MicroBatchLoader:
        reader = self._reader(split)
        if not len(reader.lengths):
            raise empty_split(self.corpus, split)
        return MicroBatchLoader(reader, self.num_workers, self._pin_memory())

    def _reader(self, split: Split) -> WindowReader:
        dataset, lengths = self.corpus.dataset(split)
        return WindowReader(
            dataset,
            lengths,
            DynamicPaddingCollator(PAD_TOKEN_ID),
            self.micro_batch_tokens,
            self.micro_batch_sequences,
            *((self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)),
        )

    def _pin_memory(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
