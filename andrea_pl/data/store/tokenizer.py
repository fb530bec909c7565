"""Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019) through Hugging Face `tokenizers`."""

import hashlib
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from andrea_pl.data.store.cutting import BOUNDED, Cutter
from andrea_pl.data.store.token_bytes import bytes_of_ids
from andrea_pl.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"
BYTES = 256
DECODED_TOKENS = 1 << 16
"""Tokens of a long text that are decoded at once."""


class TextTokenizer:
    """Converts text to token ids and back; knows the end-of-document id and each id's bytes of text.

    Text that spells a special token is encoded as ordinary text.

    Args:
        definition: The contents of a `tokenizer.json`.
        end_token: The special token that ends a document.

    Raises:
        UserError: If the definition cannot be read, or lacks that token.
    """

    def __init__(self, definition: str, end_token: str = END_OF_DOCUMENT) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(definition)
        except Exception as error:  # `tokenizers` raises bare Exception
            raise UserError(
                f"not a tokenizer definition ({error}); give a tokenizer.json of Hugging Face"
            ) from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        end_id = self._tokenizer.token_to_id(end_token)
        if end_id is None:
            raise UserError(
                f"the tokenizer has no token {end_token!r} to end a document; add it to its specials"
            )
        self.end_id: int = end_id
        """Id of the end-of-document token."""
        self.vocab_size: int = max(self._tokenizer.get_vocab().values()) + 1
        """Number of ids: one more than the highest, even if some in between are unused."""
        self._definition = self._tokenizer.to_str()
        self._cutter: Cutter | None = None

    @classmethod
    def load(cls, path: str | Path) -> "TextTokenizer":
        """Read a `tokenizer.json`."""
        try:
            return cls(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"cannot read the tokenizer {path}: {error.strerror}; give an existing file"
            ) from error
        except UserError as error:
            raise UserError(f"{path}: {error}") from error

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "TextTokenizer":
        """Learn merges from texts.

        Words are split as in GPT-2, but no run of letters, digits, other characters or white space is longer
        than `LONGEST_RUN`, since the time for a word grows faster than its length.

        Args:
            texts: The training text. Long texts are cut into pieces, which does not change the result.
            vocab_size: Merges + 256 bytes + 1 special token. If the text is too small for that many merges,
                fewer are learnt, with a warning.

        Raises:
            UserError: If `vocab_size` leaves no room for the bytes and the special token.
        """
        if vocab_size < BYTES + 1:
            raise UserError(
                f"vocab_size must be at least {BYTES + 1} (256 bytes and one special), got {vocab_size}"
            )
        tokenizer = _untrained()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=sys.stderr.isatty(),
        )
        pieces = (piece for text in texts for piece in cls.pieces_to_learn([text]))
        tokenizer.train_from_iterator(pieces, trainer)
        trained = cls(tokenizer.to_str())
        if trained.vocab_size < vocab_size:
            warnings.warn(
                f"the text gave {trained.vocab_size - BYTES - 1} merges where vocab_size={vocab_size} has "
                f"room for {vocab_size - BYTES - 1}; the model keeps vocab_size rows, and the last "
                f"{vocab_size - trained.vocab_size} stay unused",
                stacklevel=2,
            )
        return trained

    @staticmethod
    def pieces_to_learn(parts: Iterable[str]) -> Iterator[str]:
        """Cut a text, given in parts, into pieces in which `train` counts the same words as in the whole."""
        return _cutter_to_learn().pieces(parts)

    @property
    def definition(self) -> str:
        """The content of `tokenizer.json`, which Hugging Face `tokenizers` and `transformers` read."""
        return self._definition

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the definition."""
        return hashlib.sha256(self._definition.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without an end-of-document token."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts, encoded in parallel, each between two end-of-document tokens.

        The first of them marks the start of the document, so that its first word is a label too.
        """
        return [[self.end_id, *ids.tolist(), self.end_id] for ids in self.encode_pieces(texts)]

    def encode_pieces(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of many texts, encoded in parallel, without end-of-document tokens.

        The library takes about 40 to 120 bytes of memory per byte of text, more for long texts.
        """
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    @property
    def cutter(self) -> Cutter:
        """Cuts long texts without changing their ids."""
        if self._cutter is None:
            self._cutter = Cutter(self._tokenizer, json.loads(self._definition))
        return self._cutter

    @property
    def unknown_id(self) -> int | None:
        """Id of the unknown token, or None."""
        model = cast("dict[str, Any]", json.loads(self._definition)["model"])
        token = model.get("unk_token")
        return model.get("unk_id") if token is None else self._tokenizer.token_to_id(token)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. Special tokens give no text, incomplete UTF-8 gives U+FFFD."""
        return self._tokenizer.decode(list(ids))

    def decode_in_parts(self, ids: NDArray[Any], every: int = 1, whole_words: bool = False) -> Iterator[str]:
        """Yield the text of any number of ids, decoded `DECODED_TOKENS` at a time.

        Args:
            ids: (T,) ids.
            every: Decode only every n-th part.
            whole_words: Leave out words that may be cut at the border between two parts.
        """
        for start in range(0, len(ids), DECODED_TOKENS * every):
            end = start + DECODED_TOKENS
            text = self.decode(ids[start:end].tolist())
            first, last = 0, len(text)
            while whole_words and start and first < last and not text[first].isspace():
                first += 1
            while whole_words and end < len(ids) and last > first and not text[last - 1].isspace():
                last -= 1
            yield text[first:last]

    def bytes_per_token(self) -> NDArray[np.int64] | None:
        """Return (V,) bytes of text that each id stands for; None if that is uncertain."""
        table = bytes_of_ids(json.loads(self._definition), self.end_id)
        return None if table is None else np.array([table.get(index, 0) for index in range(self.vocab_size)])


@cache
def _cutter_to_learn() -> Cutter:
    tokenizer = _untrained()
    return Cutter(tokenizer, json.loads(tokenizer.to_str()))


def _untrained() -> Tokenizer:
    """Return a byte-level BPE tokenizer without merges, with bounded runs."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(BOUNDED), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
