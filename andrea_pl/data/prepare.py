"""From sources to token stores: learn the tokenizer, deal documents to splits, encode, notice changes.

Text that changed gets a new store beside the old one, which stays for the runs that were trained on it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from tqdm import tqdm

from andrea_pl.data.documents import Problems, TextSource
from andrea_pl.data.encoding import encoded
from andrea_pl.data.inputs import SourceInput, documents_of
from andrea_pl.data.locking import preparing
from andrea_pl.data.records import digest
from andrea_pl.data.sample import TextSample
from andrea_pl.data.store import (
    FORMAT_VERSION,
    SPLITS,
    StoreWriter,
    TokenStore,
    disk_error,
    fingerprint,
    writing_store,
)
from andrea_pl.data.token_files import token_pieces
from andrea_pl.data.tokenizer import TextTokenizer
from andrea_pl.data.versions import (
    name_current,
    note_use,
    read_inputs,
    replace_text,
    sweep_temporaries,
    versions,
    write_inputs,
)
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
        settings = [decisive_settings(source) for source in self.sources]
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


def prepare(preparation: Preparation, only: Sequence[str] | None = None, verify: bool = False) -> Prepared:
    """Write what is missing or out of date; say what was done and what was found.

    Of several processes that prepare one folder, one does and the others wait for it.

    Args:
        preparation: What is to be prepared.
        only: Names of the sources that are needed; all when left out.
        verify: Whether all documents are compared with their stores, also where no size or time has changed.

    Returns:
        The stores, opened, and their tokenizer.

    Raises:
        UserError: If input cannot be read, nothing is there, or the disk is full.
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
    """Open what `prepare` wrote last.

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
    """Return a preparation with a given tokenizer, kept in the cache under its fingerprint.

    Where the cache already holds the text under that very tokenizer and nothing changed, it stays as it is.
    """
    learnt = _Learnt.read(preparation.folder)
    if learnt is not None and learnt.tokenizer.fingerprint == tokenizer.fingerprint:
        inputs = [
            SourceInput(source, preparation.vocab_size, preparation.on_error) for source in preparation.stored
        ]
        if learnt.inputs == _inputs_of(each for each in inputs if not each.is_token_file):
            return preparation
    path = preparation.cache_dir / f"tokenizer-{tokenizer.fingerprint[:16]}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != tokenizer.definition:
            replace_text(path, tokenizer.definition)
    except OSError as error:
        raise disk_error(path, error) from error
    return replace(preparation, tokenizer=str(path))


def decisive_settings(source: TextSource) -> dict[str, Any]:
    """Return the settings of a source that its tokens depend on, without later ones at their default."""
    usual = {
        each.name: each.default_factory() if each.default_factory is not MISSING else each.default
        for each in fields(source)
    }
    given = source.settings()
    return {key: value for key, value in given.items() if key in FIRST_KEYS or value != usual.get(key)}


def _refuse_mixture(preparation: Preparation, inputs: list[SourceInput]) -> None:
    names = [source.name for source in preparation.sources]
    if len(set(names)) < len(names):
        raise UserError(f"two sources have the same name: {', '.join(names)}; rename one")
    if not preparation.sources:
        raise UserError("there are no sources: set data.sources")
    if preparation.tokenizer:
        return
    text = sum(not each.is_token_file for each in inputs)
    if 0 < text < len(preparation.sources):
        raise UserError(
            "token files and text are mixed, and the tokenizer that would be learnt from the text did not "
            "write the token files; set data.tokenizer to the tokenizer.json that did"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Learnt:
    """A tokenizer that was learnt, and a mark of the input that it was learnt from.

    <settings>/tokenizer.json     the tokenizer
               tokenizer.inputs   the mark, and the tokenizer's fingerprint, which early versions left out
    """

    tokenizer: TextTokenizer
    inputs: str | None
    """None where it is not known, since learning was broken off."""

    @staticmethod
    def read(folder: Path) -> "_Learnt | None":
        try:
            tokenizer = TextTokenizer.load(folder / "tokenizer.json")
        except UserError:
            return None
        try:
            mark = (folder / "tokenizer.inputs").read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError):
            mark = []
        is_its = len(mark) == 1 or (len(mark) == 2 and mark[1] == tokenizer.fingerprint)
        return _Learnt(tokenizer=tokenizer, inputs=mark[0] if is_its else None)

    def write(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text(encoding="utf-8") != self.tokenizer.definition:
                replace_text(path, self.tokenizer.definition)
            replace_text(folder / "tokenizer.inputs", f"{self.inputs} {self.tokenizer.fingerprint}")
        except OSError as error:
            raise disk_error(path, error) from error


def _inputs_of(texts: Iterable[SourceInput]) -> str:
    return fingerprint([each.stamps for each in texts])


class _Pass:
    """One look at all sources, each listed once, and what is to be done.

    Args:
        preparation: What is to be prepared.
        only: Names of the sources that are needed; all when left out.
        verify: Whether documents are compared though sizes and times agree.
    """

    def __init__(self, preparation: Preparation, only: Sequence[str] | None, verify: bool = False) -> None:
        self.preparation = preparation
        self.folder = preparation.folder
        self.verify = verify
        self.inputs = {
            source.name: SourceInput(source, preparation.vocab_size, preparation.on_error)
            for source in preparation.stored
        }
        _refuse_mixture(preparation, [*self.inputs.values()])
        self.needed = [name for name in self.inputs if only is None or name in only]
        self.changed: set[str] = set()
        """Sources whose documents are not those of any store."""
        self.verified: set[Path] = set()

    @property
    def text(self) -> list[SourceInput]:
        """The sources that need a tokenizer."""
        return [each for each in self.inputs.values() if not each.is_token_file]

    def find(self) -> Prepared | None:
        """Open what is prepared and current by sizes and times; None where something is to be done."""
        tokenizer = None
        if self.preparation.tokenizer:
            tokenizer = TextTokenizer.load(self.preparation.tokenizer)
        elif self.text:
            learnt = _Learnt.read(self.folder)
            if learnt is None or learnt.inputs != _inputs_of(self.text):
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
        """Learn and write what is to be; open all."""
        tokenizer = self.tokenizer()
        seen: dict[int, str] = {}
        stores: dict[str, TokenStore] = {}
        for name in self.needed:
            found = self.find_store(name, tokenizer)
            if isinstance(found, str):
                rank_zero_info(f"preparing source {name!r}: {found}")
                self.inputs[name].source.report_passed_over()
                found = _write(self.preparation, self.inputs[name], tokenizer, seen)
            else:
                records = found.records
                splits = [SPLITS[number] for number in cast("list[int]", records["split"].tolist())]
                seen |= dict(zip(cast("list[int]", records["digest"].tolist()), splits, strict=True))
            name_current(self.folder / name, found.folder)
            stores[name] = found
        return Prepared(tokenizer=tokenizer, stores=stores)

    def tokenizer(self) -> TextTokenizer | None:
        """Return the tokenizer that is given or was learnt from this very text; learn it otherwise."""
        if self.preparation.tokenizer:
            return TextTokenizer.load(self.preparation.tokenizer)
        if not self.text:
            return None
        inputs = _inputs_of(self.text)
        learnt = _Learnt.read(self.folder)
        if learnt is not None:
            found = [self.find_store(each.source.name, learnt.tokenizer) for each in self.text]
            is_known = learnt.inputs == inputs and not self.changed
            if is_known or not any(isinstance(each, str) for each in found):
                if not is_known:
                    _Learnt(tokenizer=learnt.tokenizer, inputs=inputs).write(self.folder)
                return learnt.tokenizer
        tokenizer = learn_tokenizer(self.preparation)
        _Learnt(tokenizer=tokenizer, inputs=inputs).write(self.folder)
        return tokenizer

    def find_store(
        self, name: str, tokenizer: TextTokenizer | None, compare: bool = True
    ) -> TokenStore | str:
        """Return the store of a source's text as it is now, whole; or why there is none.

        Args:
            name: The source.
            tokenizer: What its tokens were, or are to be, written by.
            compare: Whether documents may be read, to see whether they changed.
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
        """Return why a store is not of the text as it is now, None where it is."""
        recorded = read_inputs(store)
        agrees = each.agrees(recorded)
        is_other = store.manifest["tokenizer"] != (None if each.is_token_file else _mark(tokenizer))
        if agrees and not self.verify:
            if not is_other and recorded != each.entries:
                write_inputs(store.folder, each.entries)  # of an earlier version, which did not note all
            return "the tokenizer changed" if is_other else None
        if compare and each.may_agree(recorded) and each.documents == documents_of(store):
            write_inputs(store.folder, each.entries)
            return "the tokenizer changed" if is_other else None
        self.changed.add(each.source.name)
        return "its input changed, though sizes and times did not" if agrees else "its input changed"


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


def _mark(tokenizer: TextTokenizer | None) -> str | None:
    return None if tokenizer is None else tokenizer.fingerprint


def _write(
    preparation: Preparation, each: SourceInput, tokenizer: TextTokenizer | None, seen: dict[int, str]
) -> TokenStore:
    problems = Problems(preparation.on_error)
    source, entries = each.source, each.entries
    vocab_size = tokenizer.vocab_size if tokenizer else preparation.vocab_size
    splits: Counter[str] = Counter()
    repeated = crossing = 0
    with writing_store(preparation.folder / source.name, vocab_size, by_content=True) as writer:
        pieces = (
            token_pieces(source, vocab_size, problems)
            if each.is_token_file
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
        made_from = {"inputs": each.stamps, "tokenizer": None if each.is_token_file else _mark(tokenizer)}
        _finish(writer, source, made_from, problems, splits, repeated)
    write_inputs(writer.folder, entries)
    if crossing:
        rank_zero_warn(
            f"source {source.name!r}: {crossing} documents lie in another split too, because sources have a "
            "split or a val_fraction of their own; held-out losses will look better than they are"
        )
    return TokenStore(writer.folder)


def _finish(
    writer: StoreWriter,
    source: TextSource,
    made_from: dict[str, Any],
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
            **made_from,
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
