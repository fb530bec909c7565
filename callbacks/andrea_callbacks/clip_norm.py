"""The gradient's norm before clipping, what the clip made of it, and how far the weights moved."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from andrea_callbacks.events import RunEvent, publish_event
from andrea_callbacks.gradient_watch import Clip, UpdateGradient, update_gradient
from andrea_callbacks.gradients import GradientNorm, optimizer_parameters
from andrea_callbacks.host import widest
from andrea_callbacks.measuring import automatic_coefficient, clip_threshold
from andrea_callbacks.protocols import reports_updates
from andrea_callbacks.scalars import Doubtful, Value
from andrea_callbacks.steps import StepCallback, is_due
from andrea_callbacks.weights import forget_weights, group_names, remember_weights, weight_change

UNCLIPPED = 1.0 - 1e-6
"""Coefficients under this count as a clip."""

HARD = 0.5
"""Coefficients under this count as a hard clip: the norm was more than twice what was allowed."""

LAST = 100
"""Updates over which hard clips are counted."""

LAYERS = (r"^(?:\w+\.)*?\d+(?=\.)", r"^.*(?=\.)", r".*")
"""A numbered block, such as `network.blocks.3`, or the module that has the parameter."""


class PreClipNorm(StepCallback):
    """Records the global L2 norm of the gradient before clipping, after it, and how often the clip bites.

    With a module that reports its updates the figures are the module's. In any other module the norm is that
    of the gradients before anything changed them: before Lightning or a strategy clips, or the module calls
    `torch.nn.utils.clip_grad_norm_` or `clip_grad_value_`, under automatic and manual optimization alike. In
    a run that never clips, the scalars of the clip are absent. If the gradients were changed by other means,
    such as `p.grad.mul_(0.1)`, their norm before that is not known: `train/grad_norm` is left out of that
    update, and a warning says so once.

    Hooks of parameters that change a gradient within the backward pass are part of it: the norm is of what
    they leave, unless they clip. The norm never has a GradScaler's scale in it. Gradients that are clipped
    while they carry the scale are
    clipped to less: `train/clip_threshold` is the threshold divided by the scale.

    Warns once when more than half of the last 100 updates were clipped to less than half their norm, and at
    the end of the first epoch of trainable parameters that never received a gradient. With several optimizers
    names of groups start with the optimizer's place, and each is recorded in detail as often.

    Args:
        every: Steps of an optimizer between two records of parameter groups, layers, kinds of gradients and
            weights.
        layers: Regular expressions, searched for in parameters' names; what the first that is found matches
            is the layer's name. By default a numbered block, or the module that has the parameter.
        name: Tells instances in the same trainer apart.

    Raises:
        ValueError: If `every` is less than 1 or an expression cannot be parsed.

    Metrics recorded:
        train/grad_norm: Norm before clipping.
        train/grad_norm_clipped: Norm after clipping, by norm or by value.
        train/clip_coefficient: The second over the first.
        train/clipped_share: Share of updates so far that were clipped; those that are not finite do not
            count.
        train/clipped_to: Mean coefficient of those that were clipped.
        train/clip_threshold: Norm that the whole gradient is clipped to, where one is known.
        grad_norm_group/<group>, grad_norm_layer/<layer>: Norms before clipping.
        gradients/none, /zero, /finite, /nonfinite: How many parameters have no gradient, one of zeros, one of
            finite numbers not all zero, one with NaN or Inf.
        update_ratio/<group>: Norm of what the update added to the weights, over that of the weights.
    """

    def __init__(self, every: int = 25, layers: Sequence[str] = LAYERS, name: str | None = None) -> None:
        super().__init__(name=name)
        if every < 1:
            raise ValueError(f"PreClipNorm: every must be at least 1 update, got {every}")
        self.every = every
        try:
            self._layers = [re.compile(each) for each in layers]
        except re.error as error:
            raise ValueError(f"PreClipNorm: layers: {error.pattern!r} cannot be parsed: {error}") from error
        self.reset()

    @override
    def reset(self) -> None:
        """Forget an earlier fit."""
        self._clipped: Tensor | float = 0.0
        self._counted: Tensor | float = 0.0
        self._coefficients: Tensor | float = 0.0
        self._unread: list[Tensor] = []
        self._recent: deque[float] = deque(maxlen=LAST)
        self._has_warned = False
        self._received: set[str] = set()
        self._has_named = False
        self._names: dict[int, str] = {}
        self._lacking: list[tuple[str, Tensor]] = []
        self._due: list[tuple[int, Optimizer]] = []
        self._open: list[tuple[int, bool, UpdateGradient]] = []
        self._has_seen_clip = False
        self._has_warned_of_change = False
        self._doubts: list[tuple[int, Tensor]] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Learn the parameters' names."""
        super().on_train_start(trainer, pl_module)
        named = list(pl_module.named_parameters())
        self._names = {id(each): name for name, each in named}
        self._lacking = [
            (name, each) for name, each in named if each.requires_grad and name not in self._received
        ]
        self._due.clear()
        self._open.clear()
        forget_weights(trainer)

    @override
    def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
        """Record what the module measured."""
        norm = report.get("grad_norm")
        if norm is not None:
            self.record(trainer, report["update"], {"train/grad_norm": norm})
            self._record_clip(trainer, report["update"], norm, report.get("clip_coefficient"))

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Record the norm where the module does not report it, and every now and then its parts."""
        count = self.steps.next(trainer, optimizer)
        if count is None:
            return
        self._record_moves(trainer, optimizer)
        update = trainer.global_step + 1
        due = is_due(count, self.every)
        reports = reports_updates(pl_module)
        self._note_received()
        if reports and not due:
            return
        gradient = update_gradient(trainer, optimizer)
        if gradient.is_altered:
            self._warn_of_change(update)
        elif not reports and gradient.norm.parameters:
            self._record_gradient(trainer, pl_module, update, gradient, due)
        if due:
            self._read_doubts()
            self.record(trainer, update, self._parts(trainer, pl_module, optimizer, gradient))
            remember_weights(trainer, optimizer, update)
            self._due.append((update, optimizer))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record how far the weights moved, and what clips have left."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._record_clips(trainer, pl_module)
        self._record_moves(trainer)

    def _record_moves(self, trainer: pl.Trainer, of: Optimizer | None = None) -> None:
        """Record how far the weights moved: of one optimizer, which is about to step again, or of all."""
        due = [each for each in self._due if of is None or each[1] is of]
        self._due = [each for each in self._due if each not in due]
        for update, optimizer in due:
            change = weight_change(trainer, optimizer, update)
            if change is not None:
                weights, added = change
                ratios = added / weights.clamp(min=1e-12)  # weights may all be zero
                names = self._group_names(trainer, optimizer)
                known = {f"update_ratio/{name}": ratio for name, ratio in zip(names, ratios, strict=True)}
                self.record(trainer, update, known)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Name, once, the parameters that never received a gradient."""
        super().on_train_epoch_end(trainer, pl_module)
        if self._has_named or not trainer.global_step:
            return
        self._has_named = True
        missing = [name for name, _ in self._lacking]
        if missing:
            message = (
                f"{len(missing)} parameters never received a gradient in the first epoch: "
                f"{', '.join(missing)}; look for detach(), no_grad(), or a part that the loss does not use"
            )
            rank_zero_warn(message, category=ClipWarning)
            publish_event(trainer, RunEvent(kind="no_gradient", update=trainer.global_step, message=message))

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the counts behind the shares, and what was warned about."""
        self._read()
        return {
            "steps": self.steps.state_dict(),
            "clipped": float(self._clipped),
            "counted": float(self._counted),
            "coefficients": float(self._coefficients),
            "recent": list(self._recent),
            "has_seen_clip": self._has_seen_clip,
            "has_warned": self._has_warned,
            "received": sorted(self._received),
            "has_named": self._has_named,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting."""
        self.steps.load_state_dict(state_dict.get("steps", {}))
        self._clipped, self._counted = state_dict["clipped"], state_dict["counted"]
        self._coefficients = state_dict.get("coefficients", 0.0)
        self._recent = deque(state_dict.get("recent", ()), LAST)
        self._has_seen_clip = state_dict.get("has_seen_clip", False)
        self._has_warned = state_dict.get("has_warned", False)
        self._received = set(state_dict.get("received", ()))
        self._has_named = state_dict.get("has_named", False)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn of the last gradients that were changed, and write what there is."""
        self._read_doubts()
        super().on_train_end(trainer, pl_module)
        self._let_go()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write what there is, and let go of the module."""
        super().on_exception(trainer, pl_module, exception)
        self._let_go()

    def _let_go(self) -> None:
        self._lacking.clear()
        self._names.clear()
        self._due.clear()
        self._open.clear()
        self._doubts.clear()

    def _record_gradient(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        update: int,
        gradient: UpdateGradient,
        due: bool,
    ) -> None:
        """Record the norm of a gradient; what clips leave of it is known when the batch is over."""
        total = gradient.total
        if gradient.doubt is not None:
            self._doubts.append((update, gradient.doubt))
        self.record(trainer, update, {"train/grad_norm": _trusted(total, gradient.doubt)})
        gradient.awaits_clip = True
        gradient.expected = clip_threshold(trainer, pl_module)
        self._open.append((update, due, gradient))

    def _record_clips(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record what clips have made of gradients, before the step's hook or after it."""
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
        """Count an update that nothing clipped; speak of it only where other updates are clipped."""
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
        """Count an update, and return what there is to say of its clip."""
        counts = torch.isfinite(norm) if doubt is None else torch.isfinite(norm) & ~doubt
        is_clipped = counts & (coefficient < UNCLIPPED)
        wide = widest(norm.device)
        self._clipped = self._clipped + is_clipped.to(wide)
        self._counted = self._counted + counts.to(wide)
        self._coefficients = self._coefficients + torch.where(is_clipped, coefficient, 0.0).to(wide)
        self._unread.append(torch.where(counts, coefficient, 1.0))
        if len(self._unread) >= LAST // 2:
            self._warn_of_hard_clips(trainer, step)
        mean = torch.where(self._clipped > 0, self._coefficients / self._clipped.clamp(min=1.0), 1.0)
        return {
            "train/grad_norm_clipped": _trusted(norm * coefficient, doubt),
            "train/clip_coefficient": _trusted(coefficient, doubt),
            "train/clipped_share": self._clipped / self._counted.clamp(min=1.0),
            "train/clipped_to": mean,
        }

    def _read_doubts(self) -> None:
        """Warn if a gradient turns out to have been changed in a way that torch does not count."""
        doubts, self._doubts = self._doubts, []
        if doubts and not self._has_warned_of_change:
            found = cast("list[bool]", torch.stack([each for _, each in doubts]).tolist())
            first = next((update for (update, _), doubt in zip(doubts, found, strict=True) if doubt), None)
            if first is not None:
                self._warn_of_change(first)

    def _warn_of_change(self, update: int) -> None:
        if not self._has_warned_of_change:
            self._has_warned_of_change = True
            rank_zero_warn(
                f"update {update}: the gradients were changed after the backward pass, and not by a clip of "
                "torch, Lightning or the strategy, or they were clipped before the last backward pass. "
                "Their norm before the change is not known: train/grad_norm is left out of this update and "
                "of others like it. Clip once, with torch.nn.utils.clip_grad_norm_ or self.clip_gradients, "
                "and scale the loss instead of the gradients",
                category=ClipWarning,
            )

    def _read(self) -> None:
        if self._unread:
            self._recent.extend(cast("list[float]", torch.stack(self._unread).tolist()))
            self._unread.clear()

    def _warn_of_hard_clips(self, trainer: pl.Trainer, step: int) -> None:
        self._read()
        hard = sum(each < HARD for each in self._recent)
        if self._has_warned or len(self._recent) < LAST or hard <= LAST // 2:
            return
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

    def _note_received(self) -> None:
        if self._has_named or not self._lacking:
            return
        self._received |= {name for name, each in self._lacking if each.grad is not None}
        self._lacking = [(name, each) for name, each in self._lacking if each.grad is None]

    def _parts(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        optimizer: Optimizer,
        gradient: UpdateGradient,
    ) -> dict[str, Value]:
        norm = gradient.norm
        is_sound = norm.rows[:, 1] == 0
        zero = (is_sound & (norm.rows[:, 0] == 0)).sum()
        bad = (~is_sound).sum()
        with_gradient = len(norm.parameters)
        values: dict[str, Value] = {
            "gradients/none": len(optimizer_parameters(optimizer)) - with_gradient,
            "gradients/zero": zero,
            "gradients/nonfinite": bad,
            "gradients/finite": with_gradient - zero - bad,
        }
        if gradient.is_altered:
            return values
        norms = self._partial_norms(trainer, optimizer, norm, gradient.scale)
        values |= {name: _trusted(each, gradient.doubt) for name, each in norms.items()}
        threshold = clip_threshold(trainer, pl_module) if gradient.clip is None else None
        if threshold is not None and threshold != float("inf"):
            values["train/clip_threshold"] = threshold
        return values

    def _partial_norms(
        self, trainer: pl.Trainer, optimizer: Optimizer, norm: GradientNorm, scale: float
    ) -> dict[str, Tensor]:
        """Return the norms of parameter groups and layers."""
        squares = norm.rows[:, 0] / scale**2
        places = {id(each): place for place, each in enumerate(norm.parameters)}
        groups = {
            f"grad_norm_group/{name}": [
                places[id(each)] for each in cast("list[Tensor]", group["params"]) if id(each) in places
            ]
            for name, group in zip(self._group_names(trainer, optimizer), optimizer.param_groups, strict=True)
        }
        layers: dict[str, list[int]] = {}
        for place, each in enumerate(norm.parameters):
            layer = self._layer_of(self._names.get(id(each), "?"))
            if layer is not None:
                layers.setdefault(f"grad_norm_layer/{layer}", []).append(place)
        return {
            name: squares[chosen].sum().sqrt() if chosen else torch.zeros_like(norm.total)
            for name, chosen in (groups | layers).items()
        }

    def _group_names(self, trainer: pl.Trainer, optimizer: Optimizer) -> list[str]:
        names = group_names(optimizer)
        if len(trainer.optimizers) == 1:
            return names
        place = next((at for at, each in enumerate(trainer.optimizers) if each is optimizer), 0)
        return [f"{place}/{name}" for name in names]

    def _layer_of(self, name: str) -> str | None:
        for pattern in self._layers:
            match = pattern.search(name)
            if match is not None:
                return match.group()
        return None


class ClipWarning(UserWarning):
    """Most updates are clipped hard, gradients are changed unseen, or a parameter never gets a gradient."""


def _trusted(value: Tensor, doubt: Tensor | None) -> Value:
    return value if doubt is None else Doubtful(value.detach(), doubt)
