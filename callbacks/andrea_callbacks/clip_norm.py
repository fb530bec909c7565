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
from andrea_callbacks.gradients import GradientNorm, optimizer_parameters
from andrea_callbacks.host import widest
from andrea_callbacks.measuring import (
    automatic_coefficient,
    clip_threshold,
    is_due,
    measured_norm,
    remaining_scale,
)
from andrea_callbacks.protocols import reports_updates
from andrea_callbacks.scalars import Value
from andrea_callbacks.updates import ReportCallback
from andrea_callbacks.weights import forget_weights, group_names, remember_weights, weight_change

UNCLIPPED = 1.0 - 1e-6
"""Coefficients under this count as a clip."""

HARD = 0.5
"""Coefficients under this count as a hard clip: the norm was more than twice what was allowed."""

LAST = 100
"""Updates over which hard clips are counted."""

LAYERS = (r"^(?:\w+\.)*?\d+(?=\.)", r"^.*(?=\.)", r".*")
"""A numbered block, such as `network.blocks.3`, or the module that has the parameter."""


class PreClipNorm(ReportCallback):
    """Records the global L2 norm of the gradient before clipping, after it, and how often the clip bites.

    With a module that reports its updates the figures are the module's. In any other module the norm is
    measured in `on_before_optimizer_step`, which Lightning calls after the gradients were unscaled and before
    it clips. What the clip made of it is known under automatic optimization, where Lightning clips by
    `gradient_clip_val`; where a module clips by value, in its own way, or under its own manual optimization,
    what speaks of clipping is absent.

    With a fused optimizer under a GradScaler, Lightning leaves the gradients scaled; the norm then is that of
    the scaled gradient divided by the scale.

    Warns once when more than half of the last 100 updates were clipped to less than half their norm, and at
    the end of the first epoch of trainable parameters that never received a gradient. With several optimizers
    names of groups start with the optimizer's place.

    Args:
        every: Updates between two records of parameter groups, layers, kinds of gradients and weights.
        layers: Regular expressions, searched for in parameters' names; what the first that is found matches
            is the layer's name. By default a numbered block, or the module that has the parameter.
        name: Tells instances in the same trainer apart.

    Raises:
        ValueError: If `every` is less than 1 or an expression cannot be parsed.

    Metrics recorded:
        train/grad_norm: Norm before clipping.
        train/grad_norm_clipped: Norm after clipping.
        train/clip_coefficient: The second over the first.
        train/clipped_share: Share of updates so far that were clipped; those that are not finite do not
            count.
        train/clipped_to: Mean coefficient of those that were clipped.
        train/clip_threshold: What is clipped to, where anything is.
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

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Learn the parameters' names."""
        named = list(pl_module.named_parameters())
        self._names = {id(each): name for name, each in named}
        self._lacking = [
            (name, each) for name, each in named if each.requires_grad and name not in self._received
        ]
        self._due.clear()
        forget_weights(trainer)

    @override
    def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
        """Record what the module measured."""
        norm = report.get("grad_norm")
        if norm is not None:
            self._record(trainer, report["update"], norm, report.get("clip_coefficient"))

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Measure the norm where the module does not report it, and every now and then its parts."""
        update = trainer.global_step + 1
        due = is_due(trainer, update, self.every)
        reports = reports_updates(pl_module)
        self._note_received()
        if reports and not due:
            return
        norm = measured_norm(trainer, optimizer)
        scale = remaining_scale(trainer, optimizer)
        if not reports:
            total = norm.total / scale
            self._record(trainer, update, total, automatic_coefficient(trainer, pl_module, total))
        if due:
            self.record(trainer, update, self._parts(trainer, pl_module, optimizer, norm, scale))
            remember_weights(trainer, optimizer, update)
            self._due.append((update, optimizer))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record how far the weights moved."""
        due, self._due = self._due, []
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
            "clipped": float(self._clipped),
            "counted": float(self._counted),
            "coefficients": float(self._coefficients),
            "recent": list(self._recent),
            "has_warned": self._has_warned,
            "received": sorted(self._received),
            "has_named": self._has_named,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting."""
        self._clipped, self._counted = state_dict["clipped"], state_dict["counted"]
        self._coefficients = state_dict.get("coefficients", 0.0)
        self._recent = deque(state_dict.get("recent", ()), LAST)
        self._has_warned = state_dict.get("has_warned", False)
        self._received = set(state_dict.get("received", ()))
        self._has_named = state_dict.get("has_named", False)

    def _record(self, trainer: pl.Trainer, step: int, norm: Tensor, coefficient: Tensor | None) -> None:
        values: dict[str, Value] = {"train/grad_norm": norm}
        if coefficient is not None:
            is_finite = torch.isfinite(norm)
            is_clipped = is_finite & (coefficient < UNCLIPPED)
            wide = widest(norm.device)
            self._clipped = self._clipped + is_clipped.to(wide)
            self._counted = self._counted + is_finite.to(wide)
            self._coefficients = self._coefficients + torch.where(is_clipped, coefficient, 0.0).to(wide)
            values |= {
                "train/grad_norm_clipped": norm * coefficient,
                "train/clip_coefficient": coefficient,
                "train/clipped_share": self._clipped / self._counted.clamp(min=1.0),
                "train/clipped_to": torch.where(
                    self._clipped > 0, self._coefficients / self._clipped.clamp(min=1.0), 1.0
                ),
            }
            self._unread.append(torch.where(is_finite, coefficient, 1.0))
            if len(self._unread) >= LAST // 2:
                self._warn_of_hard_clips(trainer, step)
        self.record(trainer, step, values)

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
        norm: GradientNorm,
        scale: float,
    ) -> dict[str, Value]:
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
        values: dict[str, Value] = {
            name: squares[chosen].sum().sqrt() if chosen else 0.0
            for name, chosen in (groups | layers).items()
        }
        is_sound = norm.rows[:, 1] == 0
        zero = (is_sound & (norm.rows[:, 0] == 0)).sum()
        bad = (~is_sound).sum()
        with_gradient = len(norm.parameters)
        values |= {
            "gradients/none": len(optimizer_parameters(optimizer)) - with_gradient,
            "gradients/zero": zero,
            "gradients/nonfinite": bad,
            "gradients/finite": with_gradient - zero - bad,
        }
        threshold = clip_threshold(trainer, pl_module)
        if threshold is not None and threshold != float("inf"):
            values["train/clip_threshold"] = threshold
        return values

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
    """Most updates are clipped hard, or a parameter takes no part in training."""
