"""From sources to token stores: learn the tokenizer, deal documents to splits, encode, notice changes."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from tqdm import tqdm

from andrea_pl.data.documents import Problems, TextSource
from andrea_pl.data.encoding import encoded
from andrea_pl.data.records import digest
from andrea_pl.data.sample import TextSample
from andrea_pl.data.store import (
    FORMAT_VERSION,
    SPLITS,
    StoreWriter,
    TokenStore,
    disk_error,
    fingerprint,
    sync_and_close,
    writing_store,
)
from andrea_pl.data.token_files import token_pieces
from andrea_pl.data.tokenizer import TextTokenizer
from andrea_pl.errors import UserError

TOKENIZER_SAMPLE_BYTES = 50_000_000
"""Learning takes up to 110 bytes of memory for each of these, where all words differ; some 3 in English."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What is to be prepared, and where.

    Args:
        sources: The text.
        vocab_size: Merges + 256 bytes + 1 special, for a tokenizer that is learnt here.
        tokenizer: A `tokenizer.json` to use instead.
        val_fraction: Share of documents held out for validation, decided by a hash of each document's
            content.
        test_fraction: Share of documents held out for the test.
        on_error: `raise` stops at input that cannot be read; `skip` counts it and says so.
        cache_dir: Folder under which stores are kept.
        tokenizer_sample_bytes: Bytes of training text that a tokenizer is learnt from, at most.
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
        """The folder that these settings own; other settings never touch it."""
        settings = [source.settings() for source in self.sources]
        tokenizer = None if self.tokenizer is None else str(Path(self.tokenizer).expanduser().absolute())
        values = [self.vocab_size, tokenizer, self.val_fraction, self.test_fraction, self.on_error]
        if self.tokenizer_sample_bytes != TOKENIZER_SAMPLE_BYTES and tokenizer is None:
            values.append(self.tokenizer_sample_bytes)  # the default keeps the folders of earlier versions
        return self.cache_dir / fingerprint([FORMAT_VERSION, settings, values])

    def split_of_tokens(self, source: TextSource, document: Sequence[int]) -> str:
        """Deal a document given as ids, likewise."""
        return self.split_of(source, digest(repr(list(document)).encode()))

    def split_of(self, source: TextSource, digest: int) -> str:
        """Deal a document to a split, by its content alone."""
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
    """Opened stores, and the tokenizer that wrote them where there is one."""

    tokenizer: TextTokenizer | None
    stores: dict[str, TokenStore]


def prepare(preparation: Preparation) -> None:
    """Write what is missing or out of date; say what was done and what was found.

    Raises:
        UserError: If input cannot be read, nothing is there, or the disk is full.
    """
    _refuse_mixture(preparation)
    folder = preparation.folder
    tokenizer = _prepare_tokenizer(preparation) if preparation.text else None
    seen: dict[int, str] = {}
    for source in preparation.stored:
        if source.is_token_file and preparation.tokenizer:
            tokenizer = tokenizer or TextTokenizer.load(preparation.tokenizer)
        stale = _why_stale(folder / source.name, source, tokenizer)
        if stale:
            rank_zero_info(f"preparing source {source.name!r}: {stale}")
            source.report_passed_over()
            _write(preparation, source, tokenizer, seen)
        else:
            records = TokenStore(folder / source.name).records
            splits = [SPLITS[number] for number in cast("list[int]", records["split"].tolist())]
            seen |= dict(zip(cast("list[int]", records["digest"].tolist()), splits, strict=True))


def open_prepared(preparation: Preparation) -> Prepared:
    """Open what `prepare` wrote.

    Raises:
        UserError: If a store is missing.
    """
    tokenizer = None
    if preparation.tokenizer:
        tokenizer = TextTokenizer.load(preparation.tokenizer)
    elif preparation.text:
        tokenizer = TextTokenizer.load(preparation.folder / "tokenizer.json")
    stores = {source.name: TokenStore(preparation.folder / source.name) for source in preparation.stored}
    return Prepared(tokenizer=tokenizer, stores=stores)


def keep_tokenizer(preparation: Preparation, tokenizer: TextTokenizer) -> Preparation:
    """Return a preparation with a given tokenizer, kept in the cache under its fingerprint.

    Where the cache already holds the text under that very tokenizer and nothing changed, it stays as it is.
    """
    own = preparation.folder / "tokenizer.json"
    mark = preparation.folder / "tokenizer.inputs"
    inputs = fingerprint([source.fingerprint() for source in preparation.text])
    is_current = own.exists() and mark.exists() and mark.read_text() == inputs
    if is_current and TextTokenizer.load(own).fingerprint == tokenizer.fingerprint:
        return preparation
    path = preparation.cache_dir / f"tokenizer-{tokenizer.fingerprint[:16]}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, tokenizer.definition)
    except OSError as error:
        raise disk_error(path, error) from error
    return replace(preparation, tokenizer=str(path))


def _refuse_mixture(preparation: Preparation) -> None:
    names = [source.name for source in preparation.sources]
    if len(set(names)) < len(names):
        raise UserError(f"two sources have the same name: {', '.join(names)}; rename one")
    if not preparation.sources:
        raise UserError("there are no sources: set data.sources")
    if preparation.text and len(preparation.text) < len(preparation.sources) and not preparation.tokenizer:
        raise UserError(
            "token files and text are mixed, and the tokenizer that would be learnt from the text did not "
            "write the token files; set data.tokenizer to the tokenizer.json that did"
        )


def _prepare_tokenizer(preparation: Preparation) -> TextTokenizer:
    if preparation.tokenizer:
        return TextTokenizer.load(preparation.tokenizer)
    path = preparation.folder / "tokenizer.json"
    mark = preparation.folder / "tokenizer.inputs"
    inputs = fingerprint([source.fingerprint() for source in preparation.text])
    if path.exists() and mark.exists() and mark.read_text() == inputs:
        return TextTokenizer.load(path)
    tokenizer = learn_tokenizer(preparation)
    try:
        preparation.folder.mkdir(parents=True, exist_ok=True)
        _replace(path, tokenizer.definition)
        _replace(mark, inputs)
    except OSError as error:
        raise disk_error(path, error) from error
    return tokenizer


def _replace(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it, so that its name never holds half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(text.encode())
        sync_and_close(file)
    temporary.replace(path)


def learn_tokenizer(preparation: Preparation) -> TextTokenizer:
    """Learn a tokenizer from the training documents, or from a sample of them where they are large."""
    sample = _training_sample(preparation)
    share = f"all {sample.seen_bytes:,} bytes of training text"
    if sample.kept_bytes < sample.seen_bytes:
        share = (
            f"{sample.kept_bytes:,} of {sample.seen_bytes:,} bytes of training text, chosen by a hash of "
            "their content (data.tokenizer_sample_bytes)"
        )
    rank_zero_info(f"learning a tokenizer of {preparation.vocab_size} ids from {share}")
    return TextTokenizer.train(sample.texts(), preparation.vocab_size)


def _training_sample(preparation: Preparation) -> TextSample:
    problems = Problems(preparation.on_error)
    sample = TextSample(preparation.tokenizer_sample_bytes)
    for source in preparation.text:
        for document in source.read(problems):
            if preparation.split_of(source, document.digest) == "train":
                for piece in TextTokenizer.pieces_to_learn(document.parts()):
                    sample.add(piece)
    return sample


def _tokenizer_mark(source: TextSource, tokenizer: TextTokenizer | None) -> str | None:
    return None if source.is_token_file or tokenizer is None else tokenizer.fingerprint


def _why_stale(folder: Path, source: TextSource, tokenizer: TextTokenizer | None) -> str | None:
    """Return why a store must be written, None where it need not."""
    if not folder.exists():
        return "not prepared yet"
    try:
        TokenStore.verify(folder)
        manifest = TokenStore(folder).manifest
    except UserError as error:
        return f"what was prepared cannot be read ({error})"
    if manifest["inputs"] != source.fingerprint():
        return "its input changed"
    if manifest["tokenizer"] != _tokenizer_mark(source, tokenizer):
        return "the tokenizer changed"
    return None


def _write(
    preparation: Preparation, source: TextSource, tokenizer: TextTokenizer | None, seen: dict[int, str]
) -> None:
    problems = Problems(preparation.on_error)
    inputs = source.fingerprint()
    vocab_size = tokenizer.vocab_size if tokenizer else preparation.vocab_size
    splits: Counter[str] = Counter()
    repeated = crossing = 0
    with writing_store(preparation.folder / source.name, vocab_size) as writer:
        pieces = (
            token_pieces(source, vocab_size, problems)
            if source.is_token_file
            else encoded(source, cast(TextTokenizer, tokenizer), problems)
        )
        for tokens, size, mark, document in tqdm(
            pieces, desc=source.name, unit=" documents", disable=None, leave=False
        ):
            split = preparation.split_of(source, mark)
            repeated += mark in seen
            crossing += seen.setdefault(mark, split) != split
            splits[split] += 1
            for part in tokens:
                writer.write(part)
            writer.add(
                [],
                size=size,
                split=split,
                origin=document.origin,
                line=document.line,
                digest=mark,
            )
        _finish(writer, source, tokenizer, inputs, problems, splits, repeated)
    if crossing:
        rank_zero_warn(
            f"source {source.name!r}: {crossing} documents lie in another split too, because sources have a "
            "split or a val_fraction of their own; held-out losses will look better than they are"
        )


def _finish(
    writer: StoreWriter,
    source: TextSource,
    tokenizer: TextTokenizer | None,
    inputs: list[Any],
    problems: Problems,
    splits: Counter[str],
    repeated: int,
) -> None:
    if not writer.documents:
        raise UserError(
            f"source {source.name!r} has no document that could be read; {len(problems.messages)} were left "
            "out"
        )
    writer.close(
        {
            "source": source.settings(),
            "inputs": inputs,
            "tokenizer": _tokenizer_mark(source, tokenizer),
            "splits": dict(splits),
            "repeated": repeated,
            "left_out": problems.messages,
        }
    )
    shares = ", ".join(f"{count} {split}" for split, count in sorted(splits.items()))
    rank_zero_info(f"source {source.name!r}: {writer.documents} documents ({shares}), {writer.tokens} tokens")
    if repeated:
        rank_zero_info(f"source {source.name!r}: {repeated} documents repeat an earlier one and were kept")
    if problems.messages:
        first = "; ".join(problems.messages[:3]) + ("; …" if len(problems.messages) > 3 else "")
        rank_zero_info(
            f"source {source.name!r}: left out {len(problems.messages)} that could not be read: {first}"
        )
