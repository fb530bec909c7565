"""Events that callbacks publish to each other and to the journal."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something that happened in a run."""

    kind: str
    """`nonfinite`, `spike`, `level`, `clipped_hard`, `no_gradient`, `coherence`, or one of your own."""

    update: int
    """The update at which it happened, from 1; 0 before the first."""

    message: str
    """One readable line."""

    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Figures that JSON can hold."""


@runtime_checkable
class TakesEvents(Protocol):
    """A callback that follows events."""

    def take_event(self, trainer: pl.Trainer, event: RunEvent) -> None:
        """Handle an event."""
        ...


def publish_event(trainer: pl.Trainer, event: RunEvent) -> None:
    """Hand an event to every callback that takes events."""
    for callback in cast("list[Callback]", cast(Any, trainer).callbacks):
        if isinstance(callback, TakesEvents):
            callback.take_event(trainer, event)
