"""The block that a checkpoint carries, from which a model can be rebuilt with nothing else at hand."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

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


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load a local checkpoint on the CPU; only tensors and plain values are let in.

    Raises:
        UserError: If it is no local file, cannot be read, or holds anything else.
    """
    path = str(path)
    if "://" in path:
        raise UserError(f"{path}: checkpoints are read from local files only; download it first")
    if not Path(path).is_file():
        if (Path(path) / ".metadata").is_file():
            raise UserError(
                f"{path}: a folder of shards, which only trainer.strategy.save_distributed_checkpoint: true "
                "writes and only its own strategy continues, from Python; leave that false for one file"
            )
        inside = sorted(Path(path).rglob("*.ckpt")) if Path(path).is_dir() else []
        hint = f"; that folder holds {inside[-1]}" if inside else ""
        raise UserError(f"{path}: no such checkpoint file; give a .ckpt that andrea fit wrote{hint}")
    try:
        return cast(dict[str, Any], torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises several kinds; all mean that this is no checkpoint to trust
        raise UserError(
            f"{path} is not a checkpoint that can be loaded ({type(error).__name__}): it is damaged, or "
            "holds more than tensors and plain values"
        ) from error


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
