"""Prepared text is kept by its content: what a resume uses, which changes are noticed, what is pruned."""

import errno
import fcntl
import gc
import json
import os
import shutil
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_prepare import TEXTS, preparation, write

from andrea_pl import DurableCheckpoint, LanguageModule, TextDataModule, TextSource, UserError
from andrea_pl.data import prepare as preparing_module
from andrea_pl.data.prepare import open_prepared, prepare
from andrea_pl.data.pruning import prune
from andrea_pl.data.versions import all_versions, keepers
from andrea_pl.network import TransformerConfig
from toy import build_trainer

pytestmark = pytest.mark.filterwarnings("ignore:the text gave")  # small texts give few merges, on purpose

SHAPE = TransformerConfig(vocab_size=300, block_size=64, d_model=16, n_heads=2, n_layers=1)
DAYS_AGO = time.time() - 10 * 24 * 3600


def data_module(path: Path, cache: Path) -> TextDataModule:
    return TextDataModule(
        [TextSource(name="readmes", paths=[str(path)])],
        vocab_size=300,
        block_size=64,
        sequences_per_update=4,
        val_fraction=0.1,
        cache_dir=str(cache),
    )


def train(path: Path, cache: Path, steps: int, ckpt_path: str | None = None) -> tuple[Any, LanguageModule]:
    """Train from Python up to an update, and return the trainer and the module."""
    torch.manual_seed(7)
    module = LanguageModule(SHAPE, schedule="constant")
    saving = DurableCheckpoint(every=2, dirpath=str(cache.parent / "checkpoints"))
    trainer = build_trainer(callbacks=[saving], max_steps=steps, max_epochs=-1, enable_checkpointing=True)
    data = data_module(path, cache)
    if ckpt_path is not None and not path.exists():
        data.keep_text_of(torch.load(ckpt_path, weights_only=True), ckpt_path)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer, module


def said(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(caplog.messages)


class TestResume:
    """A run goes on with the text that it began with."""

    @pytest.mark.parametrize("change", ["grown", "gone", "other"])
    def test_whatever_became_of_the_files(
        self, change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The weights are those of a run whose text never changed, and one line says what did."""
        path, cache = write(tmp_path), tmp_path / "cache"
        _, straight = train(path, tmp_path / "undisturbed" / "cache", 8)
        train(path, cache, 4)
        if change == "gone":
            path.unlink()
        else:
            more = [f"another text of number {n}" for n in range(41)]
            write(tmp_path, TEXTS + more if change == "grown" else [f"{text}!" for text in TEXTS])
        if change != "gone":
            data_module(path, cache).prepare_data()  # somebody prepares the new text meanwhile
        caplog.clear()
        with caplog.at_level("INFO"):
            _, resumed = train(path, cache, 8, str(tmp_path / "checkpoints" / "update-000004.ckpt"))
        expected = {
            "grown": "readmes: 41 documents more; this run keeps the text it started with",
            "gone": "readmes: cannot be read any more (",
            "other": "readmes: 60 documents new, 60 gone; this run keeps the text it started with",
        }
        assert expected[change] in said(caplog)
        for one, two in zip(straight.parameters(), resumed.parameters(), strict=True):
            assert one.equal(two)

    def test_unchanged_text_is_not_talked_of(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = write(tmp_path)
        train(path, tmp_path / "cache", 4)
        caplog.clear()
        with caplog.at_level("INFO"):
            train(path, tmp_path / "cache", 6, str(tmp_path / "checkpoints" / "update-000004.ckpt"))
        assert "this run keeps" not in said(caplog)
        assert "preparing source" not in said(caplog)

    def test_a_store_that_is_gone(self, tmp_path: Path) -> None:
        """Made again where the text is what it was; otherwise refused before anything is restored."""
        path, cache = write(tmp_path), tmp_path / "cache"
        train(path, cache, 4)
        shutil.rmtree(cache)
        checkpoint = str(tmp_path / "checkpoints" / "update-000004.ckpt")
        train(path, cache, 6, checkpoint)
        shutil.rmtree(cache)
        write(tmp_path, [f"{text}!" for text in TEXTS])
        before = LanguageModule(SHAPE, schedule="constant")
        weights = [each.clone() for each in before.parameters()]
        trainer = build_trainer(max_steps=8, max_epochs=-1)
        with pytest.raises(UserError, match=r"the text of readmes changed.*put the text back.*--init_from"):
            trainer.fit(before, datamodule=data_module(path, cache), ckpt_path=checkpoint)
        assert all(one.equal(two) for one, two in zip(weights, before.parameters(), strict=True))

    @pytest.mark.parametrize("edit", [{"stores": {}}, {"stores": {"readmes": {"content": 1}}}, {"stores": 7}])
    def test_an_edited_record_is_none(self, edit: dict[str, Any], tmp_path: Path) -> None:
        """Then the text is compared by a checksum, as for a checkpoint of an earlier version."""
        path, cache = write(tmp_path), tmp_path / "cache"
        train(path, cache, 4)
        file = tmp_path / "checkpoints" / "update-000004.ckpt"
        checkpoint = torch.load(file, weights_only=True)
        checkpoint["TextDataModule"] |= edit
        torch.save(checkpoint, tmp_path / "edited.ckpt")
        train(path, cache, 6, str(tmp_path / "edited.ckpt"))
        write(tmp_path, TEXTS[:50])
        train(path, cache, 6, str(tmp_path / "edited.ckpt"))  # the store is still there
        shutil.rmtree(cache)
        with pytest.raises(UserError, match="the text changed since this run began"):
            train(path, cache, 6, str(tmp_path / "edited.ckpt"))

    def test_a_fresh_fit_takes_the_text_as_it_is_now(self, tmp_path: Path) -> None:
        path, cache = write(tmp_path), tmp_path / "cache"
        data = data_module(path, cache)
        data.prepare_data()
        write(tmp_path, TEXTS[:10])
        again = data_module(path, cache)
        again.prepare_data()
        again.setup()
        data.setup()
        assert len(again._opened().stores["readmes"].records) == 10
        assert len(data._opened().stores["readmes"].records) == 60


class TestChanges:
    """What is compared at a start."""

    def test_equal_size_and_time(self, tmp_path: Path) -> None:
        """`cp -p`: size and mtime are those of before, the content is not."""
        path = write(tmp_path)
        todo = preparation(path, tmp_path / "cache")
        first = prepare(todo).stores["s"].content
        before = path.stat()
        path.write_text(path.read_text().replace("says that 7 times 7", "says that 7 times 9"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        assert prepare(todo).stores["s"].content != first

    def test_a_touched_file_is_not_prepared_anew(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write(tmp_path)
        todo = preparation(path, tmp_path / "cache")
        first = prepare(todo).stores["s"].content
        os.utime(path)
        caplog.clear()
        with caplog.at_level("INFO"):
            assert prepare(todo).stores["s"].content == first
        assert "preparing source" not in said(caplog)
        assert "learning" not in said(caplog)

    def test_verify_reads_everything(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where a file system keeps no times that can be trusted."""
        path = write(tmp_path)
        todo = preparation(path, tmp_path / "cache")
        first = prepare(todo).stores["s"].content
        path.write_text(path.read_text().replace("says that 7 times 7", "says that 7 times 9"))
        monkeypatch.setattr("andrea_pl.data.inputs.SourceInput.agrees", lambda *_: True)
        assert prepare(todo).stores["s"].content == first
        assert prepare(todo, verify=True).stores["s"].content != first

    def test_a_cache_of_before_is_used(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Stores had the plain name, and a mark of the input without the tokenizer's fingerprint."""
        todo = preparation(write(tmp_path), tmp_path / "cache")
        store = prepare(todo).stores["s"]
        link = todo.folder / "s"
        assert link.is_symlink()
        link.unlink()
        store.folder.rename(link)
        manifest = json.loads((link / "manifest.json").read_text())
        manifest["inputs"] = todo.sources[0].fingerprint()
        (link / "manifest.json").write_text(json.dumps(manifest))
        (link / "inputs.json").unlink(missing_ok=True)
        mark = todo.folder / "tokenizer.inputs"
        mark.write_text(mark.read_text().split()[0])
        caplog.clear()
        with caplog.at_level("INFO"):
            assert prepare(todo).stores["s"].content == store.content
        assert "preparing source" not in said(caplog)
        assert "learning" not in said(caplog)


class TestTogether:
    """Several processes and one cache."""

    def test_twelve_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One prepares, the others wait and use it."""
        todo = preparation(write(tmp_path), tmp_path / "cache")
        written: list[int] = []
        original = preparing_module._write

        def counted(*arguments: Any) -> Any:
            written.append(1)
            return original(*arguments)

        monkeypatch.setattr(preparing_module, "_write", counted)
        contents: list[str] = []
        threads = [
            threading.Thread(target=lambda: contents.append(prepare(todo).stores["s"].content))
            for _ in range(12)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(contents) == 12
        assert len(set(contents)) == 1
        assert len(written) == 1

    def test_the_holder_is_named(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        todo = preparation(write(tmp_path), tmp_path / "cache")
        todo.folder.mkdir(parents=True)
        holder = {"process": 4711, "machine": "node7", "since": "2026-01-01 00:00:00"}
        lock = todo.folder / ".lock"
        lock.write_text(json.dumps(holder))
        with lock.open("r+") as held, caplog.at_level("INFO"):
            fcntl.flock(held, fcntl.LOCK_EX)
            waiting = threading.Thread(target=prepare, args=(todo,))
            waiting.start()
            while "waiting for" not in said(caplog) and waiting.is_alive():
                time.sleep(0.01)
            assert not (todo.folder / "s").exists()
            fcntl.flock(held, fcntl.LOCK_UN)
            waiting.join()
        assert (
            f"waiting for process 4711 on node7 (since 2026-01-01 00:00:00), which prepares {todo.folder}"
            in (said(caplog))
        )
        assert len(open_prepared(todo).stores["s"].records) == 60

    def test_without_locks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr("andrea_pl.data.locking.fcntl.flock", refuse)
        todo = preparation(write(tmp_path), tmp_path / "cache")
        assert len(prepare(todo).stores["s"].records) == 60

    def test_broken_off_at_any_moment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a killed preparation leaves is swept, and never taken for a store."""
        todo = preparation(write(tmp_path), tmp_path / "cache")
        expected = prepare(preparation(write(tmp_path), tmp_path / "whole")).stores["s"].content
        todo.folder.mkdir(parents=True)
        for name in (".s.0a1b2c3d", ".one.abcd1234"):  # what SIGKILL leaves
            (todo.folder / name).mkdir()
            (todo.folder / name / "tokens.bin").write_bytes(b"half")
        (todo.folder / ".tokenizer.json.7-0a.tmp").write_text("{")
        for step in ("fsync", "rename", "replace"):
            with monkeypatch.context() as patch:
                patch.setattr(os, step, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
                patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    prepare(todo)
            assert not (todo.folder / "s").exists()
        assert prepare(todo).stores["s"].content == expected
        assert [each.name for each in todo.folder.iterdir() if each.name.startswith(".")] == [".lock"]

    def test_a_group_shares_a_cache(self, tmp_path: Path) -> None:
        before = os.umask(0o002)
        try:
            todo = preparation(write(tmp_path), tmp_path / "cache")
            store = prepare(todo).stores["s"].folder
        finally:
            os.umask(before)
        folders = [todo.cache_dir, todo.folder, store]
        assert [stat.S_IMODE(each.stat().st_mode) for each in folders] == [0o775] * 3
        files = [*(each for each in store.iterdir() if each.is_file()), todo.folder / ".lock"]
        assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o664}


class TestPruning:
    """What keeps a store, and what goes."""

    def stores(self, tmp_path: Path) -> tuple[Any, list[Path]]:
        """Prepare three contents of a source, long ago; return the stores, the one in use first."""
        todo = preparation(tmp_path / "text.jsonl", tmp_path / "cache")
        for count in (60, 50, 40):
            write(tmp_path, TEXTS[:count])
            prepare(todo)
        stores = all_versions(todo.folder)["s"]
        for each in stores:
            os.utime(each / "manifest.json", (DAYS_AGO, DAYS_AGO))
        assert len(stores) == 3
        return todo, stores

    def test_what_nothing_keeps_goes(self, tmp_path: Path) -> None:
        todo, stores = self.stores(tmp_path)
        (todo.cache_dir / "tokenizer-0123.json").write_text("{}")
        (todo.cache_dir / "something else").mkdir()
        removed = prune(todo.cache_dir)
        assert {each.path for each in removed} == set(stores[1:])
        assert all(each.size > 1000 for each in removed)
        assert all_versions(todo.folder) == {"s": stores[:1]}
        assert (todo.cache_dir / "something else").is_dir()
        assert prune(todo.cache_dir) == []
        assert len(open_prepared(todo).stores["s"].records) == 40

    def test_a_run_keeps_its_text(self, tmp_path: Path) -> None:
        """As long as its folder of checkpoints exists."""
        path, cache = write(tmp_path), tmp_path / "cache"
        train(path, cache, 2)
        write(tmp_path, TEXTS[:10])
        data_module(path, cache).prepare_data()
        (settings,) = [each for each in cache.iterdir() if each.is_dir()]
        current, old = all_versions(settings)["readmes"]
        assert keepers(old) == [str(tmp_path / "checkpoints")]
        os.utime(old / "manifest.json", (DAYS_AGO, DAYS_AGO))
        assert prune(cache) == []
        (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
        gc.collect()  # the run of this process
        assert [each.path for each in prune(cache)] == [old]
        assert current.is_dir()

    def test_an_open_store_stays(self, tmp_path: Path) -> None:
        from andrea_pl.data.store import TokenStore

        todo, stores = self.stores(tmp_path)
        opened = TokenStore(stores[1])
        assert [each.path for each in prune(todo.cache_dir)] == [stores[2]]
        del opened
        assert [each.path for each in prune(todo.cache_dir)] == [stores[1]]

    def test_a_store_that_was_just_used_stays(self, tmp_path: Path) -> None:
        todo, stores = self.stores(tmp_path)
        os.utime(stores[1] / "manifest.json")
        assert [each.path for each in prune(todo.cache_dir)] == [stores[2]]
