"""Flags NaN and Inf at the update in which they appear, traces them, and keeps them out of the weights."""

from contextlib import suppress
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from andrea_callbacks.forensics.investigation import (
    Investigation,
    NonFiniteError,
    NonFiniteWarning,
    first_bad_state,
    spell_bad_loss,
)
from andrea_callbacks.forensics.options import ReportOptions
from andrea_callbacks.forensics.overflows import Overflows
from andrea_callbacks.forensics.replay import ReplayFunction
from andrea_callbacks.forensics.sample_identity import DecodeFunction, NameFunction
from andrea_callbacks.hooks.events import RunEvent, publish_event
from andrea_callbacks.hooks.gradient_watch import update_gradient
from andrea_callbacks.hooks.measuring import is_unscaled, measured_norm, optimizer_place, scaler_of
from andrea_callbacks.hooks.protocols import RefusesUpdates, reports_updates
from andrea_callbacks.hooks.reports import UpdateReport, spell_nonfinite
from andrea_callbacks.hooks.terminal import warn
from andrea_callbacks.hooks.update_window import UpdateWindow, WindowCallback
from andrea_callbacks.numerics.bounds import require_at_least
from andrea_callbacks.numerics.gradient_norm import optimizer_parameters
from andrea_callbacks.numerics.host_transfer import HostCopy, reduce_over_ranks
from andrea_callbacks.numerics.scheduler_rollback import ScheduleMove

Policy = Literal["raise", "skip", "flag"]


class FiniteGuard(ReportOptions, WindowCallback):
    """Flags NaN and Inf in the loss, the gradients, the weights and the optimizer's state before each step.

    A module that reports its updates judges its loss and gradients itself and decides what to do. This
    callback tells it what it finds in weights and optimizer state, and the module treats that alike. In any
    other module this callback judges and acts, which reads one row of numbers per update on the host. All
    ranks decide alike. A GradScaler's own overflow (finite loss, bad gradient) is normal operation and is
    not flagged. The callback records the scale, warns after five overflows in a row, and raises after more
    than `max_consecutive`.

    For the first hits the callback searches the origin. It names a NaN or Inf in the batch itself by key and
    row, without running anything again. If the project's own code raises first, a note on that exception
    names it. Otherwise the callback runs the update's micro-batches again, through the module's
    `sequence_losses`, its `loss_sum`, or `replay`, never through `training_step`. It finds the micro-batch,
    its rows, and the first module with a bad output. If all outputs were sound, it finds the first bad
    gradient of the backward pass. Since masks are made of -Inf, -Inf in an output counts only where nothing
    else is bad.

    The report is a folder `reports/update-000412-nonfinite` in the trainer's log folder: `report.json`,
    `tensors.safetensors` with the bad tensors, and `sequences.txt` if text can be decoded. If micro-batches
    cannot be run again, with sharded parameters, and if the replay raises, the report says which
    micro-batch's loss and which parameter's gradient were bad, and that more is not available. Losses that
    wait for other ranks themselves (gathered contrastive losses) cannot be run again on several ranks.

    Under `skip` the callback sets gradients to None, so that the optimizer's step does nothing, and undoes
    the move of a scheduler that Lightning steps every batch in `on_train_batch_end`. It does not touch a
    scheduler that moves once an epoch or monitors a metric. `trainer.global_step` still advances: it counts
    attempts. A GradScaler's scale falls as after an overflow. Once weights or optimizer state hold a NaN,
    every update is skipped until `max_consecutive`. What the forward pass wrote, such as BatchNorm's running
    statistics, stays. Buffers are not checked, since masks among them may hold -Inf.

    Args:
        policy: For modules that do not decide themselves. `raise` stops before the step and leaves weights
            and optimizer state unchanged. `skip` skips the update. `flag` warns, continues, and lets the NaN
            reach the weights.
        max_consecutive: Consecutive bad updates, under `skip` and `flag`, above which the callback raises;
            None for no limit.
        state_every: Updates between two checks of weights and optimizer state, each of which reads a number
            on the host; None for no checks.
        max_reports: Maximum number of reports in a run.
        replay: Takes the module and a micro-batch; returns losses, (B,) or 0-d, attached to the graph.
        identify: Takes a micro-batch of any kind; returns a name for each of its rows.
        decode: Turns ids into text. The default is the tokenizer of the module or datamodule.
        folder: Folder for reports, in place of the log folder.
        name: Tells instances in the same trainer apart.

    Raises:
        ValueError: If an option is out of range; the message names it.

    Metrics recorded:
        train/nonfinite: Updates so far with a NaN or Inf.
        train/loss_scale: With a GradScaler, in modules that do not report it themselves.
    """

    def __init__(
        self,
        policy: Policy = "raise",
        max_consecutive: int | None = 10,
        state_every: int | None = 100,
        max_reports: int = 1,
        replay: ReplayFunction | None = None,
        decode: DecodeFunction | None = None,
        folder: str | None = None,
        name: str | None = None,
        identify: NameFunction | None = None,
    ) -> None:
        super().__init__(name=name)
        if policy not in get_args(Policy):
            raise ValueError(f"FiniteGuard: policy must be 'raise', 'skip' or 'flag', got {policy!r}")
        require_at_least(0, "FiniteGuard", max_consecutive=max_consecutive, max_reports=max_reports)
        require_at_least(1, "FiniteGuard", state_every=state_every)
        self.policy: Policy = policy
        self.max_consecutive = max_consecutive
        self.state_every = state_every
        self.max_reports = max_reports
        self._set_report_options(replay, identify, decode, folder)
        self.reset()

    @override
    def reset(self) -> None:
        """Reset what an earlier fit left."""
        self.flagged: int = 0
        """Updates so far with a NaN or Inf."""
        self._consecutive: dict[str, int] = {}
        self._overflows = Overflows(self.max_consecutive)
        self._bad_state: dict[str, tuple[str, Tensor]] = {}
        self._reports = 0
        self._flagged_at = 0
        self._moves: list[ScheduleMove] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drop the state of an update that was cut short."""
        super().on_train_start(trainer, pl_module)
        self._bad_state.clear()
        self._moves.clear()

    @override
    def on_report(self, trainer: pl.Trainer, report: UpdateReport) -> None:
        """Flag what the module found, and search for its origin. The update changed nothing."""
        if report.nonfinite is not None and report.outcome != "scaler_skip":
            fault, update = report.nonfinite, report.update
            state = next((each for each in self._bad_state.values() if each[0] == fault), None)
            found = self._investigate(trainer, update, fault, state)
            self._flag(trainer, update, "0", fault, found, skipped=report.outcome == "nonfinite_skip")
        self.record(trainer, report.update, {"train/nonfinite": self.flagged})

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Check weights and state when due, and loss and gradients if the module does not."""
        update = trainer.global_step + 1
        place = optimizer_place(trainer, optimizer)
        step = self.steps.next(trainer, optimizer)
        state = None if step is None else self._look_at_state(trainer, optimizer, place, step)
        if reports_updates(pl_module):
            if state is not None and isinstance(pl_module, RefusesUpdates):
                pl_module.refuse_update(state[0])
            return
        losses, self.window.losses = self.window.losses, []
        fault = self._judge(trainer, optimizer, place, losses) if state is None else state[0]
        if fault is not None:
            self._meet(trainer, optimizer, place, fault, state, is_first=step is not None)
        elif step is not None:
            self._consecutive[place] = 0
        self.record(trainer, update, {"train/nonfinite": self.flagged})

    def _meet(
        self,
        trainer: pl.Trainer,
        optimizer: Optimizer,
        place: str,
        fault: str,
        state: tuple[str, Tensor] | None,
        is_first: bool,
    ) -> None:
        """Flag a fault and act on it. A step whose optimizer evaluates the loss again counts once."""
        update, found = trainer.global_step + 1, None
        if is_first or not self._consecutive.get(place):
            self._consecutive[place] = self._consecutive.get(place, 0) + 1
            found = self._investigate(trainer, update, fault, state)
            self._flag(trainer, update, place, fault, found, skipped=self.policy == "skip")
        self._act(trainer, optimizer, place, fault, found, is_first)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Undo the scheduler's move after a skipped update."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        for move in self._moves:
            move.end().undo()
        self._moves.clear()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "steps": self.steps.state_dict(),
            "flagged": self.flagged,
            "consecutive": dict(self._consecutive),
            "overflows": dict(self._overflows.in_a_row),
            "reports": self._reports,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the counts."""
        self.steps.load_state_dict(state_dict.get("steps", {}))
        self.flagged = state_dict["flagged"]
        self._consecutive = dict(state_dict.get("consecutive", {}))
        self._overflows.in_a_row = dict(state_dict.get("overflows", {}))
        self._reports = state_dict.get("reports", 0)

    def _judge(
        self, trainer: pl.Trainer, optimizer: Optimizer, place: str, losses: list[Tensor]
    ) -> str | None:
        """Return what is not finite in losses and gradients, or None; the same on all ranks."""
        first, norm = update_gradient(trainer, optimizer).norm, measured_norm(trainer, optimizer)
        wide = norm.total.dtype
        flags = [(~torch.isfinite(norm.total)).to(wide)]
        flags += [(~torch.isfinite(loss).all()).to(flags[0].device, wide) for loss in losses]
        own = torch.stack(flags)
        shared = reduce_over_ranks(torch.stack([own[0], own[1:].sum()]))
        bad_gradient, bad_losses, *own_losses = HostCopy(torch.cat([shared, own[1:]])).read()
        parts: list[str] = []
        if bad_losses:
            parts.append(spell_bad_loss(own_losses))
        elif not bad_gradient or scaler_of(trainer) is not None:
            scale = self._overflows.follow(trainer, place, bool(bad_gradient))
            if scale is not None:
                self.record(trainer, trainer.global_step + 1, {"train/loss_scale": scale})
            return None
        module = trainer.lightning_module
        name = (first.first_nonfinite(module) or norm.first_nonfinite(module)) if bad_gradient else None
        parts += [f"the gradient of {name}"] if name else []
        return " and ".join(parts) or "the norm of the gradients"

    def _look_at_state(
        self, trainer: pl.Trainer, optimizer: Optimizer, place: str, step: int
    ) -> tuple[str, Tensor] | None:
        """Return the first tensor of weights and optimizer state with a NaN or Inf, when a check is due.

        After a hit every update checks, until the tensor is finite again.
        """
        kept = self._bad_state.pop(place, None)
        if self.state_every is None:
            return None
        if step % self.state_every and kept is None:  # the last of each `state_every` steps of this optimizer
            return None
        found = first_bad_state(trainer.lightning_module, optimizer)
        if found is not None:
            self._bad_state[place] = found
        return self._bad_state.get(place)

    def _investigate(
        self, trainer: pl.Trainer, update: int, fault: str, state: tuple[str, Tensor] | None
    ) -> str | None:
        """Search for the origin of a fault while reports are left; return the finding in words."""
        if self._reports >= self.max_reports:
            return None
        self._reports += 1
        tensor = None if state is None else state[1]
        window = self.window_of(update)
        return self._investigation.search(trainer, update, fault, tensor, window, self._sound_window())

    @property
    def _investigation(self) -> Investigation:
        return Investigation(self)

    def _sound_window(self) -> UpdateWindow | None:
        """Return the window of the previous update, if nothing was flagged in it."""
        return None if self._flagged_at == self.previous.number else self.previous

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Add a note to an exception of the project's code if the batch holds NaN or Inf."""
        update = trainer.global_step + 1
        found: list[dict[str, Any]] = []
        if isinstance(exception, Exception) and not isinstance(exception, NonFiniteError):
            with suppress(Exception):  # the project's own exception is what matters
                windows = self.window_of(update), self._sound_window()
                found = self._investigation.look_into_batches(trainer, *windows)
        if found:
            message = f"update {update}: " + "; ".join(each["words"] for each in found)
            exception.add_note(message)
            warn(f"{message}; then came {type(exception).__name__}", category=NonFiniteWarning)
            details = {"fault": "the batch", "batch": found, "skipped": False}
            event = RunEvent(kind="nonfinite", update=update, message=message, details=details)
            publish_event(trainer, event)
        super().on_exception(trainer, pl_module, exception)

    def _flag(
        self, trainer: pl.Trainer, update: int, place: str, fault: str, found: str | None, skipped: bool
    ) -> None:
        self.flagged += 1
        self._flagged_at = update
        message = f"update {update}: {spell_nonfinite(fault)}" + (f"; {found}" if found else "")
        warn(message, category=NonFiniteWarning)
        details = {"fault": fault, "skipped": skipped, "optimizer": place}
        publish_event(trainer, RunEvent(kind="nonfinite", update=update, message=message, details=details))

    def _act(
        self,
        trainer: pl.Trainer,
        optimizer: Optimizer,
        place: str,
        fault: str,
        found: str | None,
        is_first: bool,
    ) -> None:
        update, count = trainer.global_step + 1, self._consecutive[place]
        is_last = self.max_consecutive is not None and count > self.max_consecutive
        if self.policy == "raise" or is_last:
            self.record(trainer, update, {"train/nonfinite": self.flagged})
            why = "" if self.policy == "raise" else f", {count} in a row"
            state = "weights and optimizer state are as before it"
            if not is_first:
                state = f"{type(optimizer).__name__} was within its step, and may have moved the weights"
            raise NonFiniteError(
                f"update {update}: {spell_nonfinite(fault)}{why}; {state}" + (f"; {found}" if found else "")
            )
        if self.policy == "skip":
            scaler = scaler_of(trainer)
            if scaler is not None and not is_unscaled(scaler, optimizer):
                scaler.unscale_(optimizer)  # a scaler must have seen gradients before they go
            for parameter in optimizer_parameters(optimizer):
                parameter.grad = None
            if trainer.lightning_module.automatic_optimization:
                self._moves = [
                    ScheduleMove(config.scheduler)
                    for config in trainer.lr_scheduler_configs
                    if config.interval == "step" and not config.reduce_on_plateau
                ]
