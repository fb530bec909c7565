"""Text of any size: read, encoded and learnt in pieces, with the ids, splits and lines of the whole."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from andrea_pl import UserError
from andrea_pl.data import TextTokenizer
from andrea_pl.data.store import cutting, encoding, tokenizer
from andrea_pl.data.store.preparation import open_prepared, prepare
from tests.support.texts import for_training

pytestmark = pytest.mark.filterwarnings("ignore:the text gave")  # small texts give few merges, on purpose

LETTERS = [
    "a",
    "b",
    "s",
    "ll",
    "'",
    "'s",
    "1",
    "23",
    ".",
    "/",
    "é",
    "e\u0301",
    "中",
    "文",
    "。",
    "☃",
    "\u00a0",
    "\u3000",
]
TEXTS = st.lists(st.sampled_from([*LETTERS, " ", " ", "  ", "\n", "\n\n", "\t", "\r", "\x1c", "\x00"])).map(
    "".join
)
LINE_KEEPING = sorted(cutting._LINE_KEEPING)


def pre_tokenizer(expression: str, prefix: bool = False) -> Any:
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated"), as_bytes])


def byte_level(words: Any, texts: list[str], **parts: Any) -> TextTokenizer:
    """Learn a byte-level BPE over other words."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = words
    built.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(built, name, part)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    built.train_from_iterator(texts, trainer)
    return TextTokenizer(built.to_str())


SAMPLE = ["ab's 'll ..  \n\n 1123 中文。\n\nab 中文 é. \n/ab ..\n  a a  b\t\n" * 20, "aabb   ..\n\n\n" * 20]


def word_piece() -> TextTokenizer:
    built = Tokenizer(
        models.WordPiece(
            {"[UNK]": 0, "<|endoftext|>": 1, "a": 2, "##a": 3, "##b": 4, "b": 5}, unk_token="[UNK]"
        )
    )
    built.normalizer = normalizers.BertNormalizer()
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece()
    built.add_special_tokens(["<|endoftext|>"])
    return TextTokenizer(built.to_str())


def metaspace(scheme: str) -> TextTokenizer:
    vocabulary = {
        token: at
        for at, token in enumerate(["<unk>", "<|endoftext|>", "▁", "a", "b", "▁a", "ab", "▁ab", "\n"])
    }
    built = Tokenizer(
        models.BPE(vocabulary, [("▁", "a"), ("a", "b"), ("▁a", "b")], unk_token="<unk>", fuse_unk=True)
    )
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    built.decoder = decoders.Metaspace(prepend_scheme=scheme)
    built.add_special_tokens(["<|endoftext|>"])
    return TextTokenizer(built.to_str())


def with_added(*tokens: str, **options: Any) -> TextTokenizer:
    from tokenizers import AddedToken

    built = Tokenizer.from_str(TextTokenizer.train(SAMPLE, 400).definition)
    built.add_tokens([AddedToken(token, **options) for token in tokens])
    return TextTokenizer(built.to_str())


def build() -> dict[str, TextTokenizer]:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return {
        "ours": TextTokenizer.train(SAMPLE, 400),
        "GPT-2, as learnt before": byte_level(gpt2, SAMPLE),
        "prefix space": byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True), SAMPLE),
        "NFC": byte_level(gpt2, SAMPLE, normalizer=normalizers.NFC()),
        "ours, NFC": byte_level(pre_tokenizer(cutting.BOUNDED), SAMPLE, normalizer=normalizers.NFC()),
        "ours, prefix space": byte_level(pre_tokenizer(cutting.BOUNDED, True), SAMPLE),
        "GPT-4": byte_level(pre_tokenizer(LINE_KEEPING[0]), SAMPLE),
        "Qwen": byte_level(pre_tokenizer(LINE_KEEPING[1]), SAMPLE),
        "BERT": word_piece(),
        "Metaspace": metaspace("always"),
        "Metaspace, first": metaspace("first"),
        "added": with_added("b a", "  ", "中文", "s\n"),
        "added that strip": with_added("ab", ".", lstrip=True, rstrip=True),
        "added words": with_added("a", "中", single_word=True),
    }


@pytest.fixture(scope="module")
def kinds() -> dict[str, TextTokenizer]:
    return build()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PIECE_CHARACTERS", 3)


@example(text="ab a", size=1)
@given(text=TEXTS, size=st.integers(1, 9))
@settings(max_examples=150)
def test_pieces_have_the_ids_of_the_whole(
    kinds: dict[str, TextTokenizer], small_pieces: None, text: str, size: int
) -> None:
    """For every kind that is cut, wherever the text was cut when it was read."""
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    for name, each in kinds.items():
        pieces = list(each.cutter.pieces(parts))
        assert "".join(pieces) == text
        ids = [index for found in each.encode_pieces(pieces) for index in found.tolist()]
        assert ids == each.encode(text), name


def test_every_kind_is_cut(kinds: dict[str, TextTokenizer], small_pieces: None) -> None:
    """The property above would hold as well if nothing were cut."""
    text = "ab ab\nab ba ab\nba " * 5
    counts = {name: len(list(each.cutter.pieces([text]))) for name, each in kinds.items()}
    assert min(counts.values()) >= 10, counts


def test_kinds_that_cannot_be_cut(small_pieces: None) -> None:
    """Lower case, a prepended mark, an unknown expression: encoded as a whole."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    for each in (
        byte_level(gpt2, SAMPLE, normalizer=prepend),
        byte_level(pre_tokenizer(r"\s*\S+"), SAMPLE),
        byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), SAMPLE),
    ):
        assert not each.cutter.is_able
        assert list(each.cutter.pieces(["ab ab ", "ab ab"])) == ["ab ab ab ab"]


RUNS = st.lists(
    st.tuples(
        st.sampled_from(["a", "é", "中", "1", "=", " ", "\n", "\u3000", "\x1c", "ab"]),
        st.sampled_from([1, 2, 1023, 1024, 1025, 3000]),
    ),
    max_size=6,
).map(lambda runs: "".join(letters * (count // len(letters) + 1) for letters, count in runs))


@given(text=RUNS, name=st.sampled_from(["ours", "ours, NFC", "ours, prefix space", "added words"]))
@settings(max_examples=60)
def test_pieces_of_long_runs_have_the_ids_of_the_whole(
    kinds: dict[str, TextTokenizer], name: str, text: str
) -> None:
    each = kinds[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "PIECE_CHARACTERS", 700)
        pieces = list(each.cutter.pieces([text]))
    assert "".join(pieces) == text
    assert [index for found in each.encode_pieces(pieces) for index in found.tolist()] == each.encode(text)
    assert name != "ours" or max(map(len, pieces), default=0) <= 4 * 1026


def without_rule(each: TextTokenizer) -> Tokenizer:
    """Return the same merges over GPT-2's words, as tokenizers were learnt before."""
    definition = json.loads(each.definition)
    definition["pre_tokenizer"] = json.loads(
        byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), SAMPLE).definition
    )["pre_tokenizer"]
    return Tokenizer.from_str(json.dumps(definition))


@pytest.mark.system
@given(text=st.one_of(TEXTS, st.text(), RUNS))
@settings(max_examples=150)
def test_the_rule_changes_nothing_where_no_run_is_longer(kinds: dict[str, TextTokenizer], text: str) -> None:
    runs = list(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text))
    before = without_rule(kinds["ours"]).encode(text, add_special_tokens=False).ids
    if all(end - start <= 1024 for _, (start, end) in runs):
        assert kinds["ours"].encode(text) == before
    assert kinds["ours"].decode(kinds["ours"].encode(text)) == text


def test_the_same_merges_as_before(kinds: dict[str, TextTokenizer]) -> None:
    """Where the text fits, and has no long run, vocabulary and merges are those of `tokenizers` alone."""
    before = json.loads(kinds["GPT-2, as learnt before"].definition)
    assert json.loads(kinds["ours"].definition)["model"] == before["model"]


@pytest.mark.system
@pytest.mark.parametrize("run", ["a", "ab中", "=", " "])
def test_a_megabyte_without_a_space(tmp_path: Path, run: str) -> None:
    """tokenizers#1313: learnt and encoded in time, and the file alone gives transformers the same ids."""
    text = run * (1_000_000 // len(run))
    each = TextTokenizer.train([text], 300)
    pieces = list(each.cutter.pieces([text]))
    assert max(map(len, pieces)) < 3 * cutting.PIECE_CHARACTERS
    ids = np.concatenate(each.encode_pieces(pieces)).tolist()
    (tmp_path / "tokenizer.json").write_text(each.definition, encoding="utf-8")
    assert (
        Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
        == ids
    )


@pytest.mark.system
def test_random_letters_are_learnt_in_time() -> None:
    """tokenizers#1313: without the rule this takes minutes, each merge walking through the whole word."""
    draw = np.random.default_rng(0)
    text = bytes(draw.integers(97, 123, 300_000, dtype=np.uint8)).decode()
    words = json.loads(TextTokenizer.train([text], 1000).definition)["pre_tokenizer"]
    assert words["pretokenizers"][0]["pattern"]["Regex"] == cutting.BOUNDED
    assert (
        max(end - start for _, (start, end) in tokenizer._untrained().pre_tokenizer.pre_tokenize_str(text))
        == 1024
    )


# reading


# preparing


TEXT = "".join(f"Line {n} says that {n} times {n} is {n * n}, doesn't it?\r\n" for n in range(800))


def test_what_cannot_be_cut_is_refused_over_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower = byte_level(
        pre_tokenizers.ByteLevel(add_prefix_space=False), SAMPLE, normalizer=normalizers.Lowercase()
    )
    (tmp_path / "tokenizer.json").write_text(lower.definition)
    (tmp_path / "a.txt").write_text("ab ba 11 " * 30)
    own = for_training(tmp_path / "a.txt", tmp_path / "cache", tokenizer=str(tmp_path / "tokenizer.json"))
    for name, value in (("CHUNK_BYTES", 100), ("LARGE_UNCUT", 200)):
        monkeypatch.setattr(encoding, name, value)
    monkeypatch.setattr(cutting, "PIECE_CHARACTERS", 100)
    with pytest.warns(UserWarning, match=r"MiB of text are encoded in one piece"):
        prepare(own)
    tokens = open_prepared(own).stores["s"].tokens.tolist()
    assert tokens == [lower.end_id, *lower.encode("ab ba 11 " * 30), lower.end_id]
    monkeypatch.setattr(encoding, "LARGEST_UNCUT", 250)
    again = for_training(tmp_path / "a.txt", tmp_path / "again", tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"a\.txt:1: more than .* document_separator"):
        prepare(again)


# learning from a sample


def test_prepared_text_of_earlier_versions_stays_valid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tokenizer in the cache without the rule is used as it stands, and so is the store that it wrote."""
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    before = for_training(path, tmp_path / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "BOUNDED", cutting.GPT2)
        prepare(before)
    caplog.clear()
    old = open_prepared(before).tokenizer
    assert (
        cutting.BOUNDED
        not in json.loads(old.definition)["pre_tokenizer"]["pretokenizers"][0]["pattern"].values()
    )
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        prepare(before)
    assert caplog.text == ""
    assert open_prepared(before).tokenizer.fingerprint == old.fingerprint
