"""Detects text that a tokenizer cannot reproduce, while encoding it."""

from itertools import takewhile

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from andrea_pl.data.sources.records import AnyDocument
from andrea_pl.data.store.tokenizer import TextTokenizer

SAMPLE_CHARACTERS = 1 << 12
"""Maximum number of characters of a document, or a piece of one, that are decoded again."""
MOST_CHARACTERS = 1 << 18
"""Maximum number of characters of a source that are decoded again."""
EXCERPT = 40


class LossWatch:
    """Counts unknown tokens, and decodes a sample to see whether the text comes back.

    Args:
        source: Name of the source.
        tokenizer: The tokenizer that encodes it.
    """

    def __init__(self, source: str, tokenizer: TextTokenizer) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._unknown_id = tokenizer.unknown_id
        self._tokens = 0
        self._unknown = 0
        self._example: str | None = None
        keeps_all = tokenizer.bytes_per_token() is not None
        self._remaining = 0 if keeps_all else MOST_CHARACTERS

    def see(self, text: str, ids: NDArray[np.uint32], document: AnyDocument) -> None:
        """Count the tokens of a text, and compare its beginning with the decoded tokens."""
        self._tokens += len(ids)
        if self._unknown_id is not None:
            self._unknown += int(np.count_nonzero(ids == self._unknown_id))
        if self._example is None and self._remaining > 0:
            sample = text[:SAMPLE_CHARACTERS]
            self._remaining -= len(sample)
            self._compare(sample, document)

    def report(self) -> None:
        """Warn in one line about lost text, if any."""
        if not self._unknown and self._example is None:
            return
        share = f"{self._unknown:,} of {self._tokens:,} tokens are unknown"
        example = "" if self._example is None else f", and text does not come back: {self._example}"
        rank_zero_warn(
            f"source {self._source!r}: the tokenizer loses text: {share}{example}; leave "
            "`tokenizer` out, or name a byte-level tokenizer, to keep all text"
        )

    def _compare(self, sample: str, document: AnyDocument) -> None:
        """Keep the first difference. A space at the start does not count: Metaspace adds and drops it."""
        back = self._tokenizer.decode(self._tokenizer.encode(sample)).removeprefix(" ")
        sample = sample.removeprefix(" ")
        if back == sample:
            return
        equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(sample, back, strict=False)))
        start = max(equal - EXCERPT // 2, 0)
        before, after = (repr(text[start : start + EXCERPT]) for text in (sample, back))
        self._example = f"{before} is read back as {after} ({document.origin}:{document.line})"
