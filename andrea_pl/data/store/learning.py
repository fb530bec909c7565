"""Learns a tokenizer from the training text, and records what it was learnt from."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info

from andrea_pl.data.sources.documents import Problems
from andrea_pl.data.store.inputs import SourceInput
from andrea_pl.data.store.sample import TextSample
from andrea_pl.data.store.settings import Preparation
from andrea_pl.data.store.token_store import disk_error, fingerprint
from andrea_pl.data.store.tokenizer import TextTokenizer
from andrea_pl.data.store.versions import replace_text
from andrea_pl.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """A learnt tokenizer, and a hash of the input that it was learnt from.

    <settings>/tokenizer.json     the tokenizer
               tokenizer.inputs   the hash, and the tokenizer's fingerprint (missing in early versions)
    """

    tokenizer: TextTokenizer
    inputs: str | None
    """None if unknown, because learning was interrupted."""

    @staticmethod
    def read(folder: Path) -> "Learnt | None":
        """Return the tokenizer in a folder of the cache, or None."""
        try:
            tokenizer = TextTokenizer.load(folder / "tokenizer.json")
        except UserError:
            return None
        try:
            mark = (folder / "tokenizer.inputs").read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError):
            mark = []
        is_its = len(mark) == 1 or (len(mark) == 2 and mark[1] == tokenizer.fingerprint)
        return Learnt(tokenizer=tokenizer, inputs=mark[0] if is_its else None)

    def write(self, folder: Path) -> None:
        """Write tokenizer and hash; an existing tokenizer is not written again."""
        path = folder / "tokenizer.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text(encoding="utf-8") != self.tokenizer.definition:
                replace_text(path, self.tokenizer.definition)
            replace_text(folder / "tokenizer.inputs", f"{self.inputs} {self.tokenizer.fingerprint}")
        except OSError as error:
            raise disk_error(path, error) from error


def inputs_of(texts: Iterable[SourceInput]) -> str:
    """Return a hash of the input of several sources."""
    return fingerprint([each.stamps for each in texts])


def learn_tokenizer(preparation: Preparation) -> TextTokenizer:
    """Learn a tokenizer from the training documents, or from a sample of them if they are large."""
    sample = _training_sample(preparation)
    share = f"all {sample.seen_bytes:,} bytes of training text"
    if sample.kept_bytes < sample.seen_bytes:
        share = (
            f"{sample.kept_bytes:,} of {sample.seen_bytes:,} bytes of training text, chosen by a hash of "
            "their content (`tokenizer_sample_bytes`)"
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


def mark_of(tokenizer: TextTokenizer | None) -> str | None:
    """Return a store's record of its tokenizer."""
    return None if tokenizer is None else tokenizer.fingerprint
