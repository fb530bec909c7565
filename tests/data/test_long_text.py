"""Text of any size: read, encoded and learnt in pieces, with the ids, splits and lines of the whole."""

import json
import logging
from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from andrea_pl import TextDataModule, TextSource, UserError
from andrea_pl.data import TextTokenizer, cutting, encoding, plain_text, tokenizer
from andrea_pl.data.documents import Problems
from andrea_pl.data.prepare import Preparation, open_prepared, prepare
from andrea_pl.data.records import digest
from andrea_pl.data.sample import TextSample
from andrea_pl.data.store import TokenStore, writing_store

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


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is long, and read a few bytes at a time."""
    monkeypatch.setattr(plain_text, "HELD", 5)
    monkeypatch.setattr(plain_text, "READ_BYTES", 3)


def read(
    path: Path, separator: str | None = None, policy: Any = "raise"
) -> tuple[list[tuple[Any, ...]], Problems]:
    problems = Problems(policy)
    source = TextSource(name="s", paths=[str(path)], document_separator=separator)
    found = []
    for document in source.read(problems):
        mark, size = document.digest, document.size
        text = "".join(document.parts())
        assert size == len(text.encode())
        found.append((text, document.line, mark))
    return found, problems


def plainly(raw: bytes, separator: str | None) -> list[tuple[str, int, int]]:
    """Read a file the plain way: all at once."""
    text = raw.replace(b"\r\n", b"\n").decode().removeprefix("\ufeff")
    found, line = [], 1
    for piece in text.split(separator) if separator else [text]:
        if piece.strip():
            mark = int.from_bytes(blake2b(piece.encode(), digest_size=8).digest(), "big")
            found.append((piece, line, mark))
        line += piece.count("\n") + (separator or "").count("\n")
    return found


FILE = st.lists(
    st.sampled_from(["a", "é", "中", "😀", "\x00", "\ufeff", "\r", "\r\n", "\n", "-", "--", "---", " "]),
    min_size=1,
)


@given(text=FILE.map("".join), separator=st.sampled_from([None, "---", "\n\n", "-", "a-a"]))
@settings(max_examples=200)
def test_files_read_in_pieces(small_reads: None, tmp_path: Path, text: str, separator: str | None) -> None:
    """Line ends, marks, characters and separators across the borders of what is read at once."""
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    if not text.replace("\r\n", "\n").removeprefix("\ufeff").strip():
        with pytest.raises(UserError, match=r"a\.txt: empty file"):
            read(path, separator)
        return
    assert read(path, separator)[0] == plainly(text.encode(), separator)


@given(
    before=FILE.map("".join).filter(lambda text: "\0" not in text),  # that is called binary
    bad=st.sampled_from([b"\xff", b"\xe4\xb8", b"\xf0\x9f\x98", b"\xc3("]),
    after=st.sampled_from([b"", b"abcdefg\n"]),
)
@settings(max_examples=100)
def test_bytes_that_are_not_utf8_in_pieces(
    small_reads: None, tmp_path: Path, before: str, bad: bytes, after: bytes
) -> None:
    """No document of such a file is used, and the line is that of the first bad byte."""
    path = tmp_path / "a.txt"
    path.write_bytes(before.encode() + bad + after)
    line = 1 + before.replace("\r\n", "\n").count("\n")
    found, problems = read(path, "-", "skip")
    assert found == []
    assert problems.messages == [f"{path}:{line}: not UTF-8 (byte 0x{bad[0]:02x})"]


def test_a_file_that_changes_while_it_is_read(small_reads: None, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a long document, and more " * 10_000)
    documents = TextSource(name="s", paths=[str(path)]).read(Problems("raise"))
    document = next(documents)
    path.write_text("short")
    with pytest.raises(UserError, match=r"a\.txt changed while it was read"):
        list(chain(document.parts(), documents))


# preparing


def todo(path: Path, cache: Path, **options: Any) -> Preparation:
    defaults: dict[str, Any] = {
        "sources": [TextSource(name="s", paths=[str(path)], split="train")],
        "vocab_size": 300,
        "tokenizer": None,
        "val_fraction": 0.0,
        "test_fraction": 0.0,
        "on_error": "raise",
        "cache_dir": cache,
    }
    return Preparation(**(defaults | options))


TEXT = "".join(f"Line {n} says that {n} times {n} is {n * n}, doesn't it?\r\n" for n in range(800))


def test_one_file_in_pieces_gives_the_store_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, bytes, split, digest and tokenizer; words and lines are found again without decoding all."""
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode())
    whole = todo(path, tmp_path / "whole")
    prepare(whole)
    for module, name, value in (
        (plain_text, "HELD", 1000),
        (plain_text, "READ_BYTES", 300),
        (cutting, "PIECE_CHARACTERS", 100),
        (encoding, "CHUNK_BYTES", 500),
        (tokenizer, "DECODED_TOKENS", 50),
    ):
        monkeypatch.setattr(module, name, value)
    pieces = todo(path, tmp_path / "pieces")
    prepare(pieces)
    stores = [open_prepared(each).stores["s"] for each in (whole, pieces)]
    assert stores[0].manifest["sha256"] == stores[1].manifest["sha256"]
    assert stores[1].records["digest"].tolist() == [digest(TEXT.replace("\r\n", "\n").encode())]
    assert open_prepared(pieces).tokenizer.fingerprint == open_prepared(whole).tokenizer.fingerprint
    data = TextDataModule(whole.sources, vocab_size=300, val_fraction=0.0, cache_dir=str(tmp_path / "pieces"))
    data.prepare_data()
    data.setup()
    words = data.known_words()
    assert {"line", "says", "times"} <= {each.lower() for each in words}
    tokens = stores[1].tokens.tolist()
    offset = len(tokens) // 2
    line = 1 + data.tokenizer.decode(tokens[:offset]).count("\n")
    assert data.locate(0, offset) == f"s {path}:{line}"


def test_a_writer_takes_documents_in_pieces(tmp_path: Path) -> None:
    with writing_store(tmp_path / "s", 300) as writer:
        writer.write(np.array([1, 2], dtype=np.uint32))
        writer.write([3])
        writer.add([4], size=9, split="train", origin="o", line=1)
        writer.add([5], size=1, split="train", origin="o", line=2)
        writer.close({})
    assert [row.tolist() for row in TokenStore(tmp_path / "s").split("train")] == [[1, 2, 3, 4], [5]]


def test_what_cannot_be_cut_is_refused_over_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower = byte_level(
        pre_tokenizers.ByteLevel(add_prefix_space=False), SAMPLE, normalizer=normalizers.Lowercase()
    )
    (tmp_path / "tokenizer.json").write_text(lower.definition)
    (tmp_path / "a.txt").write_text("ab ba 11 " * 30)
    own = todo(tmp_path / "a.txt", tmp_path / "cache", tokenizer=str(tmp_path / "tokenizer.json"))
    for name, value in (("CHUNK_BYTES", 100), ("LARGE_UNCUT", 200)):
        monkeypatch.setattr(encoding, name, value)
    monkeypatch.setattr(cutting, "PIECE_CHARACTERS", 100)
    with pytest.warns(UserWarning, match=r"MiB of text are encoded in one piece"):
        prepare(own)
    tokens = open_prepared(own).stores["s"].tokens.tolist()
    assert tokens == [lower.end_id, *lower.encode("ab ba 11 " * 30), lower.end_id]
    monkeypatch.setattr(encoding, "LARGEST_UNCUT", 250)
    again = todo(tmp_path / "a.txt", tmp_path / "again", tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"a\.txt:1: more than .* document_separator"):
        prepare(again)


# learning from a sample


def pieces_of(count: int) -> Iterator[str]:
    return (f"piece {number} " * (1 + number % 7) for number in range(count))


def test_a_sample_depends_on_content_alone() -> None:
    """At most as many bytes as asked, whatever the order; all of them where they fit."""
    texts = list(pieces_of(300))
    samples = []
    for order in (texts, texts[::-1], sorted(texts)):
        sample = TextSample(2000)
        for text in order:
            sample.add(text)
        assert sample.seen_bytes == sum(map(len, texts))
        samples.append(sorted(sample.texts()))
        assert sum(map(len, samples[-1])) == sample.kept_bytes <= 2000
        assert sample.kept_bytes > 1900
    assert samples[0] == samples[1] == samples[2]
    everything = TextSample(10**6)
    for text in texts:
        everything.add(text)
    assert sorted(everything.texts()) == sorted(texts)


def test_the_sample_is_said_and_an_option(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "PIECE_CHARACTERS", 500)
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    size = len(TEXT.replace("\r\n", "\n"))
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        prepare(todo(path, tmp_path / "cache"))
        assert f"learning a tokenizer of 300 ids from all {size:,} bytes of training text" in caplog.text
        prepare(todo(path, tmp_path / "cache", tokenizer_sample_bytes=5000))
    assert f" of {size:,} bytes of training text, chosen by a hash of their content" in caplog.text
    with pytest.raises(UserError, match=r"data\.tokenizer_sample_bytes must be at least 1"):
        TextDataModule([TextSource(name="s", paths=["a.txt"])], tokenizer_sample_bytes=0)


def test_prepared_text_of_earlier_versions_stays_valid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tokenizer in the cache without the rule is used as it stands, and so is the store that it wrote."""
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    before = todo(path, tmp_path / "cache")
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
