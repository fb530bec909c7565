"""Follows gradients from the backward pass to the step, to know them as they were before any change.

    a backward pass ends ──> mark them: which tensors, how often written, roughly which norms
    a clip begins ─────────> they still fit the mark: measure them, this is the update's gradient
    a clip ends ───────────> note its threshold, and the norm that is left
    the step's hook ───────> no clip came: measure them now
                             they do not fit the mark: something else changed them, and their norm is lost

A clip is one of torch's functions, whoever calls it and however it was imported, or a strategy's own
(`clip_begins`, `clip_ends`, `clip_is_planned`). torch's functions are wrapped while a watched fit runs, and
at no other time.
"""

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import lightning.pytorch as pl
import torch
import torch.nn.utils.clip_grad as torch_clip
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from andrea_callbacks.gradients import (
    GradientNorm,
    is_sharded,
    optimizer_parameters,
    version_of,
)
from andrea_callbacks.measuring import loss_scale, measured_norm, remaining_scale
from andrea_callbacks.protocols import reports_updates

CHANGED = 1e-5
"""Relative difference of a gradient's norm from which on it counts as changed; rounding is under this."""

MOST_IDLE_BATCHES = 50
"""Batches without an update that callbacks hear of, after which they say so."""


@dataclass(slots=True, kw_only=True)
class Clip:
    """What clips made of a gradient."""

    threshold: float | None
    """Global L2 norm that the whole gradient was clipped to, without a loss scale; None where it was clipped
    by value, by another norm, in parts, or twice."""
    clipped: Tensor | None = None
    """Norm that was left, 0-d, without a loss scale; None until it is measured."""
    is_uniform: bool = False
    """Whether every element was multiplied by the same number."""


@dataclass(slots=True, kw_only=True)
class UpdateGradient:
    """The gradient of an update as it was before anybody changed it, for one optimizer."""

    norm: GradientNorm
    """As measured, with `scale` in it."""
    scale: float
    """The loss scale that the measured gradients carried; 1 where there was none any more."""
    is_altered: bool = False
    """Whether something other than a clip changed it before it was measured; `norm` is of what was left."""
    doubt: Tensor | None = None
    """0-d bool on the device: whether it was changed in a way that torch does not count, such as through
    `.data`; None where that cannot be told."""
    clip: Clip | None = None
    """What clips made of it so far, None where there was none."""
    awaits_clip: bool = False
    """Whether somebody wants to know of a clip that comes after the step's hook, and what it leaves."""
    expected: float | None = None
    """The threshold of a clip that is coming, of which it is known beforehand what it leaves."""

    @property
    def total(self) -> Tensor:
        """Global L2 norm without a loss scale, 0-d."""
        return self.norm.total.detach() / self.scale


Written = dict[int, tuple["ref[Tensor]", int]]
"""By the `id` of a parameter: its gradient, and how often that was written."""


@dataclass(slots=True, kw_only=True)
class _Followed:
    """What is known of an optimizer's gradients since its last step."""

    marks: Written = field(default_factory=Written)
    """As the last backward pass that wrote them, or the last clip, left them."""
    norms: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Their rough norms, 0-d; none after a clip."""
    scale: Tensor | float = 1.0
    """The loss scale in them."""
    before: Written = field(default_factory=Written)
    """As they were when the backward pass that is under way began."""
    rest: Tensor | None = None
    """0-d bool: whether anything but zeros was there then, changed since its mark; None where nothing was."""
    lost: Tensor | None = None
    """0-d bool: whether a backward pass added to gradients that had been changed."""
    gradient: UpdateGradient | None = None
    step: int | None = None
    """`global_step` when the hook before the step came; None before it."""
    idle: int = 0
    """Batches in a row that gave it gradients, without a step that callbacks were told of."""
    had_gradients: bool = False
    """Whether a backward pass of this batch wrote its gradients."""


class GradientWatch:
    """Follows the gradients of a trainer's optimizers during a fit.

    Args:
        trainer: Its optimizers, precision plugin and strategy are asked.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = ref(trainer)
        self._followed: WeakKeyDictionary[Optimizer, _Followed] = WeakKeyDictionary()
        self._batches = self._idle = 0
        self._step = trainer.global_step
        self._was_asked = self._had_gradients = False
        self._has_warned_idle = False

    @property
    def trainer(self) -> pl.Trainer | None:
        """The trainer, None where it is gone or its fit is over."""
        trainer = self._trainer()
        return None if trainer is None or trainer.state.stopped else trainer

    def gradient(self, optimizer: Optimizer) -> UpdateGradient:
        """Return an optimizer's gradient as it was before anybody changed it.

        Called from `on_before_optimizer_step`; the answer is the same for everybody who asks at this step.
        """
        followed = self._current(optimizer)
        gradient = followed.gradient = followed.gradient or self._measure(optimizer, followed)
        present = _gradients(optimizer)
        if gradient.clip is None and not gradient.is_altered and not _fits(followed, present):
            gradient.clip = Clip(threshold=None)  # by a function whose end is not seen, only its beginning
        followed.step = self._global_step()
        self._was_asked = True
        self._had_gradients |= bool(gradient.norm.parameters)
        if gradient.clip is not None and gradient.clip.clipped is None:
            gradient.clip.clipped = self._norm_now(optimizer)
        return gradient

    def step_is_seen(self, optimizer: Optimizer) -> None:
        """Note that callbacks were told of an optimizer's step."""
        followed = self._current(optimizer)
        followed.idle, followed.had_gradients = 0, False

    def backward_begins(self) -> None:
        """Remember the gradients that a backward pass may add to, and whether they were changed before it."""
        for optimizer in self._optimizers():
            followed, present = self._current(optimizer), _gradients(optimizer)
            is_clipped = followed.gradient is not None and followed.gradient.clip is not None
            followed.before = _written(present)
            followed.rest = None
            if present and (is_clipped or not _fits(followed, present)):
                norms = _rough_norms(present.values())
                device = next(iter(present.values())).device
                followed.rest = torch.ones((), dtype=torch.bool, device=device)
                if norms is not None:
                    followed.rest = (norms != 0).any()  # in-place zeroing is no change that matters

    def backward_ends(self) -> None:
        """Mark the gradients that a backward pass wrote; those of other optimizers stay as they are known."""
        trainer = self._trainer()
        for optimizer in self._optimizers() if trainer is not None else []:
            followed, present = self._current(optimizer), _gradients(optimizer)
            now = _written(present)
            wrote = {
                key: now[key] for key, each in present.items() if not _is_as(each, followed.before.get(key))
            }
            if not wrote:
                continue
            if followed.rest is not None:
                followed.lost = followed.rest if followed.lost is None else followed.lost | followed.rest
            followed.gradient = None
            followed.had_gradients = True
            followed.marks = {key: mark for key, mark in followed.marks.items() if key in now} | wrote
            found = _rough_norms(present.values())
            if found is None:
                followed.norms.clear()
            else:
                followed.norms.update(
                    (key, norm) for key, norm in zip(now, found.unbind(), strict=True) if key in wrote
                )
            followed.scale = loss_scale(cast(pl.Trainer, trainer), optimizer)

    def change_begins(self, tensors: Iterable[Tensor]) -> None:
        """Measure gradients that are about to be changed, unless an earlier change was noted."""
        changed = set(map(id, tensors))
        for optimizer in self._optimizers():
            if not changed.isdisjoint(map(id, _gradients(optimizer).values())):
                followed = self._current(optimizer)
                if not _wrappers.is_in_backward():
                    followed.gradient = followed.gradient or self._measure(optimizer, followed)
                else:  # a hook of a parameter, when the rest of the gradient is still to come
                    followed.lost = torch.ones((), dtype=torch.bool)

    def change_ends(self, tensors: Iterable[Tensor], threshold: float | None, is_uniform: bool) -> None:
        """Note a clip of gradients: all of an optimizer's, or a part of them."""
        changed = set(map(id, tensors))
        for optimizer in self._optimizers():
            present = _gradients(optimizer)
            own = set(map(id, present.values()))
            if not changed.isdisjoint(own):
                bound = threshold if own == changed else None  # a norm over more is not this one's
                self._note(optimizer, bound, is_uniform and own <= changed)

    def clip_is_planned(self, optimizer: Optimizer, threshold: float, norm: Tensor) -> None:
        """Note a strategy's clip, which may be applied only within the step, and the norm that is left."""
        trainer = self._trainer()
        if trainer is not None and any(each is optimizer for each in self._optimizers()):
            self._note(optimizer, threshold, True, norm.detach() / remaining_scale(trainer, optimizer))

    def batch_ends(self) -> None:
        """Count batches without an update, and say once that no update is seen."""
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
        """Return which of several optimizers got gradients all the time and was never seen to step."""
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
        followed.marks = _written(_gradients(optimizer))
        followed.norms.clear()
        if clipped is None and gradient.awaits_clip and not (before is None and is_expected):
            clipped = self._norm_now(optimizer)
        gradient.clip = Clip(threshold=bound, clipped=clipped, is_uniform=is_uniform)

    def _measure(self, optimizer: Optimizer, followed: _Followed) -> UpdateGradient:
        trainer = cast(pl.Trainer, self._trainer())
        present = _gradients(optimizer)
        return UpdateGradient(
            norm=measured_norm(trainer, optimizer),
            scale=remaining_scale(trainer, optimizer),
            is_altered=not _fits(followed, present),
            doubt=_doubt(followed, present, loss_scale(trainer, optimizer)),
        )

    def _norm_now(self, optimizer: Optimizer) -> Tensor:
        trainer = cast(pl.Trainer, self._trainer())
        return measured_norm(trainer, optimizer).total.detach() / remaining_scale(trainer, optimizer)

    def _current(self, optimizer: Optimizer) -> _Followed:
        """Return what is known since the optimizer's last step; nothing before it counts any more."""
        followed = self._followed.get(optimizer)
        if followed is None or (followed.step is not None and self._global_step() != followed.step):
            followed = self._followed[optimizer] = _Followed()
        return followed

    def _global_step(self) -> int:
        trainer = self._trainer()
        return -1 if trainer is None else trainer.global_step

    def _optimizers(self) -> list[Optimizer]:
        trainer = self._trainer()
        return [] if trainer is None else trainer.optimizers


class UnwatchedWarning(UserWarning):
    """Updates are made that Lightning does not tell callbacks of."""


def _gradients(optimizer: Optimizer) -> dict[int, Tensor]:
    """Return the gradients of an optimizer by the `id` of their parameters."""
    return {id(each): each.grad for each in optimizer_parameters(optimizer) if each.grad is not None}


def _written(gradients: dict[int, Tensor]) -> Written:
    return {key: (ref(each), version_of(each)) for key, each in gradients.items()}


def _fits(followed: _Followed, gradients: dict[int, Tensor]) -> bool:
    """Say whether gradients are the tensors that were marked, not written to since; or were never marked."""
    marked = [(each, followed.marks[key]) for key, each in gradients.items() if key in followed.marks]
    return all(_is_as(each, mark) for each, mark in marked)


def _is_as(gradient: Tensor, mark: "tuple[ref[Tensor], int] | None") -> bool:
    """Say whether a gradient is the tensor of a mark, not written to since; refs would compare by value."""
    return mark is not None and mark[0]() is gradient and mark[1] == version_of(gradient)


def _rough_norms(gradients: Iterable[Tensor]) -> Tensor | None:
    """Return (P,) norms that are equal for equal gradients, None for kinds that are not looked at."""
    values = [each.detach() for each in gradients]
    if not values or any(is_sharded(each) or each.layout != torch.strided for each in values):
        return None
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, each in enumerate(values):
        kinds.setdefault((each.device, each.dtype), []).append(place)
    norms: dict[int, Tensor] = {}
    with torch.no_grad(), torch.autocast(values[0].device.type, enabled=False):
        for (_, dtype), places in kinds.items():  # few launches, however many gradients
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
            found = torch._foreach_norm([values[place] for place in places], 2.0, wide)  # pyright: ignore
            norms.update(zip(places, found, strict=True))
        home = values[0].device
        return torch.stack([norms[place].to(home, torch.float32) for place in range(len(values))])


def _doubt(followed: _Followed, gradients: dict[int, Tensor], scale: Tensor | float) -> Tensor | None:
    """Return whether the norms of gradients are lost, or others than those that were marked, 0-d.

    None where that cannot be told.
    """
    known = {key: each for key, each in gradients.items() if key in followed.norms}
    now = _rough_norms(known.values())
    lost = None if followed.lost is None or not gradients else followed.lost
    if now is None:
        return lost
    before = torch.stack([followed.norms[key] for key in known]) * scale
    now = now * followed.scale
    is_same = (before - now).abs() <= CHANGED * before.abs()
    is_changed = ~(is_same | ~torch.isfinite(before) & ~torch.isfinite(now)).all()
    return is_changed if lost is None else is_changed | lost.to(is_changed.device)


_watches: "WeakKeyDictionary[pl.Trainer, GradientWatch]" = WeakKeyDictionary()
_lock = threading.RLock()


def watch_gradients(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Follow the gradients of a fit that begins, unless its module reports its own updates."""
    with _lock:
        _drop_finished()
        if trainer not in _watches and not reports_updates(pl_module):
            _watches[trainer] = GradientWatch(trainer)
            _wrappers.put_in()


def unwatch_gradients(trainer: pl.Trainer) -> None:
    """Follow the gradients of a fit no longer; torch's functions are its own again after the last one."""
    with _lock:
        _watches.pop(trainer, None)
        _drop_finished()


def _drop_finished() -> None:
    for trainer in [each for each in _watches if each.state.stopped]:
        del _watches[trainer]
    if not _watches:
        _wrappers.take_out()


def watch_of(trainer: pl.Trainer) -> GradientWatch | None:
    """Return what follows the gradients of a trainer's fit, None where nothing does."""
    return _watches.get(trainer)


def update_gradient(trainer: pl.Trainer, optimizer: Optimizer) -> UpdateGradient:
    """Return the gradient of the update that is about to step, as it was before anybody changed it.

    Called from `on_before_optimizer_step`. Where nothing follows the gradients they are measured as they are.
    """
    watch = watch_of(trainer)
    if watch is not None:
        return watch.gradient(optimizer)
    return UpdateGradient(norm=measured_norm(trainer, optimizer), scale=remaining_scale(trainer, optimizer))


def clip_begins(gradients: list[Tensor]) -> None:
    """Let callbacks know that a strategy is about to clip gradients."""
    if _watches:
        _tell("change_begins", gradients)


def clip_ends(gradients: list[Tensor], threshold: float) -> None:
    """Let callbacks know that a strategy has clipped gradients to a global L2 norm."""
    if _watches:
        _tell("change_ends", gradients, threshold, True)


def clip_is_planned(optimizer: Optimizer, threshold: float, norm: Tensor) -> None:
    """Let callbacks know that a strategy has clipped an optimizer's gradients, or will within the step.

    Args:
        optimizer: The raw one.
        threshold: Global L2 norm clipped to.
        norm: Norm that is left, 0-d, in the unit of the gradients.
    """
    if _watches:
        _tell("clip_is_planned", optimizer, threshold, norm)


@contextmanager
def watching_paused() -> Generator[None, None, None]:
    """Let backward passes and clips go by unseen, such as those of an update that is run again."""
    _wrappers.pauses += 1
    try:
        yield
    finally:
        _wrappers.pauses -= 1


def _tell(what: str, *arguments: Any) -> None:
    """Call a method of the watch of every fit that runs."""
    for watch in list(_watches.values()):
        if watch.trainer is not None:
            getattr(watch, what)(*arguments)


class _Wrappers:
    """Functions of torch, wrapped so that fits that are watched learn of backward passes and clips.

    `clip_grad_norm_`, `clip_grad_value_` and `clip_grads_with_norm_` all group their gradients by device
    first, by
    a function that they look up in their own module: wrapping that one reaches them however they were
    imported. With nothing to watch the wrappers only call the original; `torch.compile` does not trace them.
    """

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any, Any]] = []
        self._in_backward: set[int] = set()
        self._norm_type = 2.0
        self.pauses = 0

    def is_in_backward(self) -> bool:
        """Say whether this thread runs a backward pass, or works for one."""
        is_of_torch = isinstance(threading.current_thread(), threading._DummyThread)  # pyright: ignore
        return bool(self._in_backward) and (threading.get_ident() in self._in_backward or is_of_torch)

    def put_in(self) -> None:
        """Wrap the functions, where they are not wrapped."""
        if self._put:
            return
        for owner, name, wrap in (
            (torch.autograd, "backward", self._backward),
            (torch_clip, "_group_tensors_by_device_and_dtype", self._group),
            (torch_clip, "_get_total_norm", self._total_norm),
            (torch_clip, "_clip_grads_with_norm_", self._clip_by_norm),
            (torch.nn.utils, "clip_grad_value_", self._clip_by_value),
        ):
            original = getattr(owner, name, None)
            if original is not None:
                wrapper = wraps(original)(self._where_watched(original, wrap(original)))
                setattr(owner, name, wrapper)
                self._put.append((owner, name, original, wrapper))

    def take_out(self) -> None:
        """Put the functions back, all but those that somebody else has wrapped since."""
        put, self._put = self._put, []
        for owner, name, original, wrapper in put:
            if getattr(owner, name) is wrapper:
                setattr(owner, name, original)

    def _where_watched(self, original: Callable[..., Any], watched: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.pauses or not _watches:
                return original(*arguments, **options)
            return watched(*arguments, **options)

        return torch.compiler.disable(call)  # dynamo would trace it, and what it tells would get lost

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*arguments: Any, **options: Any) -> Any:
            thread = threading.get_ident()
            if self.is_in_backward():  # checkpointing runs backward passes within one
                return original(*arguments, **options)
            _tell("backward_begins")
            self._in_backward.add(thread)
            try:
                result = original(*arguments, **options)
            finally:
                self._in_backward.discard(thread)
            _tell("backward_ends")
            return result

        return backward

    def _group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def group(tensors: Any, *arguments: Any, **options: Any) -> Any:
            _tell("change_begins", [each for each in tensors[0] if each is not None])
            return original(tensors, *arguments, **options)

        return group

    def _total_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def total_norm(tensors: Any, norm_type: float = 2.0, *arguments: Any, **options: Any) -> Any:
            self._norm_type = float(norm_type)
            return original(tensors, norm_type, *arguments, **options)

        return total_norm

    def _clip_by_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, max_norm: float, *arguments: Any, **options: Any) -> Any:
            listed = _listed(parameters)
            result = original(listed, max_norm, *arguments, **options)
            threshold = float(max_norm) if self._norm_type == 2.0 else None
            _tell("change_ends", _of(listed), threshold, True)
            return result

        return clip

    def _clip_by_value(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, *arguments: Any, **options: Any) -> Any:
            listed = _listed(parameters)
            result = original(listed, *arguments, **options)
            _tell("change_ends", _of(listed), None, False)
            return result

        return clip


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _of(parameters: list[Tensor]) -> list[Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


_wrappers = _Wrappers()
