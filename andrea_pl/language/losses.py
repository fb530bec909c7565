"""Logits and labels of a micro-batch, for the positions that have a label."""

from typing import Any

import torch
from torch import Tensor, nn

from andrea_pl.data.windows.dataset import IGNORED, MicroBatch
from andrea_pl.network.layout import is_right_padded


def count_labels(micro_batch: MicroBatch) -> int | Tensor:
    """Return the number of valid labels; the collator's count on the host, if there is one."""
    counted = micro_batch.get("num_tokens")
    return (micro_batch["labels"] != IGNORED).sum() if counted is None else counted


def predict_labels(network: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (N, V), labels (N,) and row indices (N,) of the positions with a label.

    Positions without a label are left out, unless that would make the host wait for an accelerator.
    """
    labels = micro_batch["labels"]
    index = _token_index(micro_batch)
    flat = labels.flatten() if index is None else labels.flatten()[index]
    places = torch.arange(labels.numel(), device=labels.device) if index is None else index
    chosen = None
    if _has_unlabelled_places(micro_batch, flat):
        chosen = (flat != IGNORED).nonzero().squeeze(1)
        flat, places = flat[chosen], places[chosen]
    # through __call__, which network.compile() and hooks of the network act on
    logits: Any = network(
        micro_batch["input_ids"], micro_batch.get("valid_mask"), token_index=index, chosen=chosen
    )
    return logits.flatten(0, -2), flat, places // labels.shape[1]


def _token_index(micro_batch: MicroBatch) -> Tensor | None:
    """Return the indices of the valid tokens, if they are known without waiting for an accelerator."""
    index = micro_batch.get("token_index")
    mask = micro_batch.get("valid_mask")
    if index is not None or mask is None or mask.device.type != "cpu" or not is_right_padded(mask):
        return index
    return mask.flatten().nonzero().squeeze(1)


def _has_unlabelled_places(micro_batch: MicroBatch, labels: Tensor) -> bool:
    counted = micro_batch.get("num_tokens")
    if counted is None:
        return labels.device.type == "cpu"
    return bool(counted) and counted < len(labels)
