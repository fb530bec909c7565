"""Scalars with their own steps: collected on the device, then written in batches, once each, in order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from andrea_callbacks.numerics.host_transfer import widest


@dataclass(frozen=True, slots=True)
class Doubtful:
    """A number that is not written if its flag on the device turns out to be set."""

    value: Tensor
    """0-d."""
    doubt: Tensor
    """0-d bool."""


Value = Tensor | float | int | Doubtful


LATE = 2
"""Newest steps that a full buffer does not write yet, since the next update may still add to them."""


class ScalarBuffer:
    """Unwritten scalars of one trainer, shared by all its callbacks, so that each step is one row.

    Args:
        trainer: Its loggers receive the scalars.
        capacity: Steps to write at once, as soon as there are `LATE` more.
    """

    def __init__(self, trainer: pl.Trainer, capacity: int = 50) -> None:
        self._trainer = ref(trainer)  # which holds this buffer's callbacks; a cycle would keep both alive
        self.capacity = capacity
        self._steps: dict[int, dict[str, Value]] = {}
        self._warned: set[int] = set()

    def record(self, step: int, values: Mapping[str, Value]) -> None:
        """Keep scalars for a step. Tensors may be on an accelerator; nothing waits for them here."""
        if not self._loggers():
            return
        if step not in self._steps and len(self._steps) >= self.capacity + LATE:
            self._write(sorted(self._steps)[:-LATE])
        kept = self._steps.setdefault(step, {})
        kept.update({name: _kept(value) for name, value in values.items()})

    def flush(self) -> None:
        """Write all scalars to all loggers, each step once, in increasing order."""
        self._write(sorted(self._steps))

    def _write(self, steps: list[int]) -> None:
        rows = [self._steps.pop(step) for step in steps]
        for step, values in zip(steps, to_host(rows), strict=True):
            for logger in self._loggers() if values else []:
                try:
                    logger.log_metrics(values, step=step)
                except OSError as error:
                    self._warn(logger, step, error)

    def _warn(self, logger: Logger, step: int, error: OSError) -> None:
        """Warn once that a logger cannot write to its disk; the run continues."""
        if id(logger) not in self._warned:
            self._warned.add(id(logger))
            rank_zero_warn(
                f"{type(logger).__name__} in {logger.save_dir} cannot write the scalars of update {step} "
                f"({error}); the run goes on without them. Free some space"
            )

    def _loggers(self) -> list[Logger]:
        trainer = self._trainer()
        return [] if trainer is None else trainer.loggers


def _kept(value: Value) -> Tensor | float | Doubtful:
    if isinstance(value, Doubtful):
        return value
    return value.detach() if isinstance(value, Tensor) else float(value)


def to_host(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn all 0-d tensors in rows into numbers, with one transfer per device; other values stay.

    `Doubtful` numbers whose flag is set are left out.
    """
    tensors: dict[torch.device, list[Tensor]] = {}
    for row in rows:
        for value in row.values():
            for each in (value.value, value.doubt) if isinstance(value, Doubtful) else (value,):
                if isinstance(each, Tensor):
                    tensors.setdefault(each.device, []).append(each)
    numbers: dict[int, float] = {}
    for device, group in tensors.items():
        row = torch.stack([value.to(widest(device)).reshape(()) for value in group])
        values = cast("list[float]", row.tolist())
        numbers.update(zip(map(id, group), values, strict=True))
    return [
        {
            name: numbers[id(value.value if isinstance(value, Doubtful) else value)]
            if isinstance(value, (Tensor, Doubtful))
            else value
            for name, value in row.items()
            if not (isinstance(value, Doubtful) and numbers[id(value.doubt)])
        }
        for row in rows
    ]


def add_text(trainer: pl.Trainer, name: str, text: str, step: int) -> None:
    """Give a Markdown text to the loggers that accept text, such as TensorBoard's, on rank zero."""
    for logger in trainer.loggers if trainer.is_global_zero else []:
        add = getattr(getattr(logger, "experiment", None), "add_text", None)
        if callable(add):
            add(name, text, step)


_buffers: "WeakKeyDictionary[pl.Trainer, ScalarBuffer]" = WeakKeyDictionary()


def scalar_buffer(trainer: pl.Trainer) -> ScalarBuffer:
    """Return the buffer that a trainer's callbacks share."""
    if trainer not in _buffers:
        _buffers[trainer] = ScalarBuffer(trainer)
    return _buffers[trainer]


def refuse_climbing(owner: str, name: str | None) -> None:
    """Refuse a name that would change the folder of a file that is named after it.

    Raises:
        ValueError: If it contains a path separator.
    """
    if name is not None and ("/" in name or "\\" in name or name in ("", ".", "..")):
        raise ValueError(f"{owner}: name {name!r} must be a word or two, without path separators")


def without_module(state: dict[str, Any]) -> dict[str, Any]:
    """Return a callback's attributes without the module's methods that Lightning attaches during a fit.

    With them, a pickle or a copy of the callback would hold the module's weights.
    """
    return {name: value for name, value in state.items() if name not in ("log", "log_dict")}


class ScalarCallback(Callback):
    """The base of callbacks that record scalars.

    Scalars are written when the buffer is full, before validation and checkpoints, on an exception and at the
    end.

    Args:
        name: Tells instances of one class in the same trainer apart; part of the key of their state.

    Raises:
        ValueError: If the name contains a path separator.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        refuse_climbing(type(self).__name__, name)
        self.name = name
        self._has_fitted = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave the module out of pickles and copies."""
        return without_module(self.__dict__)

    @property
    @override
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint: its class, and its name if it has one."""
        kind = type(self).__qualname__
        return kind if self.name is None else f"{kind}[{self.name}]"

    def reset(self) -> None:
        """Reset what an earlier fit of this instance left. A checkpoint's state is loaded afterwards."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reset before another fit, unless the trainer continues the last one."""
        if stage == "fit":
            if self._has_fitted and not trainer.global_step:
                self.reset()
            self._has_fitted = True

    def record(self, trainer: pl.Trainer, step: int, values: Mapping[str, Value]) -> None:
        """Keep scalars for update `step`."""
        scalar_buffer(trainer).record(step, values)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the buffer, so that validation comes after its update."""
        scalar_buffer(trainer).flush()

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the buffer, so that no checkpoint is ahead of its curves."""
        scalar_buffer(trainer).flush()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the buffer; the last updates matter most."""
        scalar_buffer(trainer).flush()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the buffer."""
        scalar_buffer(trainer).flush()
