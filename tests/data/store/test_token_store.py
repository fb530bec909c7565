"""A store of tokens: what it keeps, and a damaged or planted one."""

import errno
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from andrea_pl import UserError
from andrea_pl.data.store.preparation import open_prepared, prepare
from andrea_pl.data.store.token_store import TokenStore, writing_store
from tests.support.texts import TEXTS, decoded, preparation, write

pytestmark = pytest.mark.filterwarnings("ignore:the text gave")


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
    monkeypatch.setattr(
        "andrea_pl.data.store.preparation._Pass.tokenizer", lambda _: open_prepared(todo).tokenizer
    )
    with pytest.raises(UserError, match=r"/s: the disk is full; free some space or point `cache_dir`"):
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
