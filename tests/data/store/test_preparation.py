"""Preparing: what is written, what is noticed, what is said, and what a full disk leaves behind."""

import json
import logging
import os
from pathlib import Path

import pytest

from andrea_pl import TextDataModule, TextSource, UserError
from andrea_pl.data.store.preparation import open_prepared, prepare
from tests.support.texts import TEXTS, decoded, preparation, write

pytestmark = pytest.mark.filterwarnings("ignore:the text gave")  # small texts give few merges, on purpose


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


def test_refused_mixtures(tmp_path: Path) -> None:
    path = write(tmp_path)
    twice = [TextSource(name="s", paths=[str(path)])] * 2
    with pytest.raises(UserError, match="the same name"):
        prepare(preparation(None, tmp_path, sources=twice))
    with pytest.raises(UserError, match="no sources"):
        prepare(preparation(None, tmp_path, sources=[]))
    mixed = [TextSource(name="s", paths=[str(path)]), TextSource(name="t", kind="tokens", documents=[[1, 2]])]
    with pytest.raises(UserError, match=r"set `tokenizer`"):
        prepare(preparation(None, tmp_path, sources=mixed))
