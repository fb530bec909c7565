"""Applies optimizer options that a resume changes, even over the restored state."""

from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from andrea_pl.optim.rates import change_base_rate, keep_cycled_values

KEY = "andrea_optimizer"
"""The checkpoint's key for the options that its optimizer was built with."""


class ChangedOptions:
    """Compares the options that an optimizer is built with against those of the resumed run.

    A checkpoint restores its own values, some of which a callback may have changed on purpose. So only
    options that differ between the two runs' configurations are set.
    """

    def __init__(self) -> None:
        self._built: list[dict[str, Any]] = []
        self._names: list[str | None] = []
        self._restored: list[dict[str, Any]] | None = None

    def begin(self) -> None:
        """Reset what an earlier fit left."""
        self._built = []

    def reset(self) -> None:
        """Drop the resumed run's options, since this fit resumes nothing."""
        self._restored = None

    def note_built(self, optimizer: Optimizer) -> None:
        """Record the options of a newly built optimizer."""
        self._built = [_options(group) for group in optimizer.param_groups]
        self._names = [group.get("name") for group in optimizer.param_groups]

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add the options to a checkpoint."""
        checkpoint[KEY] = self._built

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Record the options of the run that wrote a checkpoint."""
        self._restored = checkpoint.get(KEY)

    def apply(self, trainer: pl.Trainer) -> None:
        """Set the options that differ, in the restored optimizer and its scheduler.

        Raises:
            UserError: If the scheduler does not support the change.
        """
        before, self._restored = self._restored, None
        optimizer = trainer.optimizers[0]
        scheduler = trainer.lr_scheduler_configs[0].scheduler if trainer.lr_scheduler_configs else None
        for group, name in zip(optimizer.param_groups, self._names, strict=False):
            if name is not None:
                group["name"] = (
                    name  # torch takes whole groups from a checkpoint, and older ones had no names
                )
        for number, (there, here) in enumerate(zip(before or [], self._built, strict=False)):
            group = optimizer.param_groups[number]
            changed = {name: here[name] for name in here if name in there and here[name] != there[name]}
            for name, value in changed.items():
                if name == "lr":
                    change_base_rate(optimizer, scheduler, number, there["lr"], value)
                else:
                    group[name] = keep_cycled_values(scheduler, group, name, there[name], value)
                rank_zero_info(f"optimizer, group {number}: {name} is {value}, and was {there[name]}")


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's options for a group that are numbers, strings, or tuples of them."""
    return {
        name: list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
        for name, value in group.items()
        if name not in ("params", "initial_lr", "name") and isinstance(value, (bool, int, float, str, tuple))
    } | {name: float(value) for name, value in group.items() if name == "lr" and isinstance(value, Tensor)}
