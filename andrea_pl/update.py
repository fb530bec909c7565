"""One Lightning batch is one update, averaged over the tokens of the whole window, clipped once.

training_step(window)
  count label tokens ──> all-reduce
  each micro-batch: loss_sum ──> manual_backward(loss_sum * world_size / tokens)   arrives averaged
                       └── note_losses: which source lost how much, where several are named
  settle the update before, where its verdict was still on its way
  optimizer.step()
    ├─ callbacks' on_before_optimizer_step    read the averaged gradient before clipping
    ├─ ours: norm ──> verdict ──> clip, or set gradients to None so that the step changes nothing
    └─ the real step
  scheduler.step(), only if weights changed and it is due (see scheduling.py) ──> zero_grad ──> report

On an accelerator with a fused optimizer the verdict is the device's: a bad update has found_inf set, its step
changes nothing, and the host reads so during the next update. Until then the schedule may be one ahead.
"""

import math
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from andrea_callbacks.clip_norm import PreClipNorm
from andrea_callbacks.finite import FiniteGuard, NonFiniteError
from andrea_callbacks.gradients import GradientNorm, optimizer_parameters
from andrea_callbacks.host import HostCopy, side_by_side, widest
from andrea_callbacks.protocols import ClipsGradients, NamesSources
from andrea_callbacks.resume import ExactResume
from andrea_callbacks.schedules import ScheduleMove
from andrea_callbacks.sources import SourceMonitor
from andrea_callbacks.updates import EpochSummary, UpdateLog, publish_report
from andrea_pl.attempt import Attempt
from andrea_pl.compiled import compile_like, match_wrappers, plain_name, strip_wrappers, untraced
from andrea_pl.data.windows import Window, WindowLoader
from andrea_pl.errors import UserError
from andrea_pl.optim.clipping import Clipper, can_hold
from andrea_pl.optim.rates import can_take_new_groups
from andrea_pl.optim.schedules import FactorLR
from andrea_pl.ranks import compare_lengths, is_last_window, unequal_windows
from andrea_pl.saving import DurableCheckpoint
from andrea_pl.scheduling import ScheduleClock, epochs_over, needs_closure
from andrea_pl.strategies.synchronization import only_last_synchronizes

FALLING_SCALE_UPDATES = 5
"""Consecutive overflows after which a falling loss scale is worth a warning."""


class TokenWeightedModule(pl.LightningModule):
    """A module whose every update is exact, whatever network, loss and data it has.

    A subclass gives `count_tokens` and `loss_sum` and configures one optimizer, with or without a scheduler.
    A batch that is a `Window` is an update of several micro-batches; any other batch is a window of one.

    The scheduler moves after every update that changed weights. With `"interval": "epoch"` it moves at the
    end of every epoch, and with a `"monitor"` by that metric; `"frequency": n` moves it every n-th time.

    Args:
        max_norm: Global L2 norm that gradients are clipped to; None measures the norm and clips nothing.
        on_nonfinite: What a NaN or Inf in loss or gradient does: `raise` stops, `skip` passes over the
            update. Neither changes a weight, a moment or the schedule.
        max_consecutive_skips: Under `skip`, or with a GradScaler, more skipped updates in a row than this
            raise.
        min_loss_scale: With a GradScaler, an overflow at this scale or below raises.

    Raises:
        UserError: If a value is out of range.

    Attributes:
        updates_applied: Updates that changed weights; equal to the `last_epoch` of a scheduler that moves
            after each of them.
        updates_skipped: Updates attempted that changed nothing. While training goes on both together are
            `trainer.global_step`; an update that raises is counted here too.
        update_report: That of the last update whose outcome is known; see
            `andrea_callbacks.protocols.ReportsUpdates`.
    """

    def __init__(
        self,
        max_norm: float | None = 1.0,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        max_consecutive_skips: int = 10,
        min_loss_scale: float = 1e-4,
    ) -> None:
        super().__init__()
        if max_norm is not None and not (max_norm > 0 and math.isfinite(max_norm)):
            raise UserError(
                f"model.max_norm must be more than 0 and finite, got {max_norm}; to record the norm without "
                "clipping leave it null (None)"
            )
        if on_nonfinite not in ("raise", "skip"):
            raise UserError(f"model.on_nonfinite must be 'raise' or 'skip', got {on_nonfinite!r}")
        if max_consecutive_skips < 0:
            raise UserError(f"model.max_consecutive_skips must be at least 0, got {max_consecutive_skips}")
        if min_loss_scale < 0:
            raise UserError(f"model.min_loss_scale must be at least 0, got {min_loss_scale}")
        self.automatic_optimization = False
        self.max_norm = max_norm
        self.on_nonfinite = on_nonfinite
        self.max_consecutive_skips = max_consecutive_skips
        self.min_loss_scale = min_loss_scale
        self.updates_applied = 0
        self.updates_skipped = 0
        self.update_report: dict[str, Any] | None = None
        self._consecutive_skips = 0
        self._source_count = 0
        self._sources: Tensor | None = None
        self._attempt: Attempt | None = None
        self._pending: Attempt | None = None
        self._is_accumulating = False
        self._clock = ScheduleClock()
        self._ranks_at_end: HostCopy | None = None
        self._is_at_end = self._has_begun = False
        self._clipper = Clipper("torch")
        self.register_state_dict_pre_hook(_settle_before_state)
        self.register_state_dict_post_hook(strip_wrappers)
        self.register_load_state_dict_pre_hook(match_wrappers)

    def count_tokens(self, micro_batch: Any) -> int | Tensor:
        """Return how many labels of a micro-batch count: an int, or a 0-d tensor."""
        raise NotImplementedError(f"{type(self).__name__} must define count_tokens(micro_batch)")

    def loss_sum(self, micro_batch: Any) -> Tensor:
        """Return the loss *summed* over the labels that count, 0-d, with its graph."""
        raise NotImplementedError(f"{type(self).__name__} must define loss_sum(micro_batch)")

    def note_losses(self, sources: Tensor, losses: Tensor, counts: Tensor | None = None) -> None:
        """Tell sources apart: what `loss_sum` is the sum of, and where each part is from.

        Called in `loss_sum`. Does nothing outside an update, and where the datamodule does not name several
        sources (`source_names`).

        Args:
            sources: (N,) int, `source_id` of each part; a negative one is passed over.
            losses: (N,) losses, of labels or of sequences.
            counts: (N,) labels in each part; 1 each when left out.
        """
        if self._sources is None:
            return
        wide = self._sources.dtype
        tokens = torch.ones_like(losses, dtype=wide) if counts is None else counts.to(wide)
        parts = torch.stack([losses.detach().to(wide), tokens])
        # neither a matmul, which autocast would do in half precision, nor index_add, which has no fixed order
        is_of = sources[:, None] == torch.arange(self._source_count, device=sources.device)
        self._sources += torch.where(is_of, parts[:, :, None], 0.0).sum(1)  # a NaN stays with its source

    @property
    def notes_losses(self) -> bool:
        """Whether `note_losses` has a use for losses now."""
        return self._sources is not None

    @override
    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, Any]]:
        """Yield the modules, and with them parameters and buffers, by the names that they have uncompiled."""
        for name, module in cast(
            "Iterator[tuple[str, Any]]", super().named_modules(memo, prefix, remove_duplicate)
        ):
            yield plain_name(name, prefix), module

    @override
    @untraced
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Make one update of one window and return its report."""
        window = cast("list[Any]", batch) if isinstance(batch, Window) else [batch]
        if not window:
            raise UserError("an empty window: a loader must put at least one micro-batch into each")
        optimizer = cast(LightningOptimizer, self.optimizers())
        self._clear_leftovers()
        tokens = self._count_window(window, batch_idx)
        if self._takes_statistics_only():
            tokens = 0
        loss_sum, micro_losses, sources = self._accumulate(window, tokens)
        self.settle_update()
        self._take_new_groups()
        attempt = self._attempt = Attempt(
            number=self.trainer.global_step + 1,
            lr=_current_lr(optimizer.optimizer),
            tokens=tokens,
            loss_sum=loss_sum,
            micro_losses=micro_losses,
            sources=sources,
        )
        self._prepare_scaler(optimizer.optimizer)
        optimizer.step()
        self._attempt = None
        if attempt.loss is None and attempt.outcome == "applied":
            raise RuntimeError(
                f"{type(self).__name__}.on_before_optimizer_step must call super(), which clips"
            )
        self._step_scheduler(attempt)
        self.zero_grad(set_to_none=True)
        self._log_to_bar(attempt)
        if attempt.is_pending:
            self._pending = attempt
            report = self._report(attempt) | {"outcome": "pending"}
        else:
            report = self._publish(attempt)
        self._check_ranks(batch_idx + 1)
        return report

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Judge the averaged gradient and clip it once; every callback has read it by now."""
        attempt = self._attempt
        if attempt is None:
            return
        hook = self._clip_hook()
        began = time.perf_counter()
        with torch.autocast(self.device.type, enabled=False):
            loss = attempt.loss = attempt.loss_sum / _divisor(attempt.tokens)
            norm = attempt.norm = hook.gradient_norm(optimizer)
            is_bad = self._is_bad(loss, norm.total, attempt.tokens)
            if self._defers_verdict(attempt, optimizer):
                attempt.coefficient = hook.clip_gradients(optimizer, self._bound(), is_bad)
                attempt.verdict = HostCopy(
                    _row(attempt, loss, norm.total, attempt.tokens, is_bad, attempt.coefficient)
                )
                attempt.clip_seconds += time.perf_counter() - began
                return
            figures = HostCopy(_row(attempt, loss, attempt.tokens, is_bad)).read()
            attempt.source_sums = figures[3:]
            self._decide(attempt, *figures[:3])
            if attempt.outcome == "applied":
                attempt.coefficient = hook.clip_gradients(optimizer, self._bound())
        attempt.clip_seconds += time.perf_counter() - began
        if attempt.outcome != "applied":
            optimizer.zero_grad(set_to_none=True)
        self._count_skips_or_raise(attempt)

    def gradient_norm(self, optimizer: Optimizer) -> GradientNorm:
        """Return norms and non-finite counts of the gradients; measured once an update, for all who ask."""
        began = time.perf_counter()
        norm = self._clip_hook().gradient_norm(optimizer)
        if self._attempt is not None:
            self._attempt.clip_seconds += time.perf_counter() - began
        return norm

    def refuse_update(self, fault: str) -> None:
        """Let the update that is about to step change nothing, for callbacks that found a reason.

        Called from a callback's `on_before_optimizer_step`. The update counts as not finite: it raises or is
        skipped, as `on_nonfinite` says.

        Args:
            fault: What is not finite, such as "exp_avg of layer.weight".
        """
        if self._attempt is None:
            raise RuntimeError("refuse_update: no update is about to step")
        self._attempt.refusal = fault

    def settle_update(self) -> None:
        """Learn from the device what became of the last update, where that is not known yet.

        Called before the next update steps, before validation, before the weights are read for a checkpoint
        and at the end of an epoch; a CPU never has a verdict outstanding.

        Raises:
            NonFiniteError: If the update was not finite and that is to stop the run.
        """
        attempt, self._pending = self._pending, None
        if attempt is None or attempt.verdict is None:
            return
        loss, norm, tokens, is_bad, coefficient, *attempt.source_sums = attempt.verdict.read()
        self._decide(attempt, loss, tokens, is_bad)
        attempt.verdict = None
        if attempt.loss is not None and attempt.norm is not None:  # callbacks need no device any more
            attempt.loss = torch.tensor(loss, dtype=torch.float64)
            attempt.norm = replace(attempt.norm, total=torch.tensor(norm, dtype=torch.float64))
            attempt.coefficient = torch.tensor(coefficient, dtype=torch.float64)
        if attempt.outcome != "applied":
            attempt.coefficient = None
            if attempt.schedule is not None:
                attempt.schedule.take_back()
        self._count_skips_or_raise(attempt)
        self._publish(attempt)

    @override
    def configure_callbacks(self) -> Sequence[Callback]:
        """Add callbacks that write figures and place of an update, where none of their kind is given."""
        self._refuse_trainer_options()
        wanted: list[Callback] = [UpdateLog(), PreClipNorm(), FiniteGuard(), EpochSummary(), SourceMonitor()]
        wanted.append(ExactResume())
        present = cast("list[Callback]", getattr(self.trainer, "callbacks", []))
        for each in present:
            if isinstance(each, DurableCheckpoint):
                each.lock_early(self.trainer)
        return [each for each in wanted if not any(isinstance(other, type(each)) for other in present)]

    @override
    def setup(self, stage: str) -> None:
        """Refuse a strategy that cannot work, and forget an earlier fit; a resume loads counters later."""
        self._attempt = self._pending = self._sources = self._ranks_at_end = None
        self._is_accumulating = False
        if stage == "fit":
            if self.trainer.global_step == 0:
                self._reset_counters()
            self._read_next_configuration()
        if stage == "fit" and isinstance(self.trainer.strategy, FSDPStrategy):
            raise UserError(
                "FSDPStrategy (FSDP1) cannot run the backward passes of manual optimization; use "
                "ModelParallelStrategy (FSDP2), trainer.strategy: clip_model_parallel, with fully_shard on "
                "inner modules"
            )
        if stage == "fit" and isinstance(self.trainer.strategy, ModelParallelStrategy):
            ranks = self.trainer.strategy.device_mesh["tensor_parallel"].size()
            if ranks > 1:
                raise UserError(
                    f"{ranks} ranks of tensor parallelism work on the same text, and its tokens would be "
                    f"counted {ranks} times; use trainer.strategy: clip_model_parallel, or give "
                    "ModelParallelStrategy tensor_parallel_size 1 and data_parallel_size the number of ranks"
                )

    def _reset_counters(self) -> None:
        """Start to count anew, for a fit that does not continue the one before."""
        self.updates_applied = self.updates_skipped = self._consecutive_skips = 0
        self.update_report = None
        self._clock.reset()

    def _read_next_configuration(self) -> None:
        """Have the next call of `configure_optimizers`, and no later one, read for its schedulers' settings.

        LightningCLI puts one of its own on the instance, which comes back after the call.
        """
        own = vars(self).get("configure_optimizers")
        if isinstance(own, partial) and cast("partial[Any]", own).func is _configure_and_read:
            own = cast("partial[Any]", own).args[1]  # of a fit that ended before the call
        vars(self)["configure_optimizers"] = partial(_configure_and_read, self, own)

    @override
    def on_validation_model_eval(self) -> None:
        """Finish the update before validation starts, so that its figures come first."""
        self.settle_update()
        super().on_validation_model_eval()

    @override
    def on_train_epoch_end(self) -> None:
        """Finish the epoch's last update, where no callback did, and move a schedule that goes by epochs."""
        self.settle_update()
        self._meet_other_ranks()
        self._clock.end_epoch(self.trainer)

    @override
    def on_train_end(self) -> None:
        """Finish the last update, where no callback did."""
        self.settle_update()

    @override
    def on_train_start(self) -> None:
        """Refuse optimizers and schedulers that do not fit one update a window; count the sources."""
        datamodule = cast(Any, self.trainer).datamodule
        names = datamodule.source_names if isinstance(datamodule, NamesSources) else ()
        self._source_count = len(names) if len(names) > 1 else 0
        self._refuse_optimizers()
        self._clock.begin(self.trainer)
        self._begin_windows()

    @override
    def on_train_epoch_start(self) -> None:
        """Tell the loader, which may be a new one, of the epoch."""
        self._begin_windows()
        loader = self.trainer.train_dataloader
        if isinstance(loader, WindowLoader):
            loader.reach_epoch(epochs_over(self.trainer))

    def _begin_windows(self) -> None:
        """Compare the ranks' numbers of windows, and tell the loader what the trainer takes of it."""
        compare_lengths(self.trainer)
        self._is_at_end = self._has_begun = False
        loader = self.trainer.train_dataloader
        if isinstance(loader, WindowLoader):
            loader.repeat = float(getattr(self.trainer, "overfit_batches", 0)) > 0
            loader.limit = (
                int(self.trainer.num_training_batches) if self.trainer.num_training_batches < 2**62 else None
            )

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the counters of updates."""
        checkpoint["andrea_updates"] = {
            "applied": self.updates_applied,
            "skipped": self.updates_skipped,
            "consecutive_skips": self._consecutive_skips,
            "schedule": self._clock.state_dict(self._trainer),
        }

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue the counters of updates."""
        counters = checkpoint.get("andrea_updates", {})
        self.updates_applied = counters.get("applied", 0)
        self.updates_skipped = counters.get("skipped", 0)
        self._consecutive_skips = counters.get("consecutive_skips", 0)
        self._clock.load_state_dict(counters.get("schedule", {}))

    def _count_window(self, window: list[Any], index: int) -> int | Tensor:
        """Return the label tokens of the window, the `index`-th of the epoch, over all ranks."""
        tokens = sum(_whole(self.count_tokens(micro_batch)) for micro_batch in window)
        if isinstance(tokens, Tensor) and tokens.device.type == "cpu":
            tokens = int(tokens)  # a number on the host stays there
        if self.trainer.world_size == 1:
            return tokens
        self._is_at_end = is_last_window(self.trainer, index)
        tokens, ranks = self._sum_with_ranks(tokens, self._is_at_end, False)
        if not (_judges_by_itself(self.device) and self._has_begun) and ranks.read()[1]:
            raise unequal_windows(self.trainer, index + 1, self._is_at_end)
        self._has_begun = True
        self._ranks_at_end = ranks
        return tokens

    def _sum_with_ranks(
        self, tokens: int | Tensor, is_at_end: bool, has_none: bool
    ) -> tuple[Tensor, HostCopy]:
        """Add up tokens over the ranks; and how many train their epoch's last window, and how many none."""
        local = torch.zeros(3, dtype=torch.int64, device=self.device)
        local[0], local[1], local[2] = tokens, int(is_at_end), int(has_none)  # which waits for no copy
        figures = self._sum_over_ranks(local)
        return figures[0], HostCopy(figures[1:])

    def _check_ranks(self, windows: int) -> None:
        """Stop where some ranks have trained their last window of the epoch and others have not.

        This waits until the device has begun with the update, no longer. All ranks come here with the same
        figures, and none of them has left for a collective operation of validation or of the epoch's end.
        """
        ranks, self._ranks_at_end = self._ranks_at_end, None
        if ranks is not None and ranks.read()[0] not in (0, self.trainer.world_size):
            raise unequal_windows(self.trainer, windows, self._is_at_end)

    def _meet_other_ranks(self) -> None:
        """Take part once more where an epoch ended without its last window known as such.

        Others may be counting the tokens of a window that this rank has not got.
        """
        if self.trainer.world_size > 1 and not self._is_at_end:
            self._is_at_end = True
            _, ranks = self._sum_with_ranks(0, False, True)
            if ranks.read()[1] != self.trainer.world_size:
                windows = int(self.trainer.fit_loop.epoch_loop.batch_progress.current.ready)
                raise unequal_windows(self.trainer, windows, True)

    def _sum_over_ranks(self, figure: Tensor) -> Tensor:
        """Add up a number of each rank. Lightning's own reduction has the host wait at a barrier first."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(figure)
            return figure
        return cast(Tensor, self.trainer.strategy.reduce(figure, reduce_op="sum"))

    def _clear_leftovers(self) -> None:
        """Take back what an exception may have left of an update that was given up."""
        self.zero_grad(set_to_none=True)
        attempt, self._attempt = self._attempt, None
        scaler = self._scaler()
        if attempt is not None and scaler is not None:
            scaler.update(scaler.get_scale())  # which forgets that gradients were unscaled
        if self._is_accumulating:
            raise UserError(
                "an exception broke an update off between two micro-batches, and FSDP2 keeps what it had "
                "accumulated where nobody can take it back; resume from a checkpoint, with a new module"
            )

    def _accumulate(
        self, window: list[Any], tokens: int | Tensor
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Run every micro-batch forward and backward, one graph at a time.

        Returns:
            The window's summed loss over all ranks, the loss of each micro-batch of this rank, and (2, K)
            summed losses and tokens of the sources over all ranks.
        """
        if self._source_count:
            shape = (2, self._source_count)
            self._sources = torch.zeros(shape, dtype=widest(self.device), device=self.device)
        scale = self.trainer.world_size / _divisor(tokens)
        losses: list[Tensor] = []
        loss_sum = compile_like(self, self.loss_sum)
        is_sharded = isinstance(self.trainer.strategy, ModelParallelStrategy)
        is_for_statistics = self._takes_statistics_only()
        for number, micro_batch in enumerate(window, start=1):
            with only_last_synchronizes(self.trainer.strategy, number == len(window)):
                loss = loss_sum(micro_batch)
                if loss.ndim:
                    raise UserError(
                        "loss_sum must return a 0-d tensor, the sum over labels, got shape "
                        f"{tuple(loss.shape)}; use reduction='sum'"
                    )
                losses.append(loss.detach())
                if loss.requires_grad and not is_for_statistics:
                    self._is_accumulating |= is_sharded and number < len(window)
                    self.manual_backward(loss * scale)
                elif self.trainer.world_size > 1 and not is_for_statistics:
                    raise UserError(
                        f"loss_sum of micro-batch {number} has no graph, and on several ranks every "
                        "micro-batch must take part in the backward pass; return a sum over no label (0 with "
                        "a graph) instead of a constant"
                    )
                del loss
        self._is_accumulating = False
        total = torch.stack(losses).to(widest(self.device)).sum()
        sources, self._sources = self._sources, None
        if self.trainer.world_size > 1:
            parts = [total[None]] if sources is None else [total[None], sources.flatten()]
            figures = self._sum_over_ranks(torch.cat(parts))
            total = figures[0]
            sources = None if sources is None else figures[1:].reshape(sources.shape)
        return total, losses, sources

    def _scaler(self) -> torch.amp.GradScaler | None:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    def _prepare_scaler(self, optimizer: Optimizer) -> None:
        """Unscale where Lightning leaves it to a fused optimizer; give the scaler something to see."""
        scaler = self._scaler()
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

    def _bound(self) -> float:
        return math.inf if self.max_norm is None else self.max_norm

    def _defers_verdict(self, attempt: Attempt, optimizer: Optimizer) -> bool:
        """Say whether the device can judge the update and hold its step, so that the host need not wait."""
        is_empty = isinstance(attempt.tokens, int) and not attempt.tokens
        is_known = is_empty or attempt.refusal is not None
        return _judges_by_itself(self.device) and not self._scaler() and can_hold(optimizer) and not is_known

    def _is_bad(self, loss: Tensor, norm: Tensor, tokens: int | Tensor) -> Tensor:
        """Return 1 where an update must change nothing, else 0, without asking the device.

        A norm, or its multiple of the bound, beyond float32 is not one that a step can be clipped by.
        """
        reach = norm / min(1.0, self._bound())
        is_good = torch.isfinite(loss).to(norm.device) & torch.isfinite(reach.float())
        if isinstance(tokens, Tensor):
            is_good &= tokens.to(norm.device) > 0
        return (~is_good).float()

    def _decide(self, attempt: Attempt, loss: float, tokens: float, is_bad: float) -> None:
        """Set the outcome of an update by its figures on the host."""
        attempt.tokens = int(tokens)
        if attempt.tokens == 0:
            attempt.outcome = "empty"
            attempt.loss = attempt.norm = None
        elif attempt.refusal is not None:
            attempt.nonfinite = attempt.refusal
            attempt.outcome = "nonfinite_skip" if self.on_nonfinite == "skip" else "nonfinite_raise"
        elif is_bad:
            attempt.nonfinite = self._name_nonfinite(attempt, math.isfinite(loss))
            if self._scaler() is not None and math.isfinite(loss):
                attempt.outcome = "scaler_skip"
            else:
                attempt.outcome = "nonfinite_skip" if self.on_nonfinite == "skip" else "nonfinite_raise"

    def _name_nonfinite(self, attempt: Attempt, is_loss_finite: bool) -> str:
        parts: list[str] = []
        if not is_loss_finite:
            values = cast("list[float]", torch.stack(attempt.micro_losses).tolist())
            bad = next(
                (place for place, value in enumerate(values, start=1) if not math.isfinite(value)), None
            )
            of = (
                f"micro-batch {bad} of {len(values)} ({values[bad - 1]})"
                if bad
                else "another rank's micro-batch"
            )
            parts.append(f"the loss of {of}")
        parameter = None if attempt.norm is None else attempt.norm.first_nonfinite(self)
        if parameter is not None:
            parts.append(f"the gradient of {parameter}")
        return " and ".join(parts) or "the norm of the gradients"

    def _count_skips_or_raise(self, attempt: Attempt) -> None:
        """Count updates skipped in a row, and stop where that is the policy."""
        if attempt.outcome == "applied":
            self._consecutive_skips = 0
        if attempt.outcome in ("applied", "empty"):
            return
        self._consecutive_skips += 1
        fault = self._reason_to_stop(attempt)
        if fault is not None:
            attempt.outcome = "nonfinite_raise"
            self._publish(attempt)
            raise NonFiniteError(
                f"update {attempt.number}: {attempt.nonfinite} is not finite; {fault}. Weights, moments and "
                "schedule are as they were before this update"
            )

    def _reason_to_stop(self, attempt: Attempt) -> str | None:
        scaler = self._scaler()
        if attempt.outcome == "nonfinite_raise":
            return "model.on_nonfinite is 'raise' ('skip' would pass over such updates)"
        if self._consecutive_skips > self.max_consecutive_skips:
            return f"more than model.max_consecutive_skips={self.max_consecutive_skips} in a row were skipped"
        if attempt.outcome == "scaler_skip" and scaler is not None:
            scale = scaler.get_scale()
            if scale <= self.min_loss_scale:
                return f"the loss scale is down to {scale:g} (model.min_loss_scale={self.min_loss_scale:g})"
            if self._consecutive_skips == FALLING_SCALE_UPDATES:
                rank_zero_warn(
                    f"update {attempt.number}: the loss scale keeps falling, now {scale:g} after "
                    f"{FALLING_SCALE_UPDATES} overflows in a row; check the learning rate, or use bf16-mixed"
                )
        return None

    def _takes_statistics_only(self) -> bool:
        """Say whether windows are run for BatchNorm's statistics alone, as in SWA's last epoch."""
        loop = cast(Any, self.trainer.fit_loop.epoch_loop)
        return bool(getattr(loop.automatic_optimization, "_skip_backward", False))

    def _take_new_groups(self) -> None:
        """Have parameter groups that were added since the last update follow the schedule.

        Raises:
            UserError: If the scheduler cannot, and would raise out of torch after the weights moved.
        """
        for config in self.trainer.lr_scheduler_configs:
            if isinstance(config.scheduler, FactorLR):
                config.scheduler.take_new_groups()
            elif not can_take_new_groups(config.scheduler):
                raise UserError(
                    f"a parameter group was added to the optimizer, which {type(config.scheduler).__name__} "
                    "cannot follow; use model.schedule=cosine or constant, build_scheduler, or add all "
                    "groups in configure_optimizers"
                )

    def _step_scheduler(self, attempt: Attempt) -> None:
        """Move the schedule if it is due and weights changed, or if that is likely and not known yet."""
        if attempt.outcome != "applied":
            return
        for config in self.trainer.lr_scheduler_configs:
            if self._clock.moves_at(config, self.updates_applied + 1):
                if attempt.is_pending:
                    attempt.schedule = ScheduleMove(config.scheduler)
                cast(Any, config.scheduler).step()
                if attempt.schedule is not None:
                    attempt.schedule.end()

    def _log_to_bar(self, attempt: Attempt) -> None:
        """Feed Lightning's bar and monitors."""
        if attempt.loss is not None and attempt.norm is not None:
            for key, value in (("loss", attempt.loss), ("grad_norm", attempt.norm.total)):
                # the mean over an epoch, which batch_size is for, is the summary's business
                self.log(f"train/{key}", value.float(), prog_bar=True, logger=False, batch_size=1)

    def _publish(self, attempt: Attempt) -> dict[str, Any]:
        """Count the update, keep its report and hand it to the callbacks."""
        if attempt.outcome == "applied":
            self.updates_applied += 1
        else:
            self.updates_skipped += 1
        self.update_report = self._report(attempt)
        publish_report(self.trainer, self.update_report)
        return self.update_report

    def _report(self, attempt: Attempt) -> dict[str, Any]:
        scaler = self._scaler()
        norm = None if attempt.norm is None else attempt.norm.total
        clipped = None if norm is None or attempt.coefficient is None else norm * attempt.coefficient
        report = {
            "update": attempt.number,
            "loss": attempt.loss,
            "tokens": attempt.tokens,
            "grad_norm": norm,
            "grad_norm_clipped": clipped,
            "clip_coefficient": attempt.coefficient,
            "lr": attempt.lr,
            "outcome": attempt.outcome,
            "clip_seconds": attempt.clip_seconds,
            "skipped": self.updates_skipped,
            "loss_scale": None if scaler is None else scaler.get_scale(),
            "nonfinite": attempt.nonfinite,
            **_source_figures(attempt.source_sums),
        }
        return {key: value for key, value in report.items() if value is not None}

    def _refuse_optimizers(self) -> None:
        """Refuse what one step without a closure a window does not fit."""
        optimizers = self.trainer.optimizers
        if len(optimizers) != 1:
            raise UserError(
                f"{type(self).__name__} makes one step of one optimizer a window, and configure_optimizers "
                f"gave {len(optimizers)}; put the parameters into groups of one optimizer"
            )
        if needs_closure(optimizers[0]):
            raise UserError(
                f"{type(optimizers[0]).__name__} needs a closure that computes the loss anew at each step, "
                f"and {type(self).__name__} computes it once a window; use an optimizer whose step needs no "
                "closure, such as AdamW"
            )

    def _refuse_trainer_options(self) -> None:
        """Refuse trainer options that would act on each batch, and say what to use instead."""
        trainer = self.trainer
        if trainer.gradient_clip_val is not None or trainer.gradient_clip_algorithm is not None:
            raise UserError(
                "trainer.gradient_clip_val and trainer.gradient_clip_algorithm do nothing here; set "
                "model.max_norm (TokenWeightedModule(max_norm=…)), which clips the averaged gradient of the "
                "whole update once"
            )
        if trainer.accumulate_grad_batches != 1:
            raise UserError(
                "trainer.accumulate_grad_batches would weigh micro-batches equally whatever their tokens; "
                "put them into one window: data.sequences_per_update, or WindowLoader(loader, accumulate=…)"
            )
        if any(
            isinstance(each, LearningRateFinder)
            for each in cast("list[Any]", getattr(trainer, "callbacks", []))
        ):
            raise UserError(
                "lr_find reads no loss under manual optimization and would report a rate found in NaN; try a "
                "few values of model.lr for some hundred updates instead"
            )


def _configure_and_read(module: TokenWeightedModule, own: Any) -> Any:
    """Stand in for one call of a module's `configure_optimizers`, and give the name back to `own`."""
    del vars(module)["configure_optimizers"]
    if own is not None:
        vars(module)["configure_optimizers"] = own
    return module._clock.read(module.configure_optimizers())  # pyright: ignore[reportPrivateUsage]


def _settle_before_state(module: nn.Module, *_: Any) -> None:
    """Let no checkpoint be written of weights whose last update is not judged yet."""
    cast(TokenWeightedModule, module).settle_update()


def _judges_by_itself(device: torch.device) -> bool:
    return device.type != "cpu"


def _current_lr(optimizer: Optimizer) -> float | None:
    """Return the rate of the first group, None where the optimizer sets its rate itself."""
    lr = optimizer.param_groups[0]["lr"]
    return None if lr is None else float(lr)


def _row(attempt: Attempt, *figures: Tensor | float) -> Tensor:
    """Return figures of an update, and those of its sources, in one row for the host."""
    row = side_by_side(*figures)
    return row if attempt.sources is None else torch.cat([row, attempt.sources.flatten().to(row)])


def _source_figures(sums: list[float]) -> dict[str, Any]:
    """Return a report's figures by source; none where no source was told apart."""
    count = len(sums) // 2
    losses, tokens = sums[:count], [int(each) for each in sums[count:]]
    if not any(tokens):
        return {}
    means = [loss / number if number else None for loss, number in zip(losses, tokens, strict=True)]
    return {"source_losses": means, "source_tokens": tokens}


def _whole(tokens: int | Tensor) -> int | Tensor:
    if tokens.is_floating_point() if isinstance(tokens, Tensor) else tokens != int(tokens):
        raise UserError(f"count_tokens must return a whole number of labels, got {tokens}")
    return tokens


def _divisor(tokens: int | Tensor) -> float | Tensor:
    """Return a number of tokens to divide by, exact where an integer tensor would give float32."""
    if isinstance(tokens, Tensor):
        return tokens.clamp(min=1).to(widest(tokens.device))
    return float(max(tokens, 1))
