"""The tokenizer: sizes, bytes, round trips, specials."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from andrea_pl import UserError
from andrea_pl.data import TextTokenizer

TEXT = ["the cat sat on the mat; the dog sat on the log. " * 20, "naïve café ñandú ☃ 中文 " * 20]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.train(TEXT, 300)


def test_vocabulary_is_merges_bytes_and_one_special(tokenizer: TextTokenizer) -> None:
    assert tokenizer.vocab_size == 300
    assert tokenizer.end_id == 0


@pytest.mark.system
@given(text=st.text(max_size=60))
def test_round_trip(text: str) -> None:
    tokenizer = TextTokenizer.train(TEXT, 300)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    table = tokenizer.bytes_per_token()
    assert table is not None
    assert table[ids].sum() == len(text.encode())


def test_documents_stand_between_two_ends(tokenizer: TextTokenizer) -> None:
    rows = tokenizer.encode_documents(["the cat", ""])
    assert rows == [[0, *tokenizer.encode("the cat"), 0], [0, 0]]
    assert tokenizer.bytes_per_token()[0] == 0


def test_spelt_special_is_text(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end_id not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_saved_and_loaded_elsewhere(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.definition, encoding="utf-8")
    again = TextTokenizer.load(path)
    assert again.fingerprint == tokenizer.fingerprint
    assert Tokenizer.from_file(str(path)).encode("the cat sat").ids == tokenizer.encode("the cat sat")


def test_truncation_and_padding_are_left_out(tokenizer: TextTokenizer) -> None:
    """Many definitions carry both; documents would lose tokens or learn padding."""
    foreign = Tokenizer.from_str(tokenizer.definition)
    foreign.enable_truncation(8)
    foreign.enable_padding()
    again = TextTokenizer(foreign.to_str())
    texts = ["the cat sat on the mat; the dog", "a"]
    assert again.encode_documents(texts) == tokenizer.encode_documents(texts)
    assert again.encode(texts[0]) == tokenizer.encode(texts[0])


def test_fewer_merges_than_asked() -> None:
    with pytest.warns(UserWarning, match="stay unused"):
        tokenizer = TextTokenizer.train(["abab"], 400)
    assert 257 <= tokenizer.vocab_size < 400


def test_no_room() -> None:
    with pytest.raises(UserError, match="at least 257"):
        TextTokenizer.train(TEXT, 256)


def test_bad_definitions(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        TextTokenizer.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"bad\.json: not a tokenizer definition"):
        TextTokenizer.load(tmp_path / "bad.json")
    (tmp_path / "plain.json").write_text(Tokenizer(models.BPE()).to_str())
    with pytest.raises(UserError, match="no token"):
        TextTokenizer.load(tmp_path / "plain.json")


def test_unknown_bytes_are_not_guessed() -> None:
    plain = Tokenizer(models.BPE())
    plain.add_special_tokens(["<|endoftext|>"])
    assert TextTokenizer(plain.to_str()).bytes_per_token() is None
