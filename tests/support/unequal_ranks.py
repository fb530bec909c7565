"""Ranks that have unequal numbers of windows, for two_ranks.py."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

from andrea_pl import UserError
from tests.support.toy import ListLoader, ToyU, build_trainer, window


class Stream:
    """Windows without a length, as many as are asked for in each epoch."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.counts[min(self.epoch, len(self.counts) - 1)]):
            yield window([0, 1])


class Counts(pl.Callback):
    """Tells a stream of the epoch, and counts what is validated."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.validated = 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.loader.epoch = trainer.current_epoch + 1

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.validated += 1


class Validates(ToyU):
    """Meets the other ranks in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(batch.sum()), sync_dist=True, batch_size=1)


def run(loaders: list[Any], **options: Any) -> dict[str, Any]:
    """Train where each rank has a loader of its own, and return how it ended."""
    strategy = DDPStrategy(process_group_backend="gloo")
    module = Validates()
    trainer = build_trainer(devices=2, strategy=strategy, **options)
    rank = trainer.global_rank
    counts = Counts(loaders[rank])
    trainer.callbacks.append(counts)
    error = ""
    try:
        trainer.fit(module, loaders[rank], ListLoader([torch.ones(1)]))
    except UserError as caught:
        error = str(caught)
    return {"error": error, "updates": module.updates_applied, "validated": counts.validated}


def sized(count: int) -> ListLoader:
    return ListLoader([window([0, 1])] * count)


class Short(ListLoader):
    """Says that it has one more window than it has."""

    def __len__(self) -> int:
        return len(self.batches) + 1


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "equal": lambda: run([sized(3), sized(3)], max_epochs=2),
    "equal streams": lambda: run([Stream(3), Stream(3)], max_epochs=2),
    "max_steps": lambda: run([sized(5), sized(4)], max_steps=8, max_epochs=-1),
    "max_epochs": lambda: run([sized(4), sized(5)], max_epochs=2),
    "streams": lambda: run([Stream(5), Stream(4)], max_steps=8, max_epochs=-1),
    "streams, epochs": lambda: run([Stream(4), Stream(5)], max_epochs=2),
    "streams, second epoch": lambda: run([Stream(3, 2), Stream(3)], max_epochs=3),
    "streams, limited": lambda: run([Stream(5), Stream(4)], max_epochs=1, limit_train_batches=5),
    "streams, limited in time": lambda: run([Stream(5), Stream(6)], max_epochs=2, limit_train_batches=4),
    "an empty stream": lambda: run([Stream(3), Stream(0)], max_epochs=1),
    "an empty second epoch": lambda: run([Stream(3), Stream(3, 0)], max_epochs=2),
    "a wrong length": lambda: run([sized(4), Short(sized(3).batches)], max_epochs=1),
    "stopped": lambda: run([Stream(6), Stream(7)], max_steps=4, max_epochs=-1),
}
