"""Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019) through Hugging Face `tokenizers`."""

import hashlib
import json
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from andrea_pl.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"
BYTES = 256


class TextTokenizer:
    """Turns text into token ids and back; knows which id ends a document and how many bytes an id stands for.

    Text that happens to spell a special token is encoded as ordinary text.

    Args:
        definition: The content of a `tokenizer.json`.
        end_token: The special token that ends a document.

    Raises:
        UserError: If the definition cannot be read or has no such token.
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
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        """Number of ids."""
        self._definition = self._tokenizer.to_str()

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

        Args:
            texts: The training text.
            vocab_size: Merges + 256 bytes + 1 special. Where the text is too small for that many merges fewer
                are learnt, with a warning.

        Raises:
            UserError: If `vocab_size` leaves no room for the bytes and the special token.
        """
        if vocab_size < BYTES + 1:
            raise UserError(
                f"vocab_size must be at least {BYTES + 1} (256 bytes and one special), got {vocab_size}"
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=sys.stderr.isatty(),
        )
        tokenizer.train_from_iterator(texts, trainer)
        trained = cls(tokenizer.to_str())
        if trained.vocab_size < vocab_size:
            warnings.warn(
                f"the text gave {trained.vocab_size - BYTES - 1} merges where vocab_size={vocab_size} has "
                f"room for {vocab_size - BYTES - 1}; the model keeps vocab_size rows, and the last "
                f"{vocab_size - trained.vocab_size} stay unused",
                stacklevel=2,
            )
        return trained

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

        The first stands for the start of the document, so that its first word is a label like any other.
        """
        encode_batch = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        return [
            [self.end_id, *encoding.ids, self.end_id]
            for encoding in encode_batch(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; special tokens give nothing, unfinished UTF-8 gives U+FFFD."""
        return self._tokenizer.decode(list(ids))

    def bytes_per_token(self) -> NDArray[np.int64] | None:
        """Return (V,) the bytes of text that each id stands for; None if the tokenizer is not byte-level."""
        definition = cast(dict[str, Any], json.loads(self._definition))
        if (definition.get("decoder") or {}).get("type") != "ByteLevel":
            return None
        special = {added["id"] for added in definition.get("added_tokens", []) if added.get("special")}
        table = np.zeros(self.vocab_size, dtype=np.int64)
        for token, index in self._tokenizer.get_vocab(with_added_tokens=True).items():
            table[index] = (
                0 if index in special else len(token)
            )  # one character of the byte alphabet is one byte
        return table
