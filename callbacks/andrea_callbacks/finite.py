"""NaN and Inf: flagged at the update in which they appear, traced to their origin, kept from the weights."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from andrea_callbacks.bundle import Bundle, write_bundle
from andrea_callbacks.events import RunEvent, publish_event
from andrea_callbacks.gradient_watch import update_gradient
from andrea_callbacks.gradients import local_gradient, optimizer_parameters, real_values, squared_norms
from andrea_callbacks.host import HostCopy, agree
from andrea_callbacks.identity import (
    DecodeFunction,
    Identity,
    NameFunction,
    decoder,
    gathered,
    identity_of,
    row_names,
    rows_in,
    spell,
    text_of,
    unit_of,
)
from andrea_callbacks.measuring import is_unscaled, measured_norm, optimizer_place, scaler_of
from andrea_callbacks.origin import Origin, find_origin
from andrea_callbacks.protocols import RefusesUpdates, reports_updates
from andrea_callbacks.replay import ReplayFunction, ReplayUnavailable, loss_function, replay_failed
from andrea_callbacks.schedules import ScheduleMove
from andrea_callbacks.tensors import Fault, faults_in
from andrea_callbacks.terminal import warn
from andrea_callbacks.window import UpdateWindow, WindowCallback

Policy = Literal["raise", "skip", "flag"]


FALLING_SCALE_UPDATES = 5
"""Overflows in a row after which a falling loss scale is worth a warning."""


class NonFiniteWarning(UserWarning):
    """A NaN or Inf was seen in a loss, a gradient, a weight or the optimizer's state."""


class NonFiniteError(RuntimeError):
    """A NaN or Inf was seen; weights, optimizer state and schedule are as they were before the update."""


class FiniteGuard(WindowCallback):
    """Flags NaN and Inf in the loss, the gradients, the weights and the optimizer's state before each step.

    With a module that reports its updates the verdict on loss and gradients is the module's, which also
    decides what to do; what is found in weights and state it is told, and treats alike. In any other module
    this callback judges and acts, which reads one row of numbers an update on the host. All ranks decide
    alike. A GradScaler's own overflow (finite loss, bad gradient) is normal operation and not flagged; its
    scale is recorded, five in a row are warned about, and more than `max_consecutive` raise.

    On the first hits the origin is searched for. A NaN or Inf in the batch itself is named with its key and
    row, without running anything again. If the project's own code raises over it first, a note on that
    exception names it. Then the update's micro-batches are run again, through the module's `sequence_losses`,
    its `loss_sum`, or `replay`, never through `training_step`. Found are the micro-batch, its rows, and the
    first module whose output was bad, or, where the outputs were sound, the first parameter of the backward
    pass whose gradient was. -Inf in outputs is what masks are made of: it counts only where nothing else is
    bad. The report is a folder `reports/update-000412-nonfinite` in the trainer's log folder: `report.json`,
    `tensors.safetensors` with what was bad, `sequences.txt` where text can be decoded. With no way to run
    micro-batches again, and with sharded parameters, the report says which micro-batch's loss and which
    parameter's gradient were bad, and that more is not available; likewise where the replay raises. Losses
    that wait for other ranks by themselves (gathered contrastive losses) cannot be run again on several
    ranks.

    Under `skip` gradients are set to None, so that the optimizer's step does nothing, and a scheduler that
    Lightning steps all the same is put back in `on_train_batch_end`; one that moves once an epoch, or waits
    for a metric, is left alone. `trainer.global_step` does advance: it counts attempts. With a GradScaler the
    scale falls as after an overflow. Weights or state that have a NaN do not mend: every update is skipped
    from then on, until `max_consecutive`. What the forward pass has written by then, such as BatchNorm's
    running statistics, stays as it is; buffers are not looked at, since masks among them may hold -Inf.

    Args:
        policy: In modules that do not decide themselves: `raise` stops before the step, with weights and
            optimizer state as they were; `skip` passes over the update; `flag` warns and goes on, and lets
            the NaN into the weights.
        max_consecutive: Under `skip` and `flag`, more bad updates in a row than this raise; None for no
            limit.
        state_every: Updates between two looks at weights and optimizer state, which read a number on the
            host; None for none.
        max_reports: Most reports in a run.
        replay: Takes module and micro-batch and returns losses, (B,) or 0-d, with their graph.
        identify: Takes a micro-batch, whatever it is, and returns a name for each of its rows.
        decode: Turns ids into text; the tokenizer of module or datamodule when left out.
        folder: Where reports go, in place of the log folder.
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
        if max_consecutive is not None and max_consecutive < 0:
            raise ValueError(f"FiniteGuard: max_consecutive must be at least 0, got {max_consecutive}")
        if state_every is not None and state_every < 1:
            raise ValueError(f"FiniteGuard: state_every must be at least 1 update, got {state_every}")
        if max_reports < 0:
            raise ValueError(f"FiniteGuard: max_reports must be at least 0, got {max_reports}")
        self.policy: Policy = policy
        self.max_consecutive = max_consecutive
        self.state_every = state_every
        self.max_reports = max_reports
        self.replay = replay
        self.identify = identify
        self.decode = decode
        self.folder = folder
        self.reset()

    @override
    def reset(self) -> None:
        """Forget an earlier fit."""
        self.flagged: int = 0
        """Updates so far with a NaN or Inf."""
        self._consecutive: dict[str, int] = {}
        self._overflows: dict[str, int] = {}
        self._bad_state: dict[str, tuple[str, Tensor]] = {}
        self._reports = 0
        self._flagged_at = 0
        self._moves: list[ScheduleMove] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget an update that broke off."""
        super().on_train_start(trainer, pl_module)
        self._bad_state.clear()
        self._moves.clear()

    @override
    def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
        """Flag what the module found, and search for its origin; nothing of the update was done."""
        if report.get("nonfinite") is not None and report["outcome"] != "scaler_skip":
            fault, update = report["nonfinite"], report["update"]
            state = next((each for each in self._bad_state.values() if each[0] == fault), None)
            found = self._investigate(trainer, update, fault, state)
            self._flag(trainer, update, "0", fault, found, skipped=report["outcome"] == "nonfinite_skip")
        self.record(trainer, report["update"], {"train/nonfinite": self.flagged})

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Look at weights and state where it is time, and at loss and gradients where the module does not."""
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
        """Flag a fault and act on it; an optimizer that evaluates its loss again is counted once a step."""
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
        """Put back the schedule after an update that was passed over."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        for move in self._moves:
            move.end().take_back()
        self._moves.clear()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "steps": self.steps.state_dict(),
            "flagged": self.flagged,
            "consecutive": dict(self._consecutive),
            "overflows": dict(self._overflows),
            "reports": self._reports,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the counts."""
        self.steps.load_state_dict(state_dict.get("steps", {}))
        self.flagged = state_dict["flagged"]
        self._consecutive = dict(state_dict.get("consecutive", {}))
        self._overflows = dict(state_dict.get("overflows", {}))
        self._reports = state_dict.get("reports", 0)

    def _judge(
        self, trainer: pl.Trainer, optimizer: Optimizer, place: str, losses: list[Tensor]
    ) -> str | None:
        """Return what is not finite in losses and gradients, None where all is well; alike on all ranks."""
        first, norm = update_gradient(trainer, optimizer).norm, measured_norm(trainer, optimizer)
        wide = norm.total.dtype
        flags = [(~torch.isfinite(norm.total)).to(wide)]
        flags += [(~torch.isfinite(loss).all()).to(flags[0].device, wide) for loss in losses]
        own = torch.stack(flags)
        shared = agree(torch.stack([own[0], own[1:].sum()]))
        bad_gradient, bad_losses, *own_losses = HostCopy(torch.cat([shared, own[1:]])).read()
        parts: list[str] = []
        if bad_losses:
            bad = next((place for place, flag in enumerate(own_losses, start=1) if flag), None)
            if bad is None:
                parts.append("the loss of another rank's micro-batch")
            elif len(own_losses) > 1:
                parts.append(f"the loss of micro-batch {bad} of {len(own_losses)}")
            else:
                parts.append("the loss")
        elif not bad_gradient or scaler_of(trainer) is not None:
            self._follow_scale(trainer, place, bool(bad_gradient))
            return None
        module = trainer.lightning_module
        name = (first.first_nonfinite(module) or norm.first_nonfinite(module)) if bad_gradient else None
        parts += [f"the gradient of {name}"] if name else []
        return " and ".join(parts) or "the norm of the gradients"

    def _follow_scale(self, trainer: pl.Trainer, place: str, overflows: bool) -> None:
        """Count a GradScaler's overflows, which are its own affair unless they never end."""
        scaler = scaler_of(trainer)
        if scaler is None:
            return
        update, scale = trainer.global_step + 1, float(scaler.get_scale())
        self.record(trainer, update, {"train/loss_scale": scale})
        self._overflows[place] = count = self._overflows.get(place, 0) + 1 if overflows else 0
        told = f"update {update}: {count} overflows in a row, the loss scale is down to {scale:g}"
        if self.max_consecutive is not None and count > self.max_consecutive:
            raise NonFiniteError(
                f"{told}: the gradients are not finite whatever it is; weights and optimizer state are as "
                "before. FiniteGuard's max_consecutive bears more"
            )
        if count == FALLING_SCALE_UPDATES:
            warn(f"{told}; check the learning rate, or use bf16-mixed", category=NonFiniteWarning)

    def _look_at_state(
        self, trainer: pl.Trainer, optimizer: Optimizer, place: str, step: int
    ) -> tuple[str, Tensor] | None:
        """Return the first tensor of weights and optimizer state with a NaN or Inf, when it is time to look.

        Once something bad was found every update looks, until it is mended.
        """
        kept = self._bad_state.pop(place, None)
        if self.state_every is None:
            return None
        if step % self.state_every and kept is None:  # the last of each `state_every` steps of this optimizer
            return None
        named = list(_state_tensors(trainer.lightning_module, optimizer))
        if named:
            values = HostCopy(agree(_bad_counts([tensor for _, tensor in named]))).read()
            found = next((each for each, count in zip(named, values, strict=True) if count), None)
            if found is not None:
                self._bad_state[place] = found
        return self._bad_state.get(place)

    def _investigate(
        self, trainer: pl.Trainer, update: int, fault: str, state: tuple[str, Tensor] | None
    ) -> str | None:
        """Search for the origin of a fault and write a report; return in words what was found.

        A fault in weights or state has no origin in the update: the tensor itself is reported.
        """
        if self._reports >= self.max_reports:
            return None
        self._reports += 1
        report: dict[str, Any] = {"kind": "nonfinite", "update": update, "fault": fault}
        bundle, found, failed = Bundle(figures=report), list[dict[str, Any]](), list[str]()
        if state is not None:
            bundle.tensors["state"] = state[1]
        else:
            in_batch = gathered(self._look_into_batches(trainer, self.window_of(update)))
            report |= {"batch": in_batch} if in_batch else {}
            try:
                found = self._search(trainer, update, bundle)
            except ReplayUnavailable as reason:
                failed = [str(reason)]
            except Exception as error:  # the user's code, or what it was given: the run goes on
                failed = [replay_failed(error)]
                warn(f"update {update}: {failed[0]}", category=NonFiniteWarning)
            found, failed = [*in_batch, *gathered(found)], gathered(failed)
            bundle.texts = gathered(bundle.texts)
            nowhere = "the fault did not come again when the update was run again"
            origins = found[len(in_batch) :]
            report["origin"] = origins or ({"unavailable": failed[0]} if failed else nowhere)
        lines = [each["words"] for each in found]
        place = write_bundle(trainer, self.folder, f"update-{update:06d}-nonfinite", bundle)
        if place is not None:
            lines.append(f"report: {place}")
        return "; ".join(lines) or None

    def _look_into_batches(self, trainer: pl.Trainer, window: UpdateWindow | None) -> list[dict[str, Any]]:
        """Return what is not finite in this rank's micro-batches themselves.

        What the batches of the update before had too is left out if that update was sound: NaN may stand for
        a missing target.
        """
        micro_batches = [] if window is None else window.micro_batches
        sound = [] if self._flagged_at == self.previous.number else self.previous.micro_batches
        usual = {(fault.key, fault.value) for each in sound for fault in faults_in(each)}
        return [
            self._describe_fault(trainer, micro_batch, number, len(micro_batches), fault)
            for number, micro_batch in enumerate(micro_batches, start=1)
            for fault in faults_in(micro_batch)
            if (fault.key, fault.value) not in usual
        ]

    def _describe_fault(
        self, trainer: pl.Trainer, micro_batch: Any, number: int, count: int, fault: Fault
    ) -> dict[str, Any]:
        names = row_names(micro_batch, self.identify)
        count_of_rows = rows_in(micro_batch, names)
        if count_of_rows is not None and fault.length != count_of_rows:
            names = micro_batch = None  # the tensor's rows are not those of the batch
        rows = [identity_of(trainer, micro_batch, number, row, names) for row in fault.rows]
        where = self._spell_rows(number, count, rows)
        key = f", under {fault.key}" if fault.key else ""
        return {
            "words": f"{where}: {fault.value} in the batch itself{key}",
            "value": fault.value,
            "key": fault.key,
            "rank": trainer.global_rank,
            "micro_batch": number,
            "rows": rows,
        }

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Say whether the batch that somebody's code raised over has NaN or Inf in it."""
        update = trainer.global_step + 1
        found: list[dict[str, Any]] = []
        if isinstance(exception, Exception) and not isinstance(exception, NonFiniteError):
            with suppress(Exception):  # the project's own exception is what matters
                found = self._look_into_batches(trainer, self.window_of(update))
        if found:
            message = f"update {update}: " + "; ".join(each["words"] for each in found)
            exception.add_note(message)
            warn(f"{message}; then came {type(exception).__name__}", category=NonFiniteWarning)
            details = {"fault": "the batch", "batch": found, "skipped": False}
            publish_event(
                trainer, RunEvent(kind="nonfinite", update=update, message=message, details=details)
            )
        super().on_exception(trainer, pl_module, exception)

    def _search(self, trainer: pl.Trainer, update: int, bundle: Bundle) -> list[dict[str, Any]]:
        """Return what is known of the fault's origin on this rank."""
        module, window = trainer.lightning_module, self.window_of(update)
        losses_of = loss_function(module, self.replay)
        if window is None:
            raise ReplayUnavailable("attribution is not available: the micro-batches are not all at hand")
        origin = find_origin(trainer, module, window, losses_of)
        return [] if origin is None else [self._describe(trainer, window, origin, bundle)]

    def _describe(
        self, trainer: pl.Trainer, window: UpdateWindow, origin: Origin, bundle: Bundle
    ) -> dict[str, Any]:
        micro_batch = window.micro_batches[origin.micro_batch - 1]
        names = row_names(micro_batch, self.identify) if origin.rows else None
        rows = [identity_of(trainer, micro_batch, origin.micro_batch, row, names) for row in origin.rows]
        decode = decoder(trainer, trainer.lightning_module, self.decode)
        for row, identity in zip(origin.rows, rows, strict=True):
            text = text_of(micro_batch, row, decode)
            if text is not None:
                bundle.texts.append((spell(identity), text))
        bundle.tensors |= origin.tensors
        where = self._spell_rows(origin.micro_batch, len(window.micro_batches), rows)
        return {
            "words": f"{where}: {origin.spell()}",
            "phase": origin.phase,
            "value": origin.value,
            "rank": trainer.global_rank,
            "micro_batch": origin.micro_batch,
            "micro_batches": len(window.micro_batches),
            "sequences": rows,
            "module": origin.module,
            "parameter": origin.parameter,
            "negative_infinity_before": origin.negative,
        }

    @staticmethod
    def _spell_rows(number: int, count: int, rows: list[Identity]) -> str:
        """Return a micro-batch and its rows, the first of them by its name, as a person reads it."""
        where = f"micro-batch {number} of {count}"
        if rows:
            first, rest = rows[0], f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            called = first.get("name") or (spell(first) if "document" in first else None)
            where += f", {unit_of(first)} {first['row']}{f' ({called})' if called else ''}{rest}"
        return where

    def _flag(
        self, trainer: pl.Trainer, update: int, place: str, fault: str, found: str | None, skipped: bool
    ) -> None:
        self.flagged += 1
        self._flagged_at = update
        message = f"update {update}: {fault} is not finite" + (f"; {found}" if found else "")
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
                f"update {update}: {fault} is not finite{why}; {state}" + (f"; {found}" if found else "")
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


def _state_tensors(pl_module: pl.LightningModule, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of weights and optimizer state, floating-point ones."""
    names = {id(each): name for name, each in pl_module.named_parameters()}
    for parameter in optimizer_parameters(optimizer):
        name = names.get(id(parameter), "a parameter")
        state = optimizer.state.get(parameter, {})
        for label, tensor in [(name, parameter), *((f"{key} of {name}", state[key]) for key in state)]:
            if not isinstance(tensor, Tensor) or not tensor.numel():
                continue
            if tensor.is_floating_point() or tensor.is_complex():
                yield label, local_gradient(tensor.detach())


def _bad_counts(tensors: list[Tensor]) -> Tensor:
    """Return (T,) how many elements of each tensor are NaN or Inf, on the first one's device."""
    return squared_norms([real_values(each) for each in tensors])[:, 1].contiguous()
