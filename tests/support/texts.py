"""Texts, tokenizers and prepared text for tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from andrea_pl import TextSource
from andrea_pl.data.sources.documents import Problems
from andrea_pl.data.sources.token_files import token_pieces
from andrea_pl.data.store.preparation import open_prepared
from andrea_pl.data.store.settings import Preparation
from andrea_pl.data.store.tokenizer import END_OF_DOCUMENT, TextTokenizer

TEXTS = [f"document number {n} says that {n} times {n} is {n * n}. " * 5 for n in range(60)]


def write(folder: Path, texts: list[str] = TEXTS) -> Path:
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def preparation(path: Any, cache: Path, **options: Any) -> Preparation:
    defaults: dict[str, Any] = {
        "sources": [TextSource(name="s", paths=[str(path)])],
        "vocab_size": 300,
        "tokenizer": None,
        "val_fraction": 0.2,
        "test_fraction": 0.1,
        "on_error": "raise",
        "cache_dir": cache,
    }
    return Preparation(**(defaults | options))


def read(paths: Any, policy: Any = "raise", **options: Any) -> tuple[list[str], list[str]]:
    """Return the texts and the problems of a source."""
    problems = Problems(policy)
    source = TextSource(name="s", paths=[str(path) for path in paths], **options)
    return [document.text for document in source.read(problems)], problems.messages


TEXT = "Once upon a time there was a Time of words."


def trained(tokenizer: Tokenizer, trainer: Any) -> TextTokenizer:
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    return TextTokenizer(tokenizer.to_str())


def llama() -> TextTokenizer:
    """Return a BPE with Llama 2's normalizer and decoder."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # no merge across words
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [END_OF_DOCUMENT, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return trained(
        tokenizer, trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False)
    )


def source(*paths: Any, **options: Any) -> TextSource:
    return TextSource(name="s", paths=[str(path) for path in paths], **options)


def pieces(path: Any, vocab_size: int = 200_000, **options: Any) -> list[list[int]]:
    """Return the documents of a token file."""
    found = token_pieces(
        source(*(path if isinstance(path, list) else [path]), **options), vocab_size, Problems("raise")
    )
    return [np.concatenate([*parts]).tolist() for parts, _, _, _ in found]


def decoded(todo: Preparation, split: str) -> list[str]:
    prepared = open_prepared(todo)
    return [prepared.tokenizer.decode(tokens) for tokens in prepared.stores["s"].split(split)]


def said(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(caplog.messages)


def for_training(path: Path, cache: Path, **options: Any) -> Preparation:
    """Return the preparation of a file of which nothing is held out."""
    sources = [TextSource(name="s", paths=[str(path)], split="train")]
    return preparation(path, cache, sources=sources, val_fraction=0.0, test_fraction=0.0, **options)
