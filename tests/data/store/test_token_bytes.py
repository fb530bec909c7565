"""What a tokenizer or a separator misses is said at preparation; bytes are counted right or not at all."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from andrea_pl import TextSource
from andrea_pl.data import TextTokenizer
from andrea_pl.data.store.preparation import open_prepared, prepare
from andrea_pl.data.store.settings import Preparation
from andrea_pl.language.token_mean import TokenMean

pytestmark = pytest.mark.filterwarnings("ignore:the text gave")


def byte_level(texts: list[str] | None = None) -> Tokenizer:
    texts = texts or ["the cat sat on the mat; 日本 und das ñandú " * 20]
    return Tokenizer.from_str(TextTokenizer.train(texts, 300).definition)


def word_piece() -> Tokenizer:
    vocabulary = ["[UNK]", "<|endoftext|>", "unicode", "text", "[CLS]"]
    built = Tokenizer(models.WordPiece({word: at for at, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    built.normalizer = normalizers.BertNormalizer()
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece()
    built.add_special_tokens(["<|endoftext|>", "[UNK]", "[CLS]"])
    return built


def lower_case() -> Tokenizer:
    built = byte_level()
    built.normalizer = normalizers.Lowercase()
    return built


def without_unknown() -> Tokenizer:
    """A BPE without an unknown token, which drops what it cannot write."""
    built = Tokenizer(models.BPE({"<|endoftext|>": 0, "t": 1, "e": 2, "x": 3, " ": 4}, []))
    built.add_special_tokens(["<|endoftext|>"])
    return built


def write(folder: Path, tokenizer: Tokenizer | None, text: str, **options: Any) -> Preparation:
    folder.mkdir(exist_ok=True)
    (folder / "a.txt").write_bytes(text.encode())
    path = None
    if tokenizer is not None:
        path = str(folder / "tokenizer.json")
        tokenizer.save(path)
    return Preparation(
        sources=[TextSource(name="own", paths=[str(folder / "a.txt")], split="train", **options)],
        vocab_size=300,
        tokenizer=path,
        val_fraction=0.0,
        test_fraction=0.0,
        on_error="raise",
        cache_dir=folder / "cache",
    )


def said(todo: Preparation) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        prepare(todo)
    return [str(each.message) for each in found if "the text gave" not in str(each.message)]


def test_a_word_piece_that_loses_text(tmp_path: Path) -> None:
    """'Ünïcode ☃ 日本 text' has three unknown tokens of five, and comes back as 'unicode text'."""
    todo = write(tmp_path, word_piece(), "Ünïcode ☃ 日本 text")
    (line,) = said(todo)
    assert "source 'own': the tokenizer loses text: 3 of 5 tokens are unknown" in line
    assert "'Ünïcode ☃ 日本 text' is read back as 'unicode text'" in line
    assert f"{tmp_path}/a.txt:1" in line
    assert "\n" not in line
    assert said(todo) == [], "a store that is there is not looked at again"


@pytest.mark.parametrize(
    ("build", "text", "unknown"),
    [
        (lower_case, "The Cat", "0 of"),
        (without_unknown, "text ☃", "0 of 5"),
        (word_piece, "unicode  text", "0 of 2"),
    ],
)
def test_other_losses(tmp_path: Path, build: Callable[[], Tokenizer], text: str, unknown: str) -> None:
    """Lower case, characters dropped, white space joined: text is lost though no token is unknown."""
    (line,) = said(write(tmp_path, build(), text))
    assert f"loses text: {unknown}" in line
    assert "text does not come back" in line


def metaspace(text: str) -> Tokenizer:
    characters = sorted({*text, "▁"})
    built = Tokenizer(
        models.BPE({"<|endoftext|>": 0} | {each: at for at, each in enumerate(characters, 1)}, [])
    )
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Metaspace()
    built.add_special_tokens(["<|endoftext|>"])
    return built


def test_what_is_kept_is_not_said(tmp_path: Path) -> None:
    text = "Ünïcode ☃ 日本 text"
    for number, tokenizer in enumerate((None, byte_level(), metaspace(text))):
        assert said(write(tmp_path / str(number), tokenizer, text)) == []


def test_separator_with_windows_line_ends(tmp_path: Path) -> None:
    r"""Both "\r\n\r\n" and "\n\n" cut a file with either line end into its three documents."""
    for number, (text, separator) in enumerate(
        [(f"a{end}{end}b{end}{end}c", mark * 2) for end in ("\r\n", "\n") for mark in ("\r\n", "\n")]
    ):
        todo = write(tmp_path / str(number), None, text, document_separator=separator)
        assert said(todo) == []
        store = open_prepared(todo).stores["own"]
        assert store.records["line"].tolist() == [1, 3, 5]


def test_a_separator_that_occurs_nowhere_is_said(tmp_path: Path) -> None:
    todo = write(tmp_path, None, "a\n\nb\n\nc", document_separator="\\n\\n")
    (line,) = said(todo)
    assert "source 'own': its document_separator '\\\\n\\\\n' occurs in none of its 1 text files" in line
    assert "double quotes" in line
    (tmp_path / "b.txt").write_text("a\\n\\nb")
    assert said(write(tmp_path / "one", None, "a---b", document_separator="---")) == []


# bytes of tokens


def table_of(built: Tokenizer) -> Any:
    return TextTokenizer(built.to_str()).bytes_per_token()


def test_added_tokens_count_their_bytes() -> None:
    """88 labels, loss 4.5494, 190 bytes, 36 of them in four times 日本語: 3.0399 bits a byte."""
    built = byte_level()
    built.add_tokens(["日本語"])
    table = table_of(built)
    one, two = (int(np.flatnonzero(table == size)[0]) for size in (1, 2))
    labels = [built.token_to_id("日本語")] * 4 + [two] * 70 + [one] * 14
    metric = TokenMean()
    metric.update(torch.tensor(4.5494 * 88), len(labels), int(table[labels].sum()))
    assert float(metric.compute()["bits_per_byte"]) == pytest.approx(3.0399, abs=1e-4)


ADDED = ["日本語", "the", " cat", "\n", "☃", "naïve", "  "]


@pytest.mark.system
@given(text=st.lists(st.sampled_from([*ADDED, "the cat", " ", "ñ", "日", "<|endoftext|>", "x"])).map("".join))
def test_bytes_of_any_text(text: str) -> None:
    """The bytes of a text's ids are the bytes of the text: with added tokens, also where merges make them."""
    for options in ({}, {"normalized": False}, {"single_word": True}):
        built = byte_level(["the cat sat"])
        built.add_tokens([AddedToken(each, **options) for each in ADDED])
        built.add_special_tokens(["<s>", "cat"])
        built.post_processor = processors.ByteLevel()
        tokenizer = TextTokenizer(built.to_str())
        table = tokenizer.bytes_per_token()
        assert table[tokenizer.encode(text)].sum() == len(text.encode())
        assert table[tokenizer.end_id] == table[built.token_to_id("<s>")] == 0


def edited(change: Callable[[dict[str, Any]], None]) -> Tokenizer:
    definition = json.loads(byte_level().to_str())
    change(definition)
    return Tokenizer.from_str(json.dumps(definition))


def added(*tokens: str, **options: Any) -> Tokenizer:
    built = byte_level()
    built.add_tokens([AddedToken(each, **options) for each in tokens])
    return built


def drop_a_byte(definition: dict[str, Any]) -> None:
    vocabulary = definition["model"]["vocab"]
    del vocabulary["ÿ"]
    definition["model"]["merges"] = [
        each for each in definition["model"]["merges"] if "ÿ" not in "".join(each)
    ]


def with_parts(**parts: Any) -> Tokenizer:
    built = byte_level()
    for name, part in parts.items():
        setattr(built, name, part)
    return built


@pytest.mark.parametrize(
    "build",
    [
        lambda: added("x y", lstrip=True),
        lambda: added("x y", rstrip=True),
        lambda: added("é"),  # is the name of a byte in the byte alphabet, too
        lambda: with_parts(normalizer=normalizers.NFC()),
        lambda: with_parts(normalizer=normalizers.Lowercase()),
        lambda: with_parts(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda: with_parts(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        ),
        lambda: with_parts(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        lambda: edited(drop_a_byte),
        lambda: edited(lambda definition: definition["added_tokens"][0].update(special=False)),
        word_piece,
        without_unknown,
        lambda: with_parts(decoder=decoders.ByteFallback()),
    ],
)
def test_no_figure_rather_than_a_wrong_one(build: Callable[[], Tokenizer]) -> None:
    assert table_of(build()) is None


def test_ids_may_have_holes() -> None:
    """The highest id decides how many rows a model needs."""
    built = edited(drop_a_byte)
    highest = max(built.get_vocab().values())
    assert built.get_vocab_size() == highest
    assert TextTokenizer(built.to_str()).vocab_size == highest + 1
