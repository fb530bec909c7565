"""Cuts documents into training sequences, and collates sequences into padded micro-batches."""

from collections.abc import Sequence
from typing import Any, Required, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from andrea_pl.errors import UserError

IGNORED = -100
"""Label of a position that is ignored; the default `ignore_index` of torch's cross entropy."""

Item = dict[str, Any]


class MicroBatch(TypedDict, total=False):
    """Padded sequences: B rows, S positions. Training needs only `input_ids` and `labels`."""

    input_ids: Required[Tensor]
    """(B, S) int64."""
    labels: Required[Tensor]
    """(B, S) int64, already shifted by one; `IGNORED` at positions without a label."""
    valid_mask: Tensor
    """(B, S) bool, false for padding."""
    token_index: Tensor
    """(valid tokens,) int64, their indices in the flattened rows."""
    num_tokens: int
    """Number of valid labels, counted on the host."""
    source_id: Tensor
    """(B,) int64; negative for a filler."""
    document_id: Tensor
    """(B,) int64."""
    offset: Tensor
    """(B,) int64, index of the row's first token in its document."""


class TokenizedDataset(Dataset[Item]):
    """Documents as inputs and labels. Labels are shifted only here.

    A document of n tokens gives n - 1 labels: every token except the first, exactly once. Longer documents
    are cut into consecutive blocks. The label of a block's last token is the first token of the next block. A
    document of fewer than two tokens has no label and gives no sequence; `labelless_documents` counts those.

    Args:
        sequences: One sequence of token ids per document. An attribute `lengths`, if it exists, avoids
            reading every document to find its length.
        block_size: Maximum number of tokens in an input.
        source_id: The source of these sequences.
        document_ids: Id of each document; by default 0, 1, 2, …

    Raises:
        UserError: If `block_size` is less than 1.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int] | NDArray[Any]],
        block_size: int,
        source_id: int = 0,
        document_ids: Sequence[int] | NDArray[np.int64] | None = None,
    ) -> None:
        if block_size < 1:
            raise UserError(f"block_size must be at least 1, got {block_size}")
        self.sequences = sequences
        self.block_size = block_size
        self.source_id = source_id
        self._ids = np.arange(len(sequences)) if document_ids is None else np.asarray(document_ids)
        known = getattr(sequences, "lengths", None)
        tokens = np.asarray([len(each) for each in sequences] if known is None else known, dtype=np.int64)
        labels = np.maximum(tokens - 1, 0)
        blocks = -(-labels // block_size)
        self.labelless_documents = int((labels == 0).sum())
        self._documents = np.repeat(np.arange(len(tokens)), blocks)
        first_block = np.repeat(np.cumsum(blocks) - blocks, blocks)
        self._offsets = (np.arange(len(self._documents)) - first_block) * block_size
        self.lengths: NDArray[np.int64] = np.minimum(labels[self._documents] - self._offsets, block_size)
        """(number of sequences,) labels in each sequence."""

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Item:
        """Return `input_ids` and `labels`, both (S,) int64, and `source_id`, `document_id`, `offset`."""
        document, offset, length = self._documents[index], int(self._offsets[index]), int(self.lengths[index])
        tokens = np.asarray(self.sequences[document][offset : offset + length + 1], dtype=np.int64)
        return {
            "input_ids": torch.from_numpy(tokens[:-1]),
            "labels": torch.from_numpy(tokens[1:]),
            "source_id": self.source_id,
            "document_id": int(self._ids[document]),
            "offset": offset,
        }


class DynamicPaddingCollator:
    """Pads sequences on the right to the longest of their micro-batch.

    Args:
        pad_token_id: Id that fills `input_ids`; it is masked and never a label.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, items: Sequence[Item]) -> MicroBatch:
        """Collate items of `TokenizedDataset`.

        Returns:
            `input_ids` (B, S) int64; `labels` (B, S) int64, -100 if ignored; `valid_mask` (B, S) bool;
            `num_tokens` int, the number of valid labels; `token_index` (T,) int64, indices of the valid
            tokens in the flattened batch; `source_id`, `document_id`, `offset` (B,) int64.
        """
        rows = len(items)
        width = max(len(item["input_ids"]) for item in items)
        input_ids = torch.full((rows, width), self.pad_token_id, dtype=torch.int64)
        labels = torch.full((rows, width), IGNORED, dtype=torch.int64)
        valid_mask = torch.zeros(rows, width, dtype=torch.bool)
        for row, item in enumerate(items):
            length = len(item["input_ids"])
            input_ids[row, :length] = item["input_ids"]
            labels[row, :length] = item["labels"]
            valid_mask[row, :length] = True
        return {
            "input_ids": input_ids,
            "labels": labels,
            "valid_mask": valid_mask,
            "num_tokens": count_labels(labels),
            "token_index": valid_mask.flatten().nonzero().squeeze(1),
            "source_id": _numbers(items, "source_id"),
            "document_id": _numbers(items, "document_id"),
            "offset": _numbers(items, "offset"),
        }


def _numbers(items: Sequence[Item], key: str) -> Tensor:
    """Return (B,) the items' values for a key, -1 for items without it."""
    return torch.tensor([item.get(key, -1) for item in items])


def count_labels(labels: Tensor) -> int:
    """Return the number of valid labels, on the host."""
    return int((labels != IGNORED).sum())


FILLER: Item = {
    "input_ids": torch.zeros(1, dtype=torch.int64),
    "labels": torch.full((1,), IGNORED, dtype=torch.int64),
    "source_id": -1,
    "document_id": -1,
    "offset": 0,
}
"""A sequence without labels, for a rank with fewer micro-batches than the others."""
