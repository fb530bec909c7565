"""Documents cut into sequences, and sequences padded into micro-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andrea_pl import DynamicPaddingCollator, TokenizedDataset, UserError
from andrea_pl.data.windows.dataset import FILLER, count_labels


@given(lengths=st.lists(st.integers(0, 40), max_size=20), block_size=st.integers(1, 12))
@pytest.mark.guarantee("every sequence once an epoch")
def test_every_token_but_the_first_is_a_label_once(lengths: list[int], block_size: int) -> None:
    documents = [list(range(100 * n, 100 * n + length)) for n, length in enumerate(lengths)]
    dataset = TokenizedDataset(documents, block_size)
    seen: list[int] = []
    for number in range(len(dataset)):
        item = dataset[number]
        document = documents[item["document_id"]]
        offset, size = item["offset"], len(item["labels"])
        assert size == dataset.lengths[number] <= block_size
        assert item["input_ids"].tolist() == document[offset : offset + size]
        assert item["labels"].tolist() == document[offset + 1 : offset + size + 1]
        seen += item["labels"].tolist()
    assert sorted(seen) == sorted(token for document in documents for token in document[1:])
    assert dataset.labelless_documents == sum(length < 2 for length in lengths)


def test_a_row_of_four_gives_three_labels() -> None:
    """transformers#46204: labels are counted after the shift."""
    batch = DynamicPaddingCollator(0)([TokenizedDataset([[11, 12, 13, 14]], 8)[0]])
    assert batch["num_tokens"] == count_labels(batch["labels"]) == 3
    assert batch["labels"].tolist() == [[12, 13, 14]]


def test_collator() -> None:
    dataset = TokenizedDataset([[1, 2, 3, 4], [5, 6]], 8, source_id=7, document_ids=[40, 41])
    batch = DynamicPaddingCollator(pad_token_id=9)([dataset[0], dataset[1]])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [5, 9, 9]]
    assert batch["labels"].tolist() == [[2, 3, 4], [6, -100, -100]]
    assert batch["valid_mask"].tolist() == [[True] * 3, [True, False, False]]
    assert batch["token_index"].tolist() == [0, 1, 2, 3]
    assert batch["num_tokens"] == 4
    assert batch["source_id"].tolist() == [7, 7]
    assert batch["document_id"].tolist() == [40, 41]
    assert batch["offset"].tolist() == [0, 0]
    assert {batch[key].dtype for key in ("input_ids", "labels", "source_id", "document_id")} == {torch.int64}


def test_filler_teaches_nothing() -> None:
    batch = DynamicPaddingCollator(0)([FILLER])
    assert batch["num_tokens"] == 0
    assert batch["input_ids"].shape == (1, 1)


def test_lengths_attribute_saves_reading() -> None:
    class Lazy(list[np.ndarray]):
        lengths = np.array([5, 3])

        def __getitem__(self, index: int) -> np.ndarray:  # type: ignore[override]
            reads.append(index)
            return np.arange(self.lengths[index], dtype=np.uint16)

        def __len__(self) -> int:
            return 2

    reads: list[int] = []
    dataset = TokenizedDataset(Lazy(), 4)
    assert len(dataset) == 2
    assert reads == []
    assert dataset[1]["labels"].tolist() == [1, 2]


def test_block_size_is_checked() -> None:
    with pytest.raises(UserError, match="block_size"):
        TokenizedDataset([[1, 2]], 0)
