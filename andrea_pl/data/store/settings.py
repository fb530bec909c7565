"""The settings of a preparation, and their folder in the cache."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from andrea_pl.data.sources.documents import TextSource
from andrea_pl.data.sources.records import digest
from andrea_pl.data.store.inputs import SourceInput
from andrea_pl.data.store.token_store import FORMAT_VERSION, TokenStore, fingerprint
from andrea_pl.data.store.tokenizer import TextTokenizer
from andrea_pl.errors import UserError

TOKENIZER_SAMPLE_BYTES = 50_000_000
"""Learning takes up to 110 bytes of memory for each of these, where all words differ; some 3 in English."""

FIRST_KEYS = (
    "name",
    "kind",
    "paths",
    "document_separator",
    "part",
    "documents",
    "end_of_document",
    "split",
    "format",
    "val_fraction",
)
"""Settings of a source that folders of the cache were named by from the start; later ones only count where
they are not the default, so that a cache stays current when an option is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """The text to prepare, and the settings.

    Args:
        sources: The text.
        vocab_size: Merges + 256 bytes + 1 special token, for a learnt tokenizer.
        tokenizer: Path of a `tokenizer.json` to use instead.
        val_fraction: Share of documents held out for validation, chosen by a hash of their content.
        test_fraction: Share of documents held out for the test.
        on_error: What to do about unreadable input: `raise` stops, `skip` skips, counts and reports it.
        cache_dir: Folder for stores.
        tokenizer_sample_bytes: Maximum number of bytes of training text from which a tokenizer is learnt.
    """

    sources: Sequence[TextSource]
    vocab_size: int
    tokenizer: str | None
    val_fraction: float
    test_fraction: float
    on_error: Literal["raise", "skip"]
    cache_dir: Path
    tokenizer_sample_bytes: int = TOKENIZER_SAMPLE_BYTES

    @property
    def stored(self) -> list[TextSource]:
        """The sources that need a store."""
        return [source for source in self.sources if source.kind != "tokens"]

    @property
    def text(self) -> list[TextSource]:
        """The sources that need a tokenizer."""
        return [source for source in self.stored if not source.is_token_file]

    @property
    def folder(self) -> Path:
        """The folder of these settings; other settings do not use it."""
        settings = [decisive_settings(source) for source in self.sources]
        tokenizer = None if self.tokenizer is None else str(Path(self.tokenizer).expanduser().absolute())
        values = [self.vocab_size, tokenizer, self.val_fraction, self.test_fraction, self.on_error]
        if self.tokenizer_sample_bytes != TOKENIZER_SAMPLE_BYTES and tokenizer is None:
            values.append(self.tokenizer_sample_bytes)  # the default keeps the folders of earlier versions
        return self.cache_dir / fingerprint([FORMAT_VERSION, settings, values])

    @property
    def holds_out_validation(self) -> bool:
        """Whether documents are held out for validation."""
        return any(
            each.split == "val" or (each.split == "hash" and self.val_fraction_of(each) > 0)
            for each in self.sources
        )

    def split_of_tokens(self, source: TextSource, document: Sequence[int]) -> str:
        """Return the split of a document given as ids, by its content."""
        return self.split_of(source, digest(repr(list(document)).encode()))

    def split_of(self, source: TextSource, digest: int) -> str:
        """Return the split of a document, by its content."""
        if source.split != "hash":
            return source.split
        place = digest / 2**64
        val_fraction = self.val_fraction_of(source)
        if place < val_fraction:
            return "val"
        return "test" if place < val_fraction + self.test_fraction else "train"

    def val_fraction_of(self, source: TextSource) -> float:
        """Return the share of a source's documents that is held out for validation."""
        return self.val_fraction if source.val_fraction is None else source.val_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Opened stores, and their tokenizer, if there is one."""

    tokenizer: TextTokenizer | None
    stores: dict[str, TokenStore]


def decisive_settings(source: TextSource) -> dict[str, Any]:
    """Return the settings that affect a source's tokens, without newer ones that have their default."""
    usual = {
        each.name: each.default_factory() if each.default_factory is not MISSING else each.default
        for each in fields(source)
    }
    given = source.settings()
    return {key: value for key, value in given.items() if key in FIRST_KEYS or value != usual.get(key)}


def refuse_mixture(preparation: Preparation, inputs: Sequence[SourceInput]) -> None:
    """Refuse sources that cannot be prepared together."""
    names = [source.name for source in preparation.sources]
    if len(set(names)) < len(names):
        raise UserError(f"two sources have the same name: {', '.join(names)}; rename one")
    if not preparation.sources:
        raise UserError("there are no sources: set `sources`")
    if preparation.tokenizer:
        return
    text = sum(not each.is_token_file for each in inputs)
    if 0 < text < len(preparation.sources):
        raise UserError(
            "token files and text are mixed, and the tokenizer that would be learnt from the text did not "
            "write the token files; set `tokenizer` to the tokenizer.json that did"
        )
