"""A run's journal: one JSON object per line for every update and every event, safe from a kill."""

import json
import time
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, cast

import lightning
import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from typing_extensions import override

from andrea_callbacks.forensics.report import to_json
from andrea_callbacks.hooks.events import RunEvent
from andrea_callbacks.hooks.gradient_watch import update_gradient
from andrea_callbacks.hooks.protocols import reports_updates
from andrea_callbacks.hooks.reports import UpdateReport, finalize_updates
from andrea_callbacks.hooks.scalars import Doubtful, to_host
from andrea_callbacks.hooks.update_window import WindowCallback
from andrea_callbacks.numerics.atomic_write import append_durably
from andrea_callbacks.numerics.bounds import require_at_least

KEY = "andrea_journal"
"""The checkpoint's key for the names of the journal files, by callback."""

MOST_KEPT = 10_000
"""Lines kept in memory while the disk is full."""


class RunJournal(WindowCallback):
    """Appends the events of a run to a file, one JSON object per line; `read_journal` reads it back.

    Every line has `kind`, `update` and `time` (UTC). The kinds are `start` (versions, ranks, precision, and
    the update of the resumed checkpoint), `update`, `validation` with all metrics, `checkpoint`, `exception`,
    `end`, and events of callbacks: `nonfinite`, `spike`, `coherence` and others. An update's line holds the
    module's report. If the module does not report its updates, it holds loss, norm before clipping and
    learning rate. NaN and Inf are the strings "NaN", "Infinity" and "-Infinity".

    Lines are buffered. They are written and synchronised with the disk every `every` updates, every
    `seconds`, and with every line that is not an update. A kill loses only the updates since then; a torn
    line stays on its own line. If the disk is full, up to ten thousand lines wait in memory until they can
    be written. A warning says so, and how many were lost if the run ends first. A resume appends to the file
    of its run: repeated updates appear twice, the second time after another `start`. Rank zero writes.

    Args:
        path: The file. The default is `journal.jsonl` in the trainer's log folder; a new run uses
            `journal.2.jsonl`, `journal.3.jsonl` … if an earlier run left one there.
        every: Updates between two writes.
        seconds: Seconds between two writes, for slow updates.
        name: Tells instances in the same trainer apart; the file is then `journal-<name>.jsonl`.

    Raises:
        ValueError: If `every` is less than 1 or `seconds` negative.
    """

    def __init__(
        self, path: str | None = None, every: int = 25, seconds: float = 10.0, name: str | None = None
    ) -> None:
        super().__init__(keeps_batches=False, name=name)
        require_at_least(1, "RunJournal", every=every)
        require_at_least(0, "RunJournal", seconds=seconds)
        self.path = path
        self.every = every
        self.seconds = seconds
        self.file: Path | None = None
        """The journal's path, once the run has started."""
        self._chosen: str | None = None  # its name, where no path was given
        self._rows: list[dict[str, Any]] = []
        self._skipped = 0
        self._written = time.monotonic()
        self._is_refused = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the journal."""
        super().on_train_start(trainer, pl_module)
        folder = trainer.log_dir or trainer.default_root_dir  # all ranks must ask
        if getattr(trainer, "fast_dev_run", False):
            return
        self.file = Path(self.path) if self.path is not None else self._choose(trainer, Path(folder))
        self._rows.clear()
        self._is_refused = False
        start = {
            "resumed": trainer.global_step > 0,
            "module": type(pl_module).__qualname__,
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "ranks": trainer.world_size,
            "precision": str(trainer.precision),
        }
        self._note(trainer, "start", trainer.global_step, start)
        self._write(trainer)

    def _choose(self, trainer: pl.Trainer, folder: Path) -> Path:
        """Return the file of the resumed run, or a file that no other run uses."""
        stem = "journal" if self.name is None else f"journal-{self.name}"
        first = folder / f"{stem}.jsonl"
        if not trainer.is_global_zero:
            return first
        if trainer.global_step:
            own = folder / (self._chosen or first.name)
            own = own if own.exists() else first
            self._chosen = own.name
            return own
        for number in count(1):
            free = first if number == 1 else folder / f"{stem}.{number}.jsonl"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                free.open("x").close()  # another run may choose at the same time
            except FileExistsError:
                continue
            except OSError:  # which writing says
                pass
            self._chosen = free.name
            return free
        return first

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Record an update of a module that does not report its updates."""
        is_new = self.steps.next(trainer, optimizer) is not None
        if is_new and not reports_updates(pl_module):
            gradient, rate = update_gradient(trainer, optimizer), optimizer.param_groups[0]["lr"]
            figures: dict[str, Any] = {}
            if not gradient.is_altered and gradient.norm.parameters:
                doubt = gradient.doubt
                figures["grad_norm"] = gradient.total if doubt is None else Doubtful(gradient.total, doubt)
            if rate is not None:
                figures["lr"] = float(rate)
            if self._skipped == trainer.global_step + 1:  # by FiniteGuard, which took the gradients
                figures |= {"grad_norm": float("nan"), "outcome": "nonfinite_skip"}
            loss = self.window_loss(trainer)
            if loss is not None:
                figures["loss"] = loss
            self._note(trainer, "update", trainer.global_step + 1, figures)
        self.window.losses.clear()

    @override
    def on_report(self, trainer: pl.Trainer, report: UpdateReport) -> None:
        """Record an update."""
        figures = {key: value for key, value in report.items() if key != "update"}
        self._note(trainer, "update", report.update, figures)

    def take_event(self, trainer: pl.Trainer, event: RunEvent) -> None:
        """Record an event."""
        if event.kind == "nonfinite" and event.details.get("skipped"):
            self._skipped = event.update
        self._note(trainer, event.kind, event.update, {**event.details, "message": event.message})
        self._write(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the buffered lines when due."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        is_full = len(self._rows) >= self.every and not self._is_refused
        if is_full or time.monotonic() - self._written >= self.seconds:
            self._write(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the metrics of a validation within a fit."""
        if self.file is None or trainer.sanity_checking:
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._note(trainer, "validation", trainer.global_step, {"metrics": metrics})
        self._write(trainer)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Record that a checkpoint is about to be written."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._chosen is not None:
            checkpoint.setdefault(KEY, {})[self.state_key] = self._chosen
        if self.file is not None:
            self._note(trainer, "checkpoint", trainer.global_step)
            self._write(trainer)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the name of the run's file."""
        name = checkpoint.get(KEY, {}).get(self.state_key)
        self._chosen = None if name is None else Path(name).name

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Record what ended the run."""
        super().on_exception(trainer, pl_module, exception)
        if self.file is not None:
            named = f"{type(exception).__name__}: {exception}"
            self._note(trainer, "exception", trainer.global_step, {"message": named})
            self._close(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the end of the run."""
        finalize_updates(pl_module)
        super().on_train_end(trainer, pl_module)
        self._note(trainer, "end", trainer.global_step)
        self._close(trainer)

    def _note(
        self, trainer: pl.Trainer, kind: str, update: int, figures: Mapping[str, Any] | None = None
    ) -> None:
        if trainer.is_global_zero and self.file is not None:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._rows.append({**(figures or {}), "kind": kind, "update": update, "time": now})

    def _write(self, trainer: pl.Trainer) -> None:
        """Append the buffered lines. A file that cannot be written causes a warning, not an error."""
        rows, self._rows = self._rows, []
        self._written = time.monotonic()
        if not rows or self.file is None or not trainer.is_global_zero:
            return
        rows = to_host(rows)
        try:
            append_durably(self.file, "".join(to_json(row) + "\n" for row in rows).encode())
        except OSError as error:
            self._rows = rows[-MOST_KEPT:]
            if not self._is_refused:
                warnings.warn(
                    f"RunJournal: {self.file} could not be written ({error.strerror or error}); the run goes "
                    "on, and its lines are kept until they can be. Free some space",
                    stacklevel=2,
                )
            self._is_refused = True
        else:
            self._is_refused = False

    def _close(self, trainer: pl.Trainer) -> None:
        self._write(trainer)
        if self._rows and self.file is not None:
            warnings.warn(
                f"RunJournal: {self.file} could not be written to the end: its last {len(self._rows):,} "
                "lines are lost",
                stacklevel=2,
            )
        self._rows = []
        self.file = None


def read_journal(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a journal. A line torn by a kill is left out with a warning.

    Args:
        path: The file. Its run may still be going on.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            rows.append(cast("dict[str, Any]", json.loads(line)))
        except ValueError:
            warnings.warn(f"{path}, line {number}: torn, left out", stacklevel=2)
    return rows
