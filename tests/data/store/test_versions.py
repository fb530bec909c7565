"""Changes of the text: which are noticed, and which are none."""

import json
import os
from pathlib import Path

import pytest

from andrea_pl.data.store.preparation import prepare
from tests.support.texts import preparation, said, write

pytestmark = pytest.mark.filterwarnings("ignore:the text gave")


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
        monkeypatch.setattr("andrea_pl.data.store.inputs.SourceInput.agrees", lambda *_: True)
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
