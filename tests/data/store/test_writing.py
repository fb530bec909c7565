"""Writing documents that come in pieces."""

from pathlib import Path

import numpy as np
import pytest

from andrea_pl import TextDataModule
from andrea_pl.data.sources import plain_text
from andrea_pl.data.sources.records import digest
from andrea_pl.data.store import cutting, encoding, tokenizer
from andrea_pl.data.store.preparation import open_prepared, prepare
from andrea_pl.data.store.token_store import TokenStore, writing_store
from tests.support.texts import for_training

pytestmark = pytest.mark.filterwarnings("ignore:the text gave")

TEXT = "".join(f"Line {n} says that {n} times {n} is {n * n}, doesn't it?\r\n" for n in range(800))


def test_one_file_in_pieces_gives_the_store_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, bytes, split, digest and tokenizer; words and lines are found again without decoding all."""
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode())
    whole = for_training(path, tmp_path / "whole")
    prepare(whole)
    for module, name, value in (
        (plain_text, "HELD", 1000),
        (plain_text, "READ_BYTES", 300),
        (cutting, "PIECE_CHARACTERS", 100),
        (encoding, "CHUNK_BYTES", 500),
        (tokenizer, "DECODED_TOKENS", 50),
    ):
        monkeypatch.setattr(module, name, value)
    pieces = for_training(path, tmp_path / "pieces")
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
