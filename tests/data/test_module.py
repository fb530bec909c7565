"""TextDataModule: every label once, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andrea_pl import TextDataModule, TextSource, UserError
from tests.support.texts import TEXTS, write

pytestmark = pytest.mark.filterwarnings("ignore:the text gave")


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
    lengths = data.corpus.stores["s"].split("train").lengths
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
        ({"vocab_size": 0}, "`vocab_size`"),
        ({"micro_batch_tokens": 0}, "`micro_batch_tokens`"),
        ({"micro_batch_sequences": 0}, "`micro_batch_sequences`"),
        ({"num_workers": -1}, "`num_workers`"),
        ({"val_fraction": 1.0}, "`val_fraction`"),
        ({"test_fraction": -0.1}, "`test_fraction`"),
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
