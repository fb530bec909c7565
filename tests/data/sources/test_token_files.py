"""Files of token ids."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from andrea_pl import TextSource, UserError
from andrea_pl.data.store.preparation import open_prepared, prepare
from tests.support.texts import pieces, preparation, source

pytestmark = pytest.mark.filterwarnings("ignore:the text gave")


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


def header(magic: int, version: int, count: int) -> bytes:
    return np.array([magic, version, count] + [0] * 253, dtype="<i4").tobytes()


class TestTokenFiles:
    """uint32 ids that are read as uint16 become others: 128000 -> 62464, 1."""

    def test_uint32(self, tmp_path: Path) -> None:
        path = tmp_path / "a.bin"
        path.write_bytes(np.array([128_000, 7, 9], dtype="<u4").tobytes())
        assert np.fromfile(path, dtype="<u2")[:2].tolist() == [62_464, 1]
        assert pieces(path, token_dtype="uint32") == [[128_000, 7, 9]]
        with pytest.raises(
            UserError, match=r"vocabulary of 128256 does not fit uint16 ids.*token_dtype: uint32"
        ):
            pieces(path, vocab_size=128_256)
        with pytest.raises(UserError, match="end_of_document=128001 does not fit uint16 ids"):
            pieces(path, vocab_size=65_536, end_of_document=128_001)
        with pytest.raises(UserError, match="end_of_document=128001 must lie from 0 to 65535"):
            source(path, token_dtype="uint16", end_of_document=128_001)

    def test_uint32_that_nobody_named(self, tmp_path: Path) -> None:
        """Every second uint16 is next to nothing."""
        path = tmp_path / "a.bin"
        path.write_bytes(np.arange(1000, 1200, dtype="<u4").tobytes())
        with pytest.raises(UserError, match="this looks like uint32 ids; set token_dtype: uint32"):
            pieces(path, vocab_size=50_257)

    def test_nanogpt(self, tmp_path: Path) -> None:
        path = tmp_path / "train.bin"
        path.write_bytes(np.array([5, 6, 50_256, 7], dtype="<u2").tobytes())
        assert pieces(path, vocab_size=50_257, end_of_document=50_256) == [[5, 6, 50_256], [7]]
        (tmp_path / "b.bin.gz").write_bytes(gzip.compress(path.read_bytes()))
        assert pieces(tmp_path / "b.bin.gz", vocab_size=50_257) == [[5, 6, 50_256, 7]]

    @pytest.mark.parametrize(
        ("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4"), (20240801, 1, "<u4")]
    )
    def test_headers_of_llm_c(self, tmp_path: Path, magic: int, version: int, dtype: str) -> None:
        """256 int32, and the ids behind them; numbers are those of dev/data/data_common.py."""
        path = tmp_path / "a.bin"
        ids = [128_000 if dtype == "<u4" else 50_256, 3, 4]
        path.write_bytes(header(magic, version, 3) + np.array(ids, dtype=dtype).tobytes())
        vocab_size = 200_000 if dtype == "<u4" else 50_257
        assert pieces(path, vocab_size=vocab_size) == [ids]
        other = "uint16" if dtype == "<u4" else "uint32"
        with pytest.raises(UserError, match="its header says"):
            pieces(path, vocab_size=vocab_size, token_dtype=other)

    @pytest.mark.parametrize(
        ("content", "fault"),
        [
            (
                header(20240520, 1, 9) + b"\0" * 6,
                "says 9 tokens of uint16 or 1042 bytes, and the file has 1030",
            ),
            (header(20240520, 2, 3) + b"\0" * 6, "header 20240520 of version 2, where 1 is known"),
            (header(20240326, 3, 12) + b"\0" * 64, r"a model of llm\.c"),
            (header(20250101, 1, 3) + b"\0" * 6, "a header with the unknown magic 20250101"),
            (b"\x93NUMPY" + b"\0" * 250, "a NumPy .npy file, not raw token ids"),
            (b"The quick brown fox jumps over the lazy dog. " * 40, "text, not token ids"),
            (b"", "0 bytes are no list of uint16 tokens"),
            (b"abc", "3 bytes are no list of uint16 tokens"),
        ],
    )
    def test_what_is_no_list_of_ids(self, tmp_path: Path, content: bytes, fault: str) -> None:
        path = tmp_path / "a.bin"
        path.write_bytes(content)
        with pytest.raises(UserError, match=fault):
            pieces(path, vocab_size=50_257)

    def test_an_end_that_occurs_nowhere(self, tmp_path: Path) -> None:
        path = tmp_path / "a.bin"
        path.write_bytes(np.array([5, 6, 7], dtype="<u2").tobytes())
        with pytest.warns(UserWarning, match="end_of_document=9 occurs nowhere"):
            assert pieces(path, vocab_size=50_257, end_of_document=9) == [[5, 6, 7]]
