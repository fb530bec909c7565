"""Rows of a regression with spikes planted in them, and a replay of one."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from andrea_callbacks import RunEvent
from tests.support.projects import TextRows


class Rows(pl.LightningModule):
    """Somebody else's model: automatic optimization, a mean over rows, plain tensors as batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(32, 4)

    def row_losses(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self.layer(batch), torch.zeros(len(batch), 4), reduction="none").sum(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.row_losses(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def rows_with_spikes(updates: set[int], count: int = 60) -> list[Tensor]:
    rows = TextRows(4 * count).rows.view(count, 4, 32).clone()
    for update in updates:
        rows[update - 1, 2] *= 30.0
    return list(rows)


class Events(pl.Callback):
    """Keep events."""

    def __init__(self) -> None:
        self.taken: list[RunEvent] = []

    def take_event(self, trainer: Any, event: RunEvent) -> None:
        self.taken.append(event)


def replay(module: Any, batch: Tensor) -> Tensor:
    """The user's own: rows apart, up to a factor."""
    return module.row_losses(batch)


def text_items(count: int, seed: int = 0, sources: int = 2) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    items = []
    for number in range(count):
        tokens = torch.randint(
            1, 40, (int(torch.randint(3, 16, (), generator=generator)),), generator=generator
        )
        place = {"source_id": number % sources, "document_id": 50 + number, "offset": 0}
        items.append({"input_ids": tokens[:-1], "labels": tokens[1:], **place})
    return items
