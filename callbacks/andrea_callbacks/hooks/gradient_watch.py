"""Watches gradients from the backward pass to the step, to measure them before any change.

    a backward pass ends ──> mark them: which tensors, how often written, roughly which norms
    a clip begins ─────────> they still fit the mark: measure them, this is the update's gradient
    a clip ends ───────────> note its threshold, and the norm that is left
    the step's hook ───────> no clip came: measure them now
                             they do not fit the mark: something else changed them, and their norm is lost

A clip is one of torch's functions, whoever calls it and however it was imported, or a strategy's own
(`clip_begins`, `clip_ends`, `clip_is_planned`). torch's functions are wrapped only while a watched fit runs.
"""

import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from andrea_callbacks.hooks.gradient_marks import (
    Followed,
    doubt_of,
    fits,
    gradients_of,
    is_as,
    mark,
    rough_norms,
)
from andrea_callbacks.hooks.measuring import loss_scale, measured_norm, remaining_scale
from andrea_callbacks.hooks.protocols import reports_updates
from andrea_callbacks.hooks.torch_wrappers import TorchWrappers
from andrea_callbacks.hooks.update_gradient import Clip, UpdateGradient

MOST_IDLE_BATCHES = 50
"""Batches without a visible update after which callbacks warn."""


class GradientWatch:
    """Watches the gradients of a trainer's optimizers during a fit.

    Args:
        trainer: The trainer; held by a weak reference.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = ref(trainer)
        self._followed: WeakKeyDictionary[Optimizer, Followed] = WeakKeyDictionary()
        self._batches = self._idle = 0
        self._step = trainer.global_step
        self._was_asked = self._had_gradients = False
        self._has_warned_idle = False

    @property
    def trainer(self) -> pl.Trainer | None:
        """The trainer, None if it is gone or its fit is over."""
        trainer = self._trainer()
        return None if trainer is None or trainer.state.stopped else trainer

    def gradient(self, optimizer: Optimizer) -> UpdateGradient:
        """Return an optimizer's gradient before any change.

        Call it from `on_before_optimizer_step`. All callers at one step get the same answer.
        """
        followed = self._current(optimizer)
        gradient = followed.gradient = followed.gradient or self._measure(optimizer, followed)
        present = gradients_of(optimizer)
        if gradient.clip is None and not gradient.is_altered and not fits(followed, present):
            gradient.clip = Clip(threshold=None)  # by a function whose end is not seen, only its beginning
        followed.step = self._global_step()
        self._was_asked = True
        self._had_gradients |= bool(gradient.norm.parameters)
        if gradient.clip is not None and gradient.clip.clipped is None:
            gradient.clip.clipped = self._norm_now(optimizer)
        return gradient

    def step_is_seen(self, optimizer: Optimizer) -> None:
        """Record that callbacks saw an optimizer's step."""
        followed = self._current(optimizer)
        followed.idle, followed.had_gradients = 0, False

    def backward_begins(self) -> None:
        """Mark the gradients that a backward pass may add to, and check whether they were changed before."""
        for optimizer in self._optimizers():
            followed, present = self._current(optimizer), gradients_of(optimizer)
            is_clipped = followed.gradient is not None and followed.gradient.clip is not None
            followed.before = mark(present)
            followed.rest = None
            if present and (is_clipped or not fits(followed, present)):
                norms = rough_norms(present.values())
                device = next(iter(present.values())).device
                followed.rest = torch.ones((), dtype=torch.bool, device=device)
                if norms is not None:
                    followed.rest = (norms != 0).any()  # in-place zeroing is no change that matters

    def backward_ends(self) -> None:
        """Mark the gradients that a backward pass wrote. Marks of other gradients stay."""
        trainer = self._trainer()
        for optimizer in self._optimizers() if trainer is not None else []:
            followed, present = self._current(optimizer), gradients_of(optimizer)
            now = mark(present)
            wrote = {
                key: now[key] for key, each in present.items() if not is_as(each, followed.before.get(key))
            }
            if not wrote:
                continue
            if followed.rest is not None:
                followed.lost = followed.rest if followed.lost is None else followed.lost | followed.rest
            followed.gradient = None
            followed.had_gradients = True
            followed.marks = {key: mark for key, mark in followed.marks.items() if key in now} | wrote
            found = rough_norms(present.values())
            if found is None:
                followed.norms.clear()
            else:
                followed.norms.update(
                    (key, norm) for key, norm in zip(now, found.unbind(), strict=True) if key in wrote
                )
            followed.scale = loss_scale(cast(pl.Trainer, trainer), optimizer)

    def change_begins(self, tensors: Iterable[Tensor]) -> None:
        """Measure gradients that are about to change, unless they were measured before an earlier change."""
        changed = set(map(id, tensors))
        for optimizer in self._optimizers():
            if not changed.isdisjoint(map(id, gradients_of(optimizer).values())):
                followed = self._current(optimizer)
                if not _wrappers.is_in_backward():
                    followed.gradient = followed.gradient or self._measure(optimizer, followed)
                else:  # a hook of a parameter, when the rest of the gradient is still to come
                    followed.lost = torch.ones((), dtype=torch.bool)

    def change_ends(self, tensors: Iterable[Tensor], threshold: float | None, is_uniform: bool) -> None:
        """Record a clip of all of an optimizer's gradients, or of a part of them."""
        changed = set(map(id, tensors))
        for optimizer in self._optimizers():
            present = gradients_of(optimizer)
            own = set(map(id, present.values()))
            if not changed.isdisjoint(own):
                bound = threshold if own == changed else None  # a norm over more is not this one's
                self._note(optimizer, bound, is_uniform and own <= changed)

    def clip_is_planned(self, optimizer: Optimizer, threshold: float, norm: Tensor) -> None:
        """Record a strategy's clip, which may be applied only within the step, and the norm after it."""
        trainer = self._trainer()
        if trainer is not None and any(each is optimizer for each in self._optimizers()):
            self._note(optimizer, threshold, True, norm.detach() / remaining_scale(trainer, optimizer))

    def batch_ends(self) -> None:
        """Count batches without an update, and warn once if no update is seen."""
        trainer = self._trainer()
        if trainer is None or trainer.fit_loop.total_batch_idx == self._batches:
            return  # another callback has counted this one
        self._batches = trainer.fit_loop.total_batch_idx
        lacks_gradients = self._was_asked and not self._had_gradients  # a stand-in for what does the work
        is_idle = trainer.global_step == self._step or lacks_gradients
        self._was_asked = self._had_gradients = False
        self._idle = self._idle + 1 if is_idle else 0
        self._step = trainer.global_step
        most = max(MOST_IDLE_BATCHES, 2 * trainer.accumulate_grad_batches)
        unseen = "" if self._idle >= most else self._unseen_optimizers(most)
        if self._has_warned_idle or (self._idle < most and not unseen):
            return
        self._has_warned_idle = True
        rank_zero_warn(
            f"no update{unseen} was seen in the last {most} batches, and none is recorded. Lightning tells "
            "callbacks only of steps through its own wrapper: call step() of what self.optimizers() returns, "
            "not of self.optimizers(use_pl_optimizer=False) or of an optimizer kept elsewhere",
            category=UnwatchedWarning,
        )

    def _unseen_optimizers(self, most: int) -> str:
        """Return which of several optimizers received gradients but was never seen to step."""
        unseen: list[str] = []
        for place, optimizer in enumerate(self._optimizers()):
            followed = self._followed.get(optimizer)
            if followed is None:
                continue
            followed.idle += followed.had_gradients
            followed.had_gradients = False
            if followed.idle >= most:
                unseen.append(str(place))
        return f" of optimizer {' and '.join(unseen)}" if unseen else ""

    def _note(
        self, optimizer: Optimizer, threshold: float | None, is_uniform: bool, clipped: Tensor | None = None
    ) -> None:
        followed = self._current(optimizer)
        gradient = followed.gradient
        if gradient is None:
            return
        before, is_expected = gradient.clip, is_uniform and threshold == gradient.expected
        bound = None if threshold is None else threshold / gradient.scale
        if before is not None:
            known = bound is not None and before.threshold is not None
            bound = min(cast(float, bound), cast(float, before.threshold)) if known else None
            is_uniform &= before.is_uniform
        followed.marks = mark(gradients_of(optimizer))
        followed.norms.clear()
        if clipped is None and gradient.awaits_clip and not (before is None and is_expected):
            clipped = self._norm_now(optimizer)
        gradient.clip = Clip(threshold=bound, clipped=clipped, is_uniform=is_uniform)

    def _measure(self, optimizer: Optimizer, followed: Followed) -> UpdateGradient:
        trainer = cast(pl.Trainer, self._trainer())
        present = gradients_of(optimizer)
        return UpdateGradient(
            norm=measured_norm(trainer, optimizer),
            scale=remaining_scale(trainer, optimizer),
            is_altered=not fits(followed, present),
            doubt=doubt_of(followed, present, loss_scale(trainer, optimizer)),
        )

    def _norm_now(self, optimizer: Optimizer) -> Tensor:
        trainer = cast(pl.Trainer, self._trainer())
        return measured_norm(trainer, optimizer).total.detach() / remaining_scale(trainer, optimizer)

    def _current(self, optimizer: Optimizer) -> Followed:
        """Return the state since the optimizer's last step; older state is dropped."""
        followed = self._followed.get(optimizer)
        if followed is None or (followed.step is not None and self._global_step() != followed.step):
            followed = self._followed[optimizer] = Followed()
        return followed

    def _global_step(self) -> int:
        trainer = self._trainer()
        return -1 if trainer is None else trainer.global_step

    def _optimizers(self) -> list[Optimizer]:
        trainer = self._trainer()
        return [] if trainer is None else trainer.optimizers


class UnwatchedWarning(UserWarning):
    """Lightning does not tell callbacks about some updates."""


_watches: "WeakKeyDictionary[pl.Trainer, GradientWatch]" = WeakKeyDictionary()
_lock = threading.RLock()


def watch_gradients(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Watch the gradients of a new fit, unless its module reports its updates."""
    with _lock:
        _drop_finished()
        if trainer not in _watches and not reports_updates(pl_module):
            _watches[trainer] = GradientWatch(trainer)
            _wrappers.put_in()


def unwatch_gradients(trainer: pl.Trainer) -> None:
    """Stop watching the gradients of a fit. After the last fit torch's functions are unwrapped."""
    with _lock:
        _watches.pop(trainer, None)
        _drop_finished()


def _drop_finished() -> None:
    for trainer in [each for each in _watches if each.state.stopped]:
        del _watches[trainer]
    if not _watches:
        _wrappers.take_out()


def watch_of(trainer: pl.Trainer) -> GradientWatch | None:
    """Return the watch of a trainer's fit, or None."""
    return _watches.get(trainer)


def update_gradient(trainer: pl.Trainer, optimizer: Optimizer) -> UpdateGradient:
    """Return the gradient of the update that is about to step, before any change.

    Call it from `on_before_optimizer_step`. Without a watch the current gradients are measured.
    """
    watch = watch_of(trainer)
    if watch is not None:
        return watch.gradient(optimizer)
    return UpdateGradient(norm=measured_norm(trainer, optimizer), scale=remaining_scale(trainer, optimizer))


def clip_begins(gradients: list[Tensor]) -> None:
    """Tell callbacks that a strategy is about to clip gradients."""
    if _watches:
        _tell("change_begins", gradients)


def clip_ends(gradients: list[Tensor], threshold: float) -> None:
    """Tell callbacks that a strategy has clipped gradients to a global L2 norm."""
    if _watches:
        _tell("change_ends", gradients, threshold, True)


def clip_is_planned(optimizer: Optimizer, threshold: float, norm: Tensor) -> None:
    """Tell callbacks that a strategy has clipped an optimizer's gradients, or will within the step.

    Args:
        optimizer: The raw optimizer.
        threshold: Global L2 norm that the gradients are clipped to.
        norm: Norm after clipping, 0-d, in the unit of the gradients.
    """
    if _watches:
        _tell("clip_is_planned", optimizer, threshold, norm)


@contextmanager
def watching_paused() -> Generator[None, None, None]:
    """Ignore backward passes and clips in this context, such as those of a replay."""
    _wrappers.pauses += 1
    try:
        yield
    finally:
        _wrappers.pauses -= 1


def _tell(what: str, *arguments: Any) -> None:
    """Call a method of the watch of every running fit."""
    for watch in list(_watches.values()):
        if watch.trainer is not None:
            getattr(watch, what)(*arguments)


_wrappers = TorchWrappers(_tell, lambda: bool(_watches))
