"""Several processes that prepare the same text."""

import errno
import fcntl
import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from andrea_pl.data.store import preparation as preparing_module
from andrea_pl.data.store.preparation import open_prepared, prepare
from tests.support.texts import preparation, said, write

pytestmark = pytest.mark.filterwarnings("ignore:the text gave")


class TestTogether:
    """Several processes and one cache."""

    def test_twelve_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One prepares, the others wait and use it."""
        todo = preparation(write(tmp_path), tmp_path / "cache")
        written: list[int] = []
        original = preparing_module.write_source

        def counted(*arguments: Any) -> Any:
            written.append(1)
            return original(*arguments)

        monkeypatch.setattr(preparing_module, "write_source", counted)
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

        monkeypatch.setattr(fcntl, "flock", refuse)
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
