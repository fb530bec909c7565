"""Adam's moments: their size, how far an update moves the weights, and how long a spike lives in them.

m <- beta1 m + (1 - beta1) g        a gradient g is (1 - beta1) beta1^k g of m after k more updates
v <- beta2 v + (1 - beta2) g²       and (1 - beta2) beta2^k g² of v, whose root divides the rate
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from andrea_callbacks.hooks.events import RunEvent
from andrea_callbacks.hooks.measuring import optimizer_place
from andrea_callbacks.hooks.optimizer_steps import StepCallback, is_due
from andrea_callbacks.hooks.reports import UpdateReport
from andrea_callbacks.hooks.scalars import Value
from andrea_callbacks.numerics.bounds import require_at_least
from andrea_callbacks.numerics.gradient_norm import (
    is_sharded,
    local_gradient,
    optimizer_parameters,
    real_values,
    squared_norms,
)
from andrea_callbacks.numerics.host_transfer import reduce_over_ranks, widest
from andrea_callbacks.numerics.weight_change import (
    forget_weights,
    group_names,
    remember_weights,
    weight_change,
)

GONE = 0.01
"""A spike counts as gone when its part of the first moment, or its effect on the rate, is below this."""


@dataclass(slots=True, kw_only=True)
class _Spike:
    """A spike that an optimizer's moments still hold."""

    update: int
    step: int
    """The optimizer's own step, from 1."""
    norm: float
    """Norm after clipping."""
    skipped: list[int] = field(default_factory=list[int])
    """Updates since then that left the moments unchanged."""


class MomentMonitor(StepCallback):
    """Records the size of Adam's moments and of updates, and how much of the moments a spike still makes up.

    This works for any optimizer that keeps `exp_avg` and `exp_avg_sq`. For other optimizers only the norm of
    the update is recorded. Spikes are events that `SpikeForensics` or another callback publishes; their norm
    is taken after clipping if it is known. While a spike is fresh (`beta1^k` above 0.1), every update is
    recorded. Betas are those of the optimizer's first group. Skipped updates do not count. With several
    optimizers each has its own spikes, and the names of their scalars end with the optimizer's index
    (`…/spike_first_fraction/1`). Nothing waits for an accelerator.

    Args:
        every: Steps of an optimizer between two records.
        name: Tells instances in the same trainer apart.

    Raises:
        ValueError: If `every` is less than 1.

    Metrics recorded:
        moments/first/<group>: L2 norm of the first moment.
        moments/second/<group>: Root of the sum of the second moment, in units of a gradient's norm.
        moments/update/<group>: L2 norm of the change of the weights.
        moments/spike_first_fraction: Norm of the spike's part of the first moment over the norm of the first
            moment, at most 1.
        moments/spike_lr_factor: Factor on the learning rate that the spike causes in the second moment.
        moments/spike_first_updates_left: Updates until `spike_first_fraction` is below 0.01.
        moments/spike_lr_updates_left: Updates until `spike_lr_factor` is above 0.99.
    """

    def __init__(self, every: int = 25, name: str | None = None) -> None:
        super().__init__(name=name)
        require_at_least(1, "MomentMonitor", every=every)
        self.every = every
        self.reset()

    @override
    def reset(self) -> None:
        """Reset what an earlier fit left."""
        self._spikes: dict[str, _Spike] = {}
        self._due: list[tuple[int, int, Optimizer]] = []
        self._numbers: dict[str, deque[tuple[int, int]]] = {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drop the state of an update that was cut short."""
        super().on_train_start(trainer, pl_module)
        self._due.clear()
        self._numbers.clear()
        forget_weights(trainer)

    @override
    def on_report(self, trainer: pl.Trainer, report: UpdateReport) -> None:
        """Count updates that left the moments unchanged."""
        if not report.is_applied:
            self._note_skipped("0", report.update)

    def take_event(self, trainer: pl.Trainer, event: RunEvent) -> None:
        """Follow a spike, unless an earlier one still weighs more; count updates that FiniteGuard skipped."""
        place = str(event.details.get("optimizer", "0"))
        if event.kind == "nonfinite" and event.details.get("skipped"):
            self._note_skipped(place, event.update)
        clipped = _clipped_norm(event.details)
        if event.kind != "spike" or clipped is None:
            return
        step = self._step_of(trainer, place, event.update)
        spike, betas = self._spikes.get(place), _betas_at(trainer, place)
        kept = 0.0
        if spike is not None and betas is not None:
            kept = spike.norm * betas[0] ** _age(spike, step)
        if clipped >= kept:
            self._spikes[place] = _Spike(update=event.update, step=step, norm=clipped)

    def _note_skipped(self, place: str, update: int) -> None:
        if place in self._spikes:
            self._spikes[place].skipped.append(update)

    def _step_of(self, trainer: pl.Trainer, place: str, update: int) -> int:
        """Return which of an optimizer's steps an update was, or is about to be."""
        if len(trainer.optimizers) < 2:
            return update
        for number, step in self._numbers.get(place, ()):
            if number == update:
                return step
        return self.steps.of(place) + 1

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Copy the weights if this update is recorded."""
        step = self.steps.next(trainer, optimizer)
        if step is None:
            return
        self._record_due(trainer, optimizer)
        update, place = trainer.global_step + 1, optimizer_place(trainer, optimizer)
        self._numbers.setdefault(place, deque(maxlen=4)).append((update, step))
        if is_due(step, self.every):
            remember_weights(trainer, optimizer, update)
            self._due.append((update, step, optimizer))
        elif self._is_fresh(place, optimizer, step):
            self._due.append((update, step, optimizer))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record moments and update."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._record_due(trainer)

    def _record_due(self, trainer: pl.Trainer, of: Optimizer | None = None) -> None:
        """Record the steps that are due: of one optimizer before it steps again, or of all."""
        due = [each for each in self._due if of is None or each[2] is of]
        self._due = [each for each in self._due if each not in due]
        for update, step, optimizer in due:
            place = optimizer_place(trainer, optimizer)
            prefix, suffix = (f"{place}/", f"/{place}") if len(trainer.optimizers) > 1 else ("", "")
            names = [f"{prefix}{name}" for name in group_names(optimizer)]
            values: dict[str, Value] = {}
            change = weight_change(trainer, optimizer, update)
            if change is not None:
                values |= {
                    f"moments/update/{name}": each for name, each in zip(names, change[1], strict=True)
                }
            sums = _moment_sums(optimizer)
            if sums is not None:
                for name, first, second in zip(names, *sums, strict=True):
                    values |= {f"moments/first/{name}": first.sqrt(), f"moments/second/{name}": second.sqrt()}
                followed = self._follow_spike(place, optimizer, step, sums[0].sum().sqrt(), sums[1].sum())
                values |= {f"{name}{suffix}": value for name, value in followed.items()}
            self.record(trainer, update, values)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the followed spikes and the steps of each optimizer."""
        spikes = {place: asdict(spike) for place, spike in self._spikes.items()}
        return {"spikes": spikes, "steps": self.steps.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue to follow the spikes."""
        self.steps.load_state_dict(state_dict.get("steps", {}))
        self._spikes = {place: _Spike(**each) for place, each in state_dict.get("spikes", {}).items()}
        spike = state_dict.get("spike")  # before spikes were kept by optimizer
        if spike is not None:
            skipped = list(state_dict["skipped"])
            self._spikes["0"] = _Spike(
                update=spike["update"], step=spike["update"], norm=spike["norm"], skipped=skipped
            )

    def _is_fresh(self, place: str, optimizer: Optimizer, step: int) -> bool:
        spike, betas = self._spikes.get(place), _betas(optimizer)
        return spike is not None and betas is not None and betas[0] ** _age(spike, step) > 0.1

    def _follow_spike(
        self, place: str, optimizer: Optimizer, step: int, first: Tensor, second: Tensor
    ) -> dict[str, Tensor]:
        betas, spike = _betas(optimizer), self._spikes.get(place)
        if spike is None or betas is None or _age(spike, step) < 0:
            return {}
        beta1, beta2 = betas
        age = _age(spike, step)
        part = (1 - beta1) * beta1**age * spike.norm
        square = (1 - beta2) * beta2**age * spike.norm**2
        share = (part / first).clamp(max=1.0)
        damped = (square / second).clamp(max=1.0)
        if beta1**age < GONE**3 and beta2**age < GONE:
            del self._spikes[place]
        return {
            "moments/spike_first_fraction": share,
            "moments/spike_lr_factor": (1.0 - damped).sqrt(),
            "moments/spike_first_updates_left": _until(share, GONE, beta1),
            "moments/spike_lr_updates_left": _until(damped, 1.0 - (1.0 - GONE) ** 2, beta2),
        }


def _age(spike: _Spike, step: int) -> int:
    """Return how many of an optimizer's steps have changed its moments since a spike."""
    return step - spike.step - len({each for each in spike.skipped if each > spike.update})


def _clipped_norm(details: Mapping[str, Any]) -> float | None:
    """Return a spike's norm after clipping, None where that is not known."""
    if details.get("clipped_norm") is not None:
        return float(details["clipped_norm"])
    norm, threshold = details.get("norm"), details.get("clip_threshold")
    return None if norm is None or threshold is None else min(norm, threshold)


def _until(part: Tensor, least: float, beta: float) -> Tensor:
    """Return after how many updates a part that decays by `beta` is below `least`, with the rest steady."""
    if beta <= 0:
        return torch.zeros_like(part)
    return (math.log(least) - part.clamp(min=1e-300).log()).div(math.log(beta)).clamp(min=0.0).ceil()


def _betas(optimizer: Optimizer) -> tuple[float, float] | None:
    betas = optimizer.param_groups[0].get("betas")
    return None if betas is None else (float(betas[0]), float(betas[1]))


def _betas_at(trainer: pl.Trainer, place: str) -> tuple[float, float] | None:
    found = [each for each in trainer.optimizers if optimizer_place(trainer, each) == place]
    return _betas(found[0]) if found else None


@torch.no_grad()
def _moment_sums(optimizer: Optimizer) -> tuple[Tensor, Tensor] | None:
    """Return (G,) sums of squared first moments and (G,) sums of second moments; None without moments."""
    firsts: list[Tensor] = []
    seconds: list[Tensor] = []
    found = False
    for group in optimizer.param_groups:
        parameters = cast("list[Tensor]", group["params"])
        states = [optimizer.state[each] for each in parameters if each in optimizer.state]
        first = [real_values(local_gradient(each["exp_avg"])) for each in states if "exp_avg" in each]
        second = [real_values(local_gradient(each["exp_avg_sq"])) for each in states if "exp_avg_sq" in each]
        found |= bool(first and second)
        device = parameters[0].device if parameters else torch.device("cpu")
        nothing = torch.zeros((), dtype=widest(device), device=device)
        firsts.append(squared_norms(first)[:, 0].sum() if first else nothing)
        sums = [each.sum(dtype=widest(device)) for each in second]
        seconds.append(torch.stack(sums).sum() if sums else nothing)
    if not found:
        return None
    home = next((each.device for each in optimizer_parameters(optimizer)), torch.device("cpu"))
    result = tuple(torch.stack([each.to(home, widest(home)) for each in part]) for part in (firsts, seconds))
    if any(is_sharded(each) for group in optimizer.param_groups for each in group["params"]):
        for each in result:
            reduce_over_ranks(each, "sum")
    return result[0], result[1]
