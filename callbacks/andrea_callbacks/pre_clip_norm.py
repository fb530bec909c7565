"""The gradient's norm before clipping, what the clip made of it, and how far the weights moved."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from andrea_callbacks.hooks.changed_gradients import ChangedGradients
from andrea_callbacks.hooks.clip_counts import LAST, ClipCounts, trusted
from andrea_callbacks.hooks.events import RunEvent, publish_event
from andrea_callbacks.hooks.gradient_watch import update_gradient
from andrea_callbacks.hooks.measuring import automatic_coefficient, clip_threshold
from andrea_callbacks.hooks.missing_gradients import MissingGradients
from andrea_callbacks.hooks.optimizer_steps import StepCallback, is_due
from andrea_callbacks.hooks.partial_norms import (
    LAYERS,
    LayerNames,
    gradient_kinds,
    partial_norms,
    placed_group_names,
)
from andrea_callbacks.hooks.protocols import reports_updates
from andrea_callbacks.hooks.reports import UpdateReport
from andrea_callbacks.hooks.scalars import Value
from andrea_callbacks.hooks.update_gradient import Clip, UpdateGradient
from andrea_callbacks.numerics.bounds import require_at_least
from andrea_callbacks.numerics.weight_change import (
    forget_weights,
    remember_weights,
    weight_change,
)


class PreClipNorm(StepCallback):
    """Records the global L2 norm of the gradient before and after clipping, and how often the clip acts.

    The figures of a module that reports its updates come from its reports. In any other module the norm is
    that of the gradients before anything changed them: before Lightning or a strategy clips, and before the
    module calls `torch.nn.utils.clip_grad_norm_` or `clip_grad_value_`, under automatic and manual
    optimization. In a run that never clips, the scalars of the clip are absent. If the gradients were changed
    by other means, such as `p.grad.mul_(0.1)`, their norm before that change is unknown: `train/grad_norm`
    is left out of that update, and a warning says so once.

    A parameter's hook that changes a gradient is part of the backward pass: the norm is measured after it,
    unless the hook clips. The norm never includes a GradScaler's scale. If gradients are clipped while they
    still carry the scale, the effective threshold is smaller: `train/clip_threshold` is the given threshold
    divided by the scale.

    The callback warns once when more than half of the last 100 updates were clipped to less than half their
    norm, and at the end of the first epoch of trainable parameters that never received a gradient. With
    several optimizers the names of groups start with the optimizer's index, and `every` holds for each.

    Args:
        every: Steps of an optimizer between two records of parameter groups, layers, kinds of gradients and
            weights.
        layers: Regular expressions, tried in order on each parameter's name. The text that the first one
            matches is the layer's name. The default gives a numbered block, or the parameter's module.
        name: Tells instances in the same trainer apart.

    Raises:
        ValueError: If `every` is less than 1 or an expression cannot be parsed.

    Metrics recorded:
        train/grad_norm: Norm before clipping.
        train/grad_norm_clipped: Norm after clipping, by norm or by value.
        train/clip_coefficient: Norm after clipping over the norm before.
        train/clip_coefficient_mean: Mean coefficient of all clipped updates so far.
        train/clip_fraction: Share of finite updates so far that were clipped.
        train/clip_threshold: Norm that the whole gradient is clipped to, if it is known.
        grad_norm_group/<group>, grad_norm_layer/<layer>: Norms before clipping.
        gradients/none, /zero, /finite, /nonfinite: Number of parameters without a gradient, with an all-zero
            one, with a finite one that is not zero, and with a NaN or Inf in it.
        update_ratio/<group>: Norm of the change of the weights over the norm of the weights.
    """

    def __init__(self, every: int = 25, layers: Sequence[str] = LAYERS, name: str | None = None) -> None:
        super().__init__(name=name)
        require_at_least(1, "PreClipNorm", every=every)
        self.every = every
        self._layers = LayerNames("PreClipNorm", layers)
        self.reset()

    @override
    def reset(self) -> None:
        """Drop what an earlier fit left."""
        self._counts = ClipCounts()
        self._missing = MissingGradients()
        self._has_warned = False
        self._has_named = False
        self._due: list[tuple[int, Optimizer]] = []
        self._open: list[tuple[int, bool, UpdateGradient]] = []
        self._has_seen_clip = False
        self._changed = ChangedGradients(ClipWarning)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look up the parameters' names."""
        super().on_train_start(trainer, pl_module)
        self._layers.learn(pl_module)
        self._missing.begin(pl_module)
        self._due.clear()
        self._open.clear()
        forget_weights(trainer)

    @override
    def on_report(self, trainer: pl.Trainer, report: UpdateReport) -> None:
        """Record what the module measured."""
        if report.grad_norm is not None:
            norm = torch.as_tensor(report.grad_norm)
            self.record(trainer, report.update, {"train/grad_norm": norm})
            coefficient = report.clip_coefficient
            clip = None if coefficient is None else torch.as_tensor(coefficient)
            self._record_clip(trainer, report.update, norm, clip)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Record the norm if the module does not report it, and its parts when due."""
        count = self.steps.next(trainer, optimizer)
        if count is None:
            return
        self._record_moves(trainer, optimizer)
        update = trainer.global_step + 1
        due = is_due(count, self.every)
        reports = reports_updates(pl_module)
        if not self._has_named:
            self._missing.note()
        if reports and not due:
            return
        gradient = update_gradient(trainer, optimizer)
        if gradient.is_altered:
            self._changed.warn(update)
        elif not reports and gradient.norm.parameters:
            self._record_gradient(trainer, pl_module, update, gradient, due)
        if due:
            self._changed.read()
            self.record(trainer, update, self._parts(trainer, pl_module, optimizer, gradient))
            remember_weights(trainer, optimizer, update)
            self._due.append((update, optimizer))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record how far the weights moved, and the norm after clipping."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._record_clips(trainer, pl_module)
        self._record_moves(trainer)

    def _record_moves(self, trainer: pl.Trainer, of: Optimizer | None = None) -> None:
        """Record how far the weights moved: for one optimizer that is about to step again, or for all."""
        due = [each for each in self._due if of is None or each[1] is of]
        self._due = [each for each in self._due if each not in due]
        for update, optimizer in due:
            change = weight_change(trainer, optimizer, update)
            if change is not None:
                weights, added = change
                ratios = added / weights.clamp(min=1e-12)  # weights may all be zero
                names = placed_group_names(trainer, optimizer)
                known = {f"update_ratio/{name}": ratio for name, ratio in zip(names, ratios, strict=True)}
                self.record(trainer, update, known)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn once of the parameters that never received a gradient."""
        super().on_train_epoch_end(trainer, pl_module)
        if self._has_named or not trainer.global_step:
            return
        self._has_named = True
        missing = self._missing.names
        if missing:
            message = (
                f"{len(missing)} parameters never received a gradient in the first epoch: "
                f"{', '.join(missing)}; look for detach(), no_grad(), or a part that the loss does not use"
            )
            rank_zero_warn(message, category=ClipWarning)
            publish_event(trainer, RunEvent(kind="no_gradient", update=trainer.global_step, message=message))

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the counts behind the shares, and which warnings were given."""
        return {
            "steps": self.steps.state_dict(),
            **self._counts.state_dict(),
            "has_seen_clip": self._has_seen_clip,
            "has_warned": self._has_warned,
            "received": self._missing.received(),
            "has_named": self._has_named,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting."""
        self.steps.load_state_dict(state_dict.get("steps", {}))
        self._counts.load_state_dict(state_dict)
        self._missing.restore(state_dict.get("received", ()))
        self._has_seen_clip = state_dict.get("has_seen_clip", False)
        self._has_warned = state_dict.get("has_warned", False)
        self._has_named = state_dict.get("has_named", False)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn of changed gradients in the last updates, and write the remaining scalars."""
        self._changed.read()
        super().on_train_end(trainer, pl_module)
        self._let_go()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the remaining scalars, and release the module."""
        super().on_exception(trainer, pl_module, exception)
        self._let_go()

    def _let_go(self) -> None:
        self._missing.clear()
        self._layers.clear()
        self._due.clear()
        self._open.clear()
        self._changed.clear()

    def _record_gradient(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        update: int,
        gradient: UpdateGradient,
        due: bool,
    ) -> None:
        """Record the norm of a gradient. The norm after clipping is known at the end of the batch."""
        total = gradient.total
        if gradient.doubt is not None:
            self._changed.doubt(update, gradient.doubt)
        self.record(trainer, update, {"train/grad_norm": trusted(total, gradient.doubt)})
        gradient.awaits_clip = True
        gradient.expected = clip_threshold(trainer, pl_module)
        self._open.append((update, due, gradient))

    def _record_clips(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record what a clip did to the gradients, whether before or after the step's hook."""
        opened, self._open = self._open, []
        for update, due, gradient in opened:
            clip, total = gradient.clip, gradient.total
            coming = automatic_coefficient(trainer, pl_module, total)
            if clip is not None and clip.clipped is not None:
                self._record_noted_clip(trainer, update, gradient, clip)
                if due and clip.threshold is not None:
                    self.record(trainer, update, {"train/clip_threshold": clip.threshold})
            elif coming is not None:
                self._record_clip(trainer, update, total, coming, gradient.doubt)
            else:
                self._record_unclipped(trainer, update, gradient)

    def _record_noted_clip(
        self, trainer: pl.Trainer, update: int, gradient: UpdateGradient, clip: Clip
    ) -> None:
        if clip.clipped is not None:
            self._has_seen_clip = True
            total = gradient.total
            coefficient = torch.where(total == 0, 1.0, clip.clipped / total).clamp(max=1.0)
            self._record_clip(trainer, update, gradient.total, coefficient, gradient.doubt)

    def _record_unclipped(self, trainer: pl.Trainer, update: int, gradient: UpdateGradient) -> None:
        """Count an update that nothing clipped. Record it only if other updates are clipped."""
        one = torch.ones_like(gradient.total)
        values = self._clip_figures(trainer, update, gradient.total, one, gradient.doubt)
        if self._has_seen_clip:
            self.record(trainer, update, values)

    def _record_clip(
        self,
        trainer: pl.Trainer,
        step: int,
        norm: Tensor,
        coefficient: Tensor | None,
        doubt: Tensor | None = None,
    ) -> None:
        if coefficient is not None:
            self.record(trainer, step, self._clip_figures(trainer, step, norm, coefficient, doubt))

    def _clip_figures(
        self, trainer: pl.Trainer, step: int, norm: Tensor, coefficient: Tensor, doubt: Tensor | None
    ) -> dict[str, Value]:
        """Count an update, and record the scalars of its clip."""
        figures = self._counts.add(norm, coefficient, doubt)
        hard = self._counts.hard_clips()
        if hard is not None and hard > LAST // 2 and not self._has_warned:
            self._warn_of_hard_clips(trainer, step, hard)
        return figures

    def _warn_of_hard_clips(self, trainer: pl.Trainer, step: int, hard: int) -> None:
        self._has_warned = True
        message = (
            f"update {step}: {hard} of the last {LAST} updates were clipped to less than half their norm. "
            "A clip as a rule hides a fault: look at the learning rate, at what the loss is divided by, at "
            "abnormal input, and at the masks; then at the threshold"
        )
        rank_zero_warn(message, category=ClipWarning)
        publish_event(
            trainer, RunEvent(kind="clipped_hard", update=step, message=message, details={"hard": hard})
        )

    def _parts(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        optimizer: Optimizer,
        gradient: UpdateGradient,
    ) -> dict[str, Value]:
        values: dict[str, Value] = {**gradient_kinds(optimizer, gradient.norm)}
        if gradient.is_altered:
            return values
        norms = partial_norms(trainer, optimizer, gradient, self._layers)
        values |= {name: trusted(each, gradient.doubt) for name, each in norms.items()}
        threshold = clip_threshold(trainer, pl_module) if gradient.clip is None else None
        if threshold is not None and threshold != float("inf"):
            values["train/clip_threshold"] = threshold
        return values


class ClipWarning(UserWarning):
    """Most updates are clipped hard, gradients are changed unseen, or a parameter never gets a gradient."""
