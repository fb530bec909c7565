"""Which files a path names, what a file holds whatever its name says, and token files of other programs."""

import bz2
import gzip
import json
import lzma
import os
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from andrea_pl import UserError
from tests.support.texts import pieces, read, source


def names(*paths: Any, **options: Any) -> list[str]:
    return [file.name for file in source(*paths, **options).files()]


def put(folder: Path, *files: str) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the text of {name}")


class TestFinding:
    """Folder and glob take the same files."""

    def test_a_folder_is_its_glob(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever the case of extensions, through links, without what is hidden."""
        monkeypatch.chdir(tmp_path)
        put(tmp_path, "d/a.txt", "d/B.TXT", "d/C.Md", "d/sub/e.rst", "elsewhere/f.txt", "d/.hidden.txt")
        put(tmp_path, "d/.ipynb_checkpoints/a-checkpoint.txt", "d/g.json", "d/h.csv")
        (tmp_path / "d" / "linked").symlink_to(tmp_path / "elsewhere")
        found = names("d")
        assert sorted(found) == ["B.TXT", "C.Md", "a.txt", "e.rst", "f.txt"]
        assert names("d/**") == names("d/**/*") == names(tmp_path / "d") == found
        assert names("d/*.txt") == ["B.TXT", "a.txt"]
        assert names("d/**/*.txt") == ["B.TXT", "a.txt", "f.txt"]

    def test_what_is_spelled_out_is_taken(self, tmp_path: Path) -> None:
        put(tmp_path, ".cache/a.txt", ".b.txt")
        assert names(tmp_path / ".cache") == names(tmp_path / ".cache" / "*.txt") == ["a.txt"]
        assert names(tmp_path / ".b.txt") == names(tmp_path / ".*.txt") == [".b.txt"]

    def test_loops_and_second_names(self, tmp_path: Path) -> None:
        """A file is read once, whatever leads to it, and under its own name."""
        put(tmp_path, "d/z.txt", "d/sub/b.txt")
        (tmp_path / "d" / "a.txt").symlink_to("z.txt")
        (tmp_path / "d" / "sub" / "up").symlink_to(tmp_path / "d")
        assert sorted(names(tmp_path / "d")) == ["b.txt", "z.txt"]
        assert names(tmp_path / "d" / "z.txt", tmp_path / "d" / "*.txt", tmp_path / "d" / "sub") == [
            "z.txt",
            "b.txt",
        ]

    def test_what_is_passed_over_is_counted(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        put(tmp_path, "a.txt", "b.json", "c.json", "d.html", "Makefile", ".e.txt")
        with caplog.at_level("INFO"):
            source(tmp_path).report_passed_over()
        (message,) = caplog.messages
        assert message == "source 's' passes over .html (1), .json (2), hidden (1), no extension (1)"

    def test_nothing_to_read(self, tmp_path: Path) -> None:
        put(tmp_path, "b.json", "c.csv")
        with pytest.raises(
            UserError, match=r"gives no file to read, only \.csv \(1\), \.json \(1\); give files"
        ):
            names(tmp_path)

    def test_links_pipes_and_sockets(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """None of them is waited for."""
        monkeypatch.chdir(tmp_path)
        put(tmp_path, "a.txt")
        (tmp_path / "broken.txt").symlink_to("nowhere")
        os.mkfifo(tmp_path / "pipe.txt")
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind("s.txt")
            assert names(tmp_path) == ["a.txt"]
            with pytest.raises(UserError, match=r"pipe\.txt is a pipe, and text is read more than once"):
                names(tmp_path / "pipe.txt")
            with pytest.raises(UserError, match=r"s\.txt is a socket"):
                names(tmp_path / "s.txt")
        with pytest.raises(UserError, match=r"broken\.txt is a link to nowhere, which does not exist"):
            names(tmp_path / "broken.txt")
        with pytest.raises(UserError, match="is a device"):
            names("/dev/zero")

    def test_brackets(self, tmp_path: Path) -> None:
        """A part of a path that exists as it is written is no pattern."""
        put(tmp_path, "data [v2]/a.txt", "data v/b.txt", "[x].txt", "x.txt")
        assert names(f"{tmp_path}/data [v2]/*.txt") == ["a.txt"]
        assert names(f"{tmp_path}/data [v2]") == ["a.txt"]
        assert names(f"{tmp_path}/[x].txt") == ["[x].txt"]
        assert names(f"{tmp_path}/[xyz].txt") == ["x.txt"]
        with pytest.raises(UserError, match="brackets in a glob stand for one of the characters"):
            names(f"{tmp_path}/data [q3]/*.txt")

    def test_data_sets_of_hugging_face(self, tmp_path: Path) -> None:
        """`save_to_disk` of a Dataset and of a DatasetDict."""
        put(tmp_path, "one/data-00000-of-00001.arrow", "one/state.json", "one/dataset_info.json")
        with pytest.raises(UserError, match=r"load_from_disk\('.*one'\)\.to_parquet\('one\.parquet'\)"):
            names(tmp_path / "one")
        put(tmp_path, "two/dataset_dict.json", "two/train/data-0.arrow", "two/train/state.json")
        with pytest.raises(UserError, match=r"load_from_disk\('.*two'\)\['train'\]\.to_parquet"):
            names(tmp_path / "two")

    def test_stores_of_before_stay_valid(self, tmp_path: Path) -> None:
        put(tmp_path, "b.txt", "a.txt", "sub/c.txt")
        found = source(tmp_path)
        assert "token_dtype" not in found.settings()
        expected = [
            [str(path), path.stat().st_size, path.stat().st_mtime_ns]
            for path in sorted(tmp_path.rglob("*.txt"))
        ]
        assert found.fingerprint() == expected


class TestCompressed:
    def test_gzip_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\r\ntwo"))
        (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n'))
        table = tmp_path / "c.parquet"
        pq.write_table(pa.table({"text": ["four"]}), table)
        (tmp_path / "c.parquet.gz").write_bytes(gzip.compress(table.read_bytes()))
        table.unlink()
        assert read([tmp_path])[0] == ["one\ntwo", "three", "four"]
        assert read([f"{tmp_path}/*.jsonl.gz"])[0] == ["three"]

    def test_broken_gzip(self, tmp_path: Path) -> None:
        whole = gzip.compress(os.urandom(20_000).hex().encode())
        (tmp_path / "a.txt.gz").write_bytes(whole[:9000])
        (tmp_path / "b.txt.gz").write_bytes(b"no gzip at all")
        messages = read([tmp_path], "skip")[1]
        assert "a.txt.gz: broken gzip" in messages[0]
        assert "b.txt.gz: not compressed by gzip, though its name ends in .gz" in messages[1]

    def zipped(self, content: bytes) -> bytes:
        import io

        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("a.jsonl", content)
        return stream.getvalue()

    @pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".parquet", ".bin"])
    @pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zip", "zstd"])
    def test_under_another_name(self, tmp_path: Path, kind: str, suffix: str) -> None:
        """It said "not UTF-8; iconv"."""
        content = b'{"text": "hello"}\n' * 50
        pack: dict[str, Callable[[bytes], bytes]] = {
            "gzip": gzip.compress,
            "bzip2": bz2.compress,
            "xz": lzma.compress,
            "zip": self.zipped,
            "zstd": lambda raw: b"\x28\xb5\x2f\xfd" + raw,
        }
        path = tmp_path / f"a{suffix}"
        path.write_bytes(pack[kind](content))
        with pytest.raises(UserError, match=rf"a{suffix}: compressed with {kind}; .*decompress it with"):
            (pieces if suffix == ".bin" else read)([path])

    def test_other_encodings(self, tmp_path: Path) -> None:
        for name, encoding in (("a.txt", "utf-16"), ("b.jsonl", "utf-32"), ("c.txt", "utf-16-le")):
            (tmp_path / name).write_bytes('{"text": "plain words"}'.encode(encoding))
        messages = read([tmp_path], "skip")[1]
        assert "a.txt: UTF-16 (by its byte order mark), not UTF-8" in messages[0]
        assert "b.jsonl: UTF-32 (by its byte order mark), not UTF-8" in messages[1]
        assert "c.txt: looks like UTF-16LE, not UTF-8" in messages[2]


class TestNull:
    """The message said "broken parquet … missing key (found: id, text)"."""

    def test_parquet(self, tmp_path: Path) -> None:
        path = tmp_path / "null.parquet"
        pq.write_table(pa.table({"id": [1, 2], "text": ["a", None]}), path)
        with pytest.raises(UserError, match=r"null\.parquet:2: 'text' is null; fill it in, or remove"):
            read([path])
        texts, messages = read([path], "skip")
        assert texts == ["a"]
        assert messages == [f"{path}:2: 'text' is null"]

    @pytest.mark.parametrize(
        ("record", "fault"),
        [
            ({"id": 1, "text": None}, "'text' is null"),
            ({"question": None, "answer": "b"}, "'question' is null"),
            ({"question": "a", "answer": None}, "'answer' is null"),
            ({"messages": None}, "'messages' is null"),
            ({"messages": []}, "'messages' is empty"),
            ({"id": 1}, r"missing key \(found: id\)"),
        ],
    )
    def test_jsonl(self, tmp_path: Path, record: dict[str, Any], fault: str) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "a"}\n' + json.dumps(record) + "\n")
        with pytest.raises(UserError, match=rf"a\.jsonl:2: {fault}; "):
            read([path])
