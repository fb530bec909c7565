"""Preparing: what is written, what is noticed, what is said, and what a full disk leaves behind."""

import errno
import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from andrea_pl import TextDataModule, TextSource, UserError
from andrea_pl.data.prepare import Preparation, open_prepared, prepare
from andrea_pl.data.store import TokenStore, writing_store

TEXTS = [f"document number {n} says that {n} times {n} is {n * n}. " * 5 for n in range(60)]


pytestmark = pytest.mark.filterwarnings("ignore:the text gave")  # small texts give few merges, on purpose


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


def decoded(todo: Preparation, split: str) -> list[str]:
    prepared = open_prepared(todo)
    return [prepared.tokenizer.decode(tokens) for tokens in prepared.stores["s"].split(split)]


def test_round_trip_through_the_store(tmp_path: Path) -> None:
    todo = preparation(write(tmp_path), tmp_path / "cache")
    prepare(todo)
    store = open_prepared(todo).stores["s"]
    assert store.tokens.dtype == np.uint16
    assert isinstance(store.tokens, np.memmap)
    parts = {split: decoded(todo, split) for split in ("train", "val", "test")}
    assert sorted(text for part in parts.values() for text in part) == sorted(TEXTS)
    assert all(parts.values())
    for split, texts in parts.items():
        sizes = store.records["bytes"][store.split(split).documents]
        assert sizes.tolist() == [len(text.encode()) for text in texts]
    assert store.describe(7) == f"{tmp_path}/text.jsonl:8"
    assert all(tokens[0] == tokens[-1] == 0 for tokens in store.split("train"))


def test_four_bytes_for_large_vocabularies(tmp_path: Path) -> None:
    with writing_store(tmp_path / "s", 70_000) as writer:
        writer.add([69_999, 1], size=2, split="train", origin="o", line=1)
        writer.close({})
    assert TokenStore(tmp_path / "s").split("train")[0].tolist() == [69_999, 1]


def test_the_split_never_moves(tmp_path: Path) -> None:
    """More, fewer and reordered documents leave each on its side; a repeated text never lies on both."""
    sides: dict[str, set[str]] = {}
    for number, texts in enumerate([TEXTS, TEXTS[::-1] + TEXTS[:10], TEXTS[20:]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        todo = preparation(write(folder, texts), tmp_path / "cache")
        prepare(todo)
        for split in ("train", "val", "test"):
            for text in decoded(todo, split):
                sides.setdefault(text, set()).add(split)
    assert all(len(side) == 1 for side in sides.values())


def test_repeats_are_counted_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    todo = preparation(write(tmp_path, TEXTS + TEXTS[:7]), tmp_path / "cache")
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        prepare(todo)
    assert "7 documents repeat an earlier one and were kept" in caplog.text
    assert open_prepared(todo).stores["s"].manifest["repeated"] == 7


def test_second_time_nothing_is_done(tmp_path: Path) -> None:
    todo = preparation(write(tmp_path), tmp_path / "cache")
    prepare(todo)
    before = {path: path.stat().st_mtime_ns for path in sorted(todo.folder.rglob("*"))}
    prepare(todo)
    assert {path: path.stat().st_mtime_ns for path in sorted(todo.folder.rglob("*"))} == before


def test_changed_input_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path)
    todo = preparation(path, tmp_path / "cache")
    prepare(todo)
    tokenizer = open_prepared(todo).tokenizer.fingerprint
    os.utime(write(tmp_path, TEXTS[:40] + ["zzz zzz zzz " * 30] * 3), ns=(1, 1))
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        prepare(todo)
    assert "its input changed" in caplog.text
    assert len(open_prepared(todo).stores["s"].records) == 43
    assert open_prepared(todo).tokenizer.fingerprint != tokenizer


def test_changed_tokenizer_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path)
    first = preparation(path, tmp_path / "cache")
    prepare(first)
    own = tmp_path / "own.json"
    own.write_text((first.folder / "tokenizer.json").read_text())
    todo = preparation(path, tmp_path / "cache", tokenizer=str(own))
    prepare(todo)
    changed = json.loads(own.read_text())
    changed["model"]["merges"] = changed["model"]["merges"][:-1]
    own.write_text(json.dumps(changed))
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        prepare(todo)
    assert "the tokenizer changed" in caplog.text


def test_other_settings_have_a_folder_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path)
    folders = {preparation(path, tmp_path, vocab_size=size).folder for size in (300, 301)}
    folders.add(preparation(path, tmp_path, val_fraction=0.1).folder)
    assert len(folders) == 3


def test_skipping_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text() + "not json\n")
    with pytest.raises(UserError, match=r"text\.jsonl:61: broken JSON"):
        prepare(preparation(path, tmp_path / "cache"))
    todo = preparation(path, tmp_path / "cache", on_error="skip")
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        prepare(todo)
    assert "left out 1 that could not be read" in caplog.text
    assert "text.jsonl:61" in open_prepared(todo).stores["s"].manifest["left_out"][0]


def test_nothing_readable(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match=r"no document that could be read; 1 were left out"):
        prepare(preparation(tmp_path / "a.txt", tmp_path / "cache", on_error="skip"))


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the path and the remedy, what was there stays, nothing half-written does."""
    path = write(tmp_path)
    todo = preparation(path, tmp_path / "cache")
    prepare(todo)
    before = (todo.folder / "s" / "tokens.bin").read_bytes()
    write(tmp_path, TEXTS[:50])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (todo.folder / "tokenizer.inputs").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json: the disk is full; free some space"):
        prepare(todo)
    monkeypatch.setattr("andrea_pl.data.prepare._Pass.tokenizer", lambda _: open_prepared(todo).tokenizer)
    with pytest.raises(UserError, match=r"/s: the disk is full; free some space or point data\.cache_dir"):
        prepare(todo)
    assert (todo.folder / "s" / "tokens.bin").read_bytes() == before
    assert not list(todo.folder.glob(".s.*"))


def test_interrupted_writing_leaves_no_store(tmp_path: Path) -> None:
    def write_half() -> None:
        with writing_store(tmp_path / "s", 300) as writer:
            writer.add([1], size=1, split="train", origin="o", line=1)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert not list(tmp_path.glob("*s*"))
    with pytest.raises(UserError, match="no complete token store"):
        TokenStore(tmp_path / "s")


def test_truncated_store(tmp_path: Path) -> None:
    todo = preparation(write(tmp_path), tmp_path / "cache")
    prepare(todo)
    with (todo.folder / "s" / "tokens.bin").open("r+b") as file:
        file.truncate(10)
    with pytest.raises(UserError, match="10 bytes where its manifest says"):
        open_prepared(todo)


@pytest.mark.parametrize("damage", ["documents.npy", "manifest.json", "tokens.bin"])
def test_a_damaged_store_is_written_again(tmp_path: Path, damage: str) -> None:
    todo = preparation(write(tmp_path), tmp_path / "cache")
    prepare(todo)
    whole = decoded(todo, "train")
    (todo.folder / "s" / damage).write_bytes(b"[]")
    prepare(todo)
    assert decoded(todo, "train") == whole


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy"])
def test_a_changed_byte_is_found_before_mapping(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Of the same size and shape; the store is named and written again."""
    todo = preparation(write(tmp_path), tmp_path / "cache")
    prepare(todo)
    file = todo.folder / "s" / name
    whole = file.read_bytes()
    file.write_bytes(whole[:-8] + bytes(each ^ 1 for each in whole[-8:]))
    with pytest.raises(UserError, match=rf"{name} is not what its manifest says"):
        TokenStore.verify(todo.folder / "s")
    with caplog.at_level("INFO", "lightning.pytorch"):
        prepare(todo)
    assert f"{file.resolve()} is not what its manifest says" in caplog.text
    assert file.read_bytes() == whole


class Evil:
    """Pickled, it is a call that makes a file."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("witness"),)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "manifest.json"])
def test_a_pickle_in_a_store_is_not_run(tmp_path: Path, name: str) -> None:
    todo = preparation(write(tmp_path), tmp_path / "cache")
    prepare(todo)
    with (todo.folder / "s" / name).open("wb") as file:
        if name == "documents.npy":
            np.save(file, np.array([Evil()], dtype=object), allow_pickle=True)
        else:
            file.write(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=f"{todo.folder}/s"):
        TokenStore(todo.folder / "s")
    prepare(todo)
    assert not Path("witness").exists()


@pytest.mark.parametrize(
    ("key", "value"), [("dtype", "O"), ("dtype", "<f8"), ("tokens", "9"), ("sha256", {}), ("origins", None)]
)
def test_a_manifest_that_says_something_else(tmp_path: Path, key: str, value: Any) -> None:
    todo = preparation(write(tmp_path), tmp_path / "cache")
    prepare(todo)
    path = todo.folder / "s" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    def open_it() -> None:
        TokenStore.verify(todo.folder / "s")
        TokenStore(todo.folder / "s")

    with pytest.raises(UserError, match=f"{todo.folder}/s"):
        open_it()


def test_a_table_that_points_elsewhere(tmp_path: Path) -> None:
    todo = preparation(write(tmp_path), tmp_path / "cache")
    prepare(todo)
    path = todo.folder / "s" / "documents.npy"
    records = np.load(path)
    records["tokens"][3] = 10**9
    np.save(path, records)
    with pytest.raises(UserError, match=r"documents\.npy is no table of documents in "):
        TokenStore(todo.folder / "s")


def test_relative_paths_of_two_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same words in two folders are two settings."""
    folders = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
        monkeypatch.chdir(tmp_path / name)
        folders.add(preparation("text.jsonl", tmp_path / "cache").folder)
    assert len(folders) == 2


def test_repeats_over_sources_and_splits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Repeats of a source that is prepared already count, and one on both sides is warned about."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    sources = [
        TextSource(name="a", paths=[str(write(tmp_path / "a"))], split="train"),
        TextSource(name="b", paths=[str(write(tmp_path / "b", TEXTS[:3]))], split="val"),
    ]
    tokenizer = tmp_path / "t.json"
    prepare(preparation(None, tmp_path / "cache", sources=sources[:1]))
    tokenizer.write_text(
        (preparation(None, tmp_path / "cache", sources=sources[:1]).folder / "tokenizer.json").read_text()
    )
    todo = preparation(None, tmp_path / "cache", sources=sources, tokenizer=str(tokenizer))
    for _ in range(2):
        with pytest.warns(UserWarning, match="'b': 3 documents lie in another split too"):
            prepare(todo)
        os.utime(write(tmp_path / "b", TEXTS[2::-1]), ns=(5, 5))
        assert open_prepared(todo).stores["b"].manifest["repeated"] == 3


def test_ids_are_dealt_by_their_content() -> None:
    documents = [[n % 50, n // 50, 1] for n in range(1000)]
    source = TextSource(name="t", kind="tokens", documents=documents)
    data = TextDataModule([source], vocab_size=50, val_fraction=0.2)
    data.prepare_data()
    data.setup()
    held = sum(int((batch["document_id"] >= 0).sum()) for batch in data.val_dataloader())
    trained = sum(len(mb["document_id"]) for window in data.train_dataloader() for mb in window)
    assert held + trained == 1000
    assert 150 < held < 250


def test_the_first_held_out_batches_are_a_fair_sample(tmp_path: Path) -> None:
    data = TextDataModule(
        [TextSource(name="t", kind="tokens", documents=[[1] * n for n in range(2, 200)])],
        vocab_size=5,
        micro_batch_tokens=256,
        val_fraction=0.5,
    )
    data.prepare_data()
    data.setup()
    widths = [batch["input_ids"].shape[1] for batch in data.val_dataloader()]
    assert widths != sorted(widths, reverse=True)


def test_token_files(tmp_path: Path) -> None:
    """nanoGPT's raw uint16, with and without a known end of document; no tokenizer is guessed."""
    tokens = np.random.default_rng(0).integers(1, 50, 20_000).astype("<u2")
    tokens[::100] = 0
    (tmp_path / "train.bin").write_bytes(tokens.tobytes())
    plain = preparation(tmp_path / "train.bin", tmp_path / "cache", vocab_size=50)
    prepare(plain)
    prepared = open_prepared(plain)
    assert prepared.tokenizer is None
    assert prepared.stores["s"].records["tokens"].tolist() == [8192, 8192, 3616]
    assert np.array_equal(prepared.stores["s"].tokens, tokens)
    sources = [TextSource(name="s", paths=[str(tmp_path / "train.bin")], end_of_document=0)]
    ended = preparation(None, tmp_path / "cache", vocab_size=50, sources=sources)
    prepare(ended)
    assert open_prepared(ended).stores["s"].records["tokens"].tolist() == [1, *[100] * 199, 99]


def test_bad_token_files(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(b"abc")
    with pytest.raises(UserError, match="3 bytes are no list of uint16"):
        prepare(preparation(path, tmp_path / "cache"))
    path.write_bytes(np.array([1, 500], "<u2").tobytes())
    with pytest.raises(UserError, match="token id 500 does not fit vocab_size=300"):
        prepare(preparation(path, tmp_path / "cache"))


def test_refused_mixtures(tmp_path: Path) -> None:
    path = write(tmp_path)
    twice = [TextSource(name="s", paths=[str(path)])] * 2
    with pytest.raises(UserError, match="the same name"):
        prepare(preparation(None, tmp_path, sources=twice))
    with pytest.raises(UserError, match="no sources"):
        prepare(preparation(None, tmp_path, sources=[]))
    mixed = [TextSource(name="s", paths=[str(path)]), TextSource(name="t", kind="tokens", documents=[[1, 2]])]
    with pytest.raises(UserError, match=r"set data\.tokenizer"):
        prepare(preparation(None, tmp_path, sources=mixed))


def module_of(path: Path, **options: Any) -> TextDataModule:
    defaults: dict[str, Any] = {
        "vocab_size": 300,
        "block_size": 16,
        "sequences_per_update": 8,
        "val_fraction": 0.2,
    }
    data = TextDataModule([TextSource(name="s", paths=[str(path)])], **(defaults | options))
    data.prepare_data()
    data.setup()
    return data


def test_module_serves_every_training_label_once(tmp_path: Path) -> None:
    data = module_of(write(tmp_path))
    windows = list(data.train_dataloader())
    labels = sum(mb["num_tokens"] for window in windows for mb in window)
    lengths = data._opened().stores["s"].split("train").lengths
    assert labels == int((lengths - 1).sum())
    batch = windows[0][0]
    place = data.describe(int(batch["document_id"][0]))
    number = int(place.rsplit(":", 1)[1]) - 1
    text = data.tokenizer.decode(batch["input_ids"][0][batch["valid_mask"][0]].tolist())
    assert text.strip() in TEXTS[number]


def test_module_needs_something_held_out(tmp_path: Path) -> None:
    data = module_of(write(tmp_path, TEXTS[:2]), val_fraction=0.0)
    assert data.val_dataloader() == []
    (tmp_path / "one").mkdir()
    one = module_of(write(tmp_path / "one", ["a single document " * 9]), val_fraction=1e-9)
    with pytest.raises(
        UserError, match=r"no document is held out for val: .* of 1 documents.*document_separator"
    ):
        one.val_dataloader()


@given(document_id=st.integers(-3, 3))
def test_module_describe_unknown(document_id: int) -> None:
    data = TextDataModule(
        [TextSource(name="t", kind="tokens", documents=[[1, 2], [3, 4]])], vocab_size=5, val_fraction=0
    )
    data.prepare_data()
    data.setup()
    if document_id in (0, 1):
        assert data.describe(document_id) == f"t #{document_id}"
    else:
        with pytest.raises(UserError, match="there is no document"):
            data.describe(document_id)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "data.vocab_size"),
        ({"micro_batch_tokens": 0}, "data.micro_batch_tokens"),
        ({"micro_batch_sequences": 0}, "data.micro_batch_sequences"),
        ({"num_workers": -1}, "data.num_workers"),
        ({"val_fraction": 1.0}, "data.val_fraction"),
        ({"test_fraction": -0.1}, "data.test_fraction"),
    ],
)
def test_module_refuses(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TextDataModule([], **options)


def test_module_refuses_foreign_ids() -> None:
    data = TextDataModule(
        [TextSource(name="t", kind="tokens", documents=[[1, 9]])], vocab_size=5, val_fraction=0
    )
    data.prepare_data()
    with pytest.raises(UserError, match="token id 9 is outside 0 … 4"):
        data.setup()
