"""The block that a checkpoint carries, from which a model can be rebuilt with nothing else at hand."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import tokenizers
import torch

from andrea_pl.data.tokenizer import TextTokenizer
from andrea_pl.errors import UserError
from andrea_pl.network.config import TransformerConfig

KEY = "andrea_pl"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBlock:
    """What it takes to rebuild a model: its shape and its tokenizer."""

    network: TransformerConfig
    tokenizer: TextTokenizer | None
    """None for a model trained on token files whose tokenizer is not known."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with the versions of the libraries that wrote them."""
        return {
            "format": FORMAT_VERSION,
            "network": self.network.to_dict(),
            "tokenizer": self.tokenizer.definition if self.tokenizer else None,
            "tokenizer_fingerprint": self.tokenizer.fingerprint if self.tokenizer else None,
            "libraries": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "lightning": str(lightning.__version__),
                "tokenizers": str(tokenizers.__version__),
            },
        }


def read_block(checkpoint: dict[str, Any], path: str | Path = "the checkpoint") -> ModelBlock:
    """Return the block of a loaded checkpoint.

    Raises:
        UserError: If there is none, or a newer version wrote it.
    """
    block = checkpoint.get(KEY)
    if block is None:
        raise UserError(
            f"{path} has no block of andrea_pl; only checkpoints of LanguageModule can be used here"
        )
    if block["format"] > FORMAT_VERSION:
        raise UserError(
            f"{path} is of format {block['format']}, this version reads up to {FORMAT_VERSION}; upgrade"
        )
    definition = block["tokenizer"]
    return ModelBlock(
        network=TransformerConfig(**block["network"]),
        tokenizer=TextTokenizer(definition) if definition else None,
    )
