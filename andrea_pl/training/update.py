"""The state of one update between its backward passes and its report."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from andrea_pl.training.accumulation import WindowSums
from andrea_pl.training.verdict import Figures, Measured, Verdict


class OpenUpdate:
    """An update whose gradients are averaged and whose optimizer is about to step.

    Args:
        number: The update's number, from 1.
        lr: Learning rate of the first parameter group; None if the optimizer sets its rate itself.
        sums: The sums over the window.
    """

    def __init__(self, number: int, lr: float | None, sums: WindowSums) -> None:
        self.number = number
        self.lr = lr
        self.sums = sums
        self.refusal: str | None = None
        """What a callback found to be not finite before the step."""
        self.clip_seconds = 0.0
        """Seconds that the host has spent on measuring and clipping."""

    @contextmanager
    def timing(self) -> Generator[None]:
        """Add the time within the context to `clip_seconds`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.clip_seconds += time.perf_counter() - began


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedUpdate:
    """An update that was measured and clipped, or was made to change nothing."""

    update: OpenUpdate
    measured: Measured
    figures: Figures | None = None
    """None while a device that judges the update itself has not told the host yet."""
    verdict: Verdict | None = None
    """None while `figures` is None."""

    @property
    def may_have_changed_weights(self) -> bool:
        """Whether the step changed weights, or probably did."""
        return self.verdict is None or self.verdict.outcome == "applied"
