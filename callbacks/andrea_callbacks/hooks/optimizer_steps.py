"""The base of callbacks that watch optimizer steps, and a count of each optimizer's steps."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer
from typing_extensions import override

from andrea_callbacks.hooks.gradient_watch import unwatch_gradients, watch_gradients, watch_of
from andrea_callbacks.hooks.measuring import optimizer_place
from andrea_callbacks.hooks.reports import ReportCallback


class StepCounts:
    """Counts the steps of each optimizer of a trainer.

    `global_step` counts the steps of all optimizers together.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def begin(self, trainer: pl.Trainer) -> None:
        """Start with a fit. Steps from a checkpoint without counts are divided equally."""
        self._seen.clear()
        for place in range(len(trainer.optimizers)):
            self._counts.setdefault(str(place), trainer.global_step // len(trainer.optimizers))

    def next(self, trainer: pl.Trainer, optimizer: Optimizer) -> int | None:
        """Count the step that an optimizer is about to make.

        Returns:
            Its number, from 1; None if the optimizer, such as LBFGS, evaluates its loss again within a step
            that was already counted.
        """
        watch = watch_of(trainer)
        if watch is not None:
            watch.step_is_seen(optimizer)
        place = optimizer_place(trainer, optimizer)
        if self._seen.get(place) == trainer.global_step:
            return None
        self._seen[place] = trainer.global_step
        self._counts[place] = self._counts.get(place, 0) + 1
        return self._counts[place]

    def of(self, place: str) -> int:
        """Return the number of steps of an optimizer, given its index among the trainer's."""
        return self._counts.get(place, 0)

    def state_dict(self) -> dict[str, int]:
        """Return the counts by the optimizers' indices."""
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue counting."""
        self._counts = dict(state)


def is_due(count: int, every: int) -> bool:
    """Return whether a step is recorded in detail: the first of every `every` steps."""
    return (count - 1) % every == 0


class StepCallback(ReportCallback):
    """The base of callbacks that watch optimizer steps, in modules that report updates and in others.

    Args:
        name: Tells instances in the same trainer apart.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.steps = StepCounts()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start counting again with a new fit."""
        if stage == "fit" and not trainer.global_step:
            self.steps = StepCounts()
        super().setup(trainer, pl_module, stage)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start to watch the gradients."""
        self.steps.begin(trainer)
        watch_gradients(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notice batches without an update."""
        watch = watch_of(trainer)
        if watch is not None:
            watch.batch_ends()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Follow the gradients no longer."""
        unwatch_gradients(trainer)
        super().on_train_end(trainer, pl_module)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Follow the gradients no longer."""
        unwatch_gradients(trainer)
        super().on_exception(trainer, pl_module, exception)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop watching the gradients, whatever ended the fit."""
        unwatch_gradients(trainer)
