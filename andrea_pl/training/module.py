"""One Lightning batch is one update: averaged over the tokens of the whole window, clipped once.

training_step(window)
  1 count       label tokens of the window, over all ranks
  2 accumulate  each micro-batch: loss_sum ──> manual_backward(loss_sum * world_size / tokens)
  3 finalize    the previous update, if its verdict was still on the way to the host
  4 judge       optimizer.step() ──> callbacks read the averaged gradient ──> norm ──> may it change weights?
  5 clip, step  once, by the global norm; an update that must change nothing steps without gradients
  6 schedule    moves if weights changed and it is due (see `schedule_clock`)
  7 report      one UpdateReport to the datamodule and to every callback that takes reports

On an accelerator with a fused optimizer the device judges. A bad update has `found_inf` set, its step changes
nothing, and the host learns of it during the next update. Until then the schedule may be one update ahead.
"""

import math
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from andrea_callbacks import NonFiniteError
from andrea_callbacks.hooks.lightning_state import skips_backward
from andrea_callbacks.hooks.measuring import scaler_of
from andrea_callbacks.hooks.protocols import ClipsGradients
from andrea_callbacks.hooks.reports import Outcome, UpdateReport, publish_report, spell_nonfinite
from andrea_callbacks.numerics.gradient_norm import GradientNorm, optimizer_parameters
from andrea_callbacks.numerics.host_transfer import HostCopy, can_read_at_once
from andrea_callbacks.numerics.scheduler_rollback import ScheduleMove
from andrea_pl.data.windows.window import Window
from andrea_pl.deprecation import old_name
from andrea_pl.errors import UserError
from andrea_pl.optim.clipping import Clipper
from andrea_pl.optim.next_step import supports_skip_flag
from andrea_pl.training.checks import check_policy, whole_number
from andrea_pl.training.compiled import untraced
from andrea_pl.training.lifecycle import UpdateLifecycle
from andrea_pl.training.report import build_report
from andrea_pl.training.schedule_clock import follow_new_groups
from andrea_pl.training.update import JudgedUpdate, OpenUpdate
from andrea_pl.training.verdict import (
    Fault,
    Figures,
    Measured,
    Verdict,
    decide,
    figure_row,
    is_bad,
    read_figures,
)


class TokenWeightedModule(UpdateLifecycle):
    """A module whose every update is exact, for any network, loss and data.

    A subclass defines `count_tokens` and `loss_sum`, and configures one optimizer with or without a
    scheduler. A batch that is a `Window` is an update of several micro-batches. Any other batch is a window
    with one micro-batch.

    The scheduler moves after every update that changed weights. With `"interval": "epoch"` it moves at the
    end of every epoch, and with a `"monitor"` by that metric. `"frequency": n` moves it every n-th time.

    Args:
        max_norm: Global L2 norm that gradients are clipped to; None only measures the norm.
        on_nonfinite: What to do about a NaN or Inf in loss or gradient: `raise` stops the run, `skip` skips
            the update. Neither changes weights, moments or the schedule.
        max_consecutive_skips: Consecutive skipped updates, under `skip` or with a GradScaler, above which an
            error is raised.
        min_loss_scale: With a GradScaler, an overflow at this scale or below raises an error.

    Raises:
        UserError: If a value is out of range.

    Attributes:
        updates_applied: Updates that changed weights; equal to the `last_epoch` of a scheduler that moves
            after each of them.
        updates_skipped: Attempted updates that changed nothing, including one that raised. During training
            `updates_applied + updates_skipped` is `trainer.global_step`.
        update_report: The report of the last update with a known outcome.
    """

    def __init__(
        self,
        max_norm: float | None = 1.0,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        max_consecutive_skips: int = 10,
        min_loss_scale: float = 1e-4,
    ) -> None:
        super().__init__()
        check_policy(max_norm, on_nonfinite, max_consecutive_skips, min_loss_scale)
        self.max_norm = max_norm
        self.on_nonfinite = on_nonfinite
        self.max_consecutive_skips = max_consecutive_skips
        self.min_loss_scale = min_loss_scale
        self._update: OpenUpdate | JudgedUpdate | None = None
        self._pending: tuple[JudgedUpdate, ScheduleMove | None] | None = None
        self._clipper = Clipper("torch")

    def count_tokens(self, micro_batch: Any) -> int | Tensor:
        """Return the number of valid labels of a micro-batch: an int, or a 0-d tensor."""
        raise NotImplementedError(f"{type(self).__name__} must define count_tokens(micro_batch)")

    def loss_sum(self, micro_batch: Any) -> Tensor:
        """Return the loss summed over the valid labels, a scalar attached to the graph."""
        raise NotImplementedError(f"{type(self).__name__} must define loss_sum(micro_batch)")

    def record_source_losses(self, sources: Tensor, losses: Tensor, counts: Tensor | None = None) -> None:
        """Record losses by source. Call it in `loss_sum` with the parts of its sum.

        It does nothing outside an update, and unless the datamodule has several `source_names`.

        Args:
            sources: (N,) int, `source_id` of each part; negative ones are ignored.
            losses: (N,) losses, of labels or of sequences.
            counts: (N,) labels in each part; by default 1 each.
        """
        self._accumulator.sources.add(sources, losses, counts)

    @property
    def tracks_sources(self) -> bool:
        """Whether `record_source_losses` currently records anything."""
        return self._accumulator.sources.is_open

    @override
    @untraced
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Make one update from one window and return its report."""
        window = cast("list[Any]", batch) if isinstance(batch, Window) else [batch]
        if not window:
            raise UserError("an empty window: a loader must put at least one micro-batch into each")
        optimizer = cast(LightningOptimizer, self.optimizers())
        self._clear_leftovers()
        tokens = self._count_window(window, batch_idx)
        sums = self._accumulator.run(self, self.loss_sum, window, tokens, not skips_backward(self.trainer))
        self.finalize_update()
        follow_new_groups(self.trainer)
        self._update = OpenUpdate(self.trainer.global_step + 1, _current_lr(optimizer.optimizer), sums)
        self._prepare_scaler(optimizer.optimizer)
        optimizer.step()  # calls on_before_optimizer_step, which judges and clips
        judged = self._take_judged()
        move = None
        if judged.may_have_changed_weights:
            move = self._clock.end_update(self.trainer, self.updates_applied + 1, judged.verdict is None)
        self.zero_grad(set_to_none=True)
        self._log_to_bar(judged)
        if judged.verdict is None:
            self._pending = judged, move
            report = self._build_report(judged, "pending")
        else:
            report = self._publish(judged, judged.verdict)
        self._ranks.check(self.trainer, batch_idx + 1)
        return dict(report)

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Judge the averaged gradient and clip it once. Every callback has read it by now."""
        update = self._update
        if not isinstance(update, OpenUpdate):
            return
        with update.timing(), torch.autocast(self.device.type, enabled=False):
            self._update = judged = self._judge(update, optimizer)
        if judged.verdict is not None:
            if judged.verdict.outcome != "applied":
                optimizer.zero_grad(set_to_none=True)
            self._count_skips_or_raise(judged, judged.verdict)

    def gradient_norm(self, optimizer: Optimizer) -> GradientNorm:
        """Return norms and non-finite counts of the gradients, measured once per update for all callers."""
        if not isinstance(self._update, OpenUpdate):
            return self._clip_hook().gradient_norm(optimizer)
        with self._update.timing():
            return self._clip_hook().gradient_norm(optimizer)

    def refuse_update(self, fault: str) -> None:
        """Make the coming update change nothing.

        Call it from a callback's `on_before_optimizer_step`. The update counts as not finite: it raises or is
        skipped, as `on_nonfinite` says.

        Args:
            fault: What is not finite, such as "exp_avg of layer.weight".
        """
        if not isinstance(self._update, OpenUpdate):
            raise RuntimeError("refuse_update: no update is about to step")
        self._update.refusal = fault

    @override
    def finalize_update(self) -> None:
        """Wait for the device's verdict on the last update if it is pending.

        Called before the next update steps, before validation, before the weights go into a checkpoint, and
        at the end of an epoch. On a CPU no verdict is ever pending.

        Raises:
            NonFiniteError: If the update was not finite, and `on_nonfinite` is `raise` or a limit is reached.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        judged, move = pending
        figures, coefficient = read_figures(judged.measured.figures)
        verdict = self._decide(judged.update, figures, judged.measured.norm)
        measured = judged.measured.on_host(figures, coefficient)
        if verdict.outcome != "applied":
            measured = replace(measured, coefficient=None)
            if move is not None:
                move.undo()
        judged = replace(judged, measured=measured, figures=figures, verdict=verdict)
        self._count_skips_or_raise(judged, verdict)
        self._publish(judged, verdict)

    settle_update = old_name("settle_update", finalize_update)
    note_losses = old_name("note_losses", record_source_losses)

    def _count_window(self, window: list[Any], index: int) -> int | Tensor:
        """Return the label tokens of the epoch's `index`-th window over all ranks."""
        tokens = sum(whole_number(self.count_tokens(micro_batch)) for micro_batch in window)
        if isinstance(tokens, Tensor) and tokens.device.type == "cpu":
            tokens = int(tokens)  # a number on the host stays there
        tokens = self._ranks.count_tokens(self.trainer, tokens, index)
        return 0 if skips_backward(self.trainer) else tokens

    def _judge(self, update: OpenUpdate, optimizer: Optimizer) -> JudgedUpdate:
        """Measure the gradients, decide if the host can, and clip unless the update must change nothing."""
        hook, sums = self._clip_hook(), update.sums
        max_norm = math.inf if self.max_norm is None else self.max_norm
        loss = sums.mean_loss()
        norm = hook.gradient_norm(optimizer)
        bad = is_bad(loss, norm.total, sums.tokens, max_norm)
        if self._defers_verdict(update, optimizer):
            coefficient = hook.clip_gradients(optimizer, max_norm, bad)
            row = HostCopy(figure_row(sums, loss, norm.total, bad, coefficient))
            return JudgedUpdate(
                update=update, measured=Measured(loss=loss, norm=norm, coefficient=coefficient, figures=row)
            )
        row = HostCopy(figure_row(sums, loss, norm.total, bad))
        figures, _ = read_figures(row)
        verdict = self._decide(update, figures, norm)
        clip = hook.clip_gradients(optimizer, max_norm) if verdict.outcome == "applied" else None
        measured = Measured(loss=loss, norm=norm, coefficient=clip, figures=row)
        return JudgedUpdate(update=update, measured=measured, figures=figures, verdict=verdict)

    def _defers_verdict(self, update: OpenUpdate, optimizer: Optimizer) -> bool:
        """Return whether the device can judge the update and skip its step, without waiting for the host."""
        is_empty = isinstance(update.sums.tokens, int) and not update.sums.tokens
        is_known = is_empty or update.refusal is not None
        reads_late = not can_read_at_once(self.device)
        return (
            reads_late and not is_known and scaler_of(self.trainer) is None and supports_skip_flag(optimizer)
        )

    def _decide(self, update: OpenUpdate, figures: Figures, norm: GradientNorm) -> Verdict:
        return decide(
            figures,
            update.refusal,
            skips_nonfinite=self.on_nonfinite == "skip",
            has_scaler=scaler_of(self.trainer) is not None,
            fault=Fault(module=self, norm=norm, micro_losses=update.sums.micro_losses),
        )

    def _count_skips_or_raise(self, judged: JudgedUpdate, verdict: Verdict) -> None:
        """Count consecutive skipped updates, and stop the run if the policy says so."""
        self._skips.count(verdict)
        scaler, number = scaler_of(self.trainer), judged.update.number
        scale = scaler.get_scale() if scaler is not None and verdict.outcome == "scaler_skip" else None
        reason = self._skips.reason_to_stop(
            verdict, number, self.max_consecutive_skips, scale, self.min_loss_scale
        )
        if reason is not None:
            self._publish(judged, replace(verdict, outcome="nonfinite_raise"))
            raise NonFiniteError(
                f"update {number}: {spell_nonfinite(verdict.nonfinite)}; {reason}. Weights, moments and "
                "schedule are as they were before this update"
            )

    def _take_judged(self) -> JudgedUpdate:
        update, self._update = self._update, None
        if not isinstance(update, JudgedUpdate):
            raise RuntimeError(
                f"{type(self).__name__}.on_before_optimizer_step must call super(), which clips"
            )
        return update

    def _publish(self, judged: JudgedUpdate, verdict: Verdict) -> UpdateReport:
        """Count the update, keep its report and hand it to the callbacks."""
        if verdict.outcome == "applied":
            self.updates_applied += 1
        else:
            self.updates_skipped += 1
        self.update_report = self._build_report(judged, verdict.outcome, verdict.nonfinite)
        publish_report(self.trainer, self.update_report)
        return self.update_report

    def _build_report(
        self, judged: JudgedUpdate, outcome: Outcome, nonfinite: str | None = None
    ) -> UpdateReport:
        update, scaler = judged.update, scaler_of(self.trainer)
        return build_report(
            number=update.number,
            lr=update.lr,
            outcome=outcome,
            measured=judged.measured,
            figures=judged.figures,
            tokens=update.sums.tokens if judged.figures is None else judged.figures.tokens,
            seconds=update.clip_seconds,
            skipped=self.updates_skipped,
            loss_scale=None if scaler is None else scaler.get_scale(),
            nonfinite=nonfinite,
        )

    def _clear_leftovers(self) -> None:
        """Drop the state of an update that an exception interrupted."""
        self.zero_grad(set_to_none=True)
        was_open, self._update = self._update is not None, None
        scaler = scaler_of(self.trainer)
        if was_open and scaler is not None:
            scaler.update(scaler.get_scale())  # resets its note that gradients were unscaled
        self._accumulator.refuse_leftovers()

    @override
    def _drop_update(self) -> None:
        self._update = self._pending = None

    def _prepare_scaler(self, optimizer: Optimizer) -> None:
        """Unscale gradients that Lightning leaves to a fused optimizer; give the scaler one to check."""
        scaler = scaler_of(self.trainer)
        if scaler is None:
            return
        parameters = optimizer_parameters(optimizer)
        if all(parameter.grad is None for parameter in parameters):
            parameters[0].grad = torch.zeros_like(parameters[0])
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)

    def _clip_hook(self) -> Clipper | ClipsGradients:
        strategy = self.trainer.strategy
        return strategy if isinstance(strategy, ClipsGradients) else self._clipper

    def _log_to_bar(self, judged: JudgedUpdate) -> None:
        """Log figures for Lightning's progress bar and monitors."""
        if judged.verdict is not None and judged.verdict.outcome == "empty":
            return
        measured = judged.measured
        for key, value in (("loss", measured.loss), ("grad_norm", measured.norm.total)):
            # the mean over an epoch, which batch_size is for, is the summary's business
            self.log(f"train/{key}", value.float(), prog_bar=True, logger=False, batch_size=1)


def _current_lr(optimizer: Optimizer) -> float | None:
    """Return the first group's learning rate, None if the optimizer sets its rate itself."""
    lr = optimizer.param_groups[0]["lr"]
    return None if lr is None else float(lr)
