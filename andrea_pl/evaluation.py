"""What `trainer.validate()` and `trainer.test()` return and print, without writing it to loggers twice.

on_validation_epoch_end   figures go to monitors, and to loggers at their own update (scalars.py)
Lightning                 writes what was logged for loggers, at a step of its own counting
on_validation_end         figures join what is returned and printed
"""

from collections.abc import Mapping
from typing import Any, cast

import lightning.pytorch as pl
from torch import Tensor


class EvaluationTable:
    """The figures of one evaluation on their way into what Lightning returns."""

    def __init__(self) -> None:
        self._figures: Mapping[str, Tensor] = {}
        self._rows: list[dict[str, Any]] = []

    def keep(self, trainer: pl.Trainer, figures: Mapping[str, Tensor]) -> None:
        """Keep figures at the end of the evaluation's epoch, and the rows that Lightning will return.

        Lightning returns a row for each loader, and lists them in `_logged_outputs` until the epoch has
        ended. It writes what the rows hold at that point to the loggers.
        """
        self._figures = figures
        loop: Any = cast(Any, trainer)._evaluation_loop
        self._rows = list(loop._logged_outputs)

    def fill(self) -> None:
        """Add the figures to the rows, once Lightning has written them."""
        for row in self._rows:
            row.update(self._figures)
        self._figures, self._rows = {}, []
