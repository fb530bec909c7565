"""Runs micro-batches again without side effects on the run."""

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import SyncBatchNorm
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchmetrics import Metric

from andrea_callbacks.hooks.gradient_watch import watching_paused
from andrea_callbacks.hooks.protocols import SequenceLosses, SumsLosses
from andrea_callbacks.hooks.update_window import UpdateWindow
from andrea_callbacks.numerics.gradient_norm import is_sharded
from andrea_callbacks.numerics.rng_state import RandomState

ReplayFunction = Callable[[pl.LightningModule, Any], Tensor]
"""Takes the module and a micro-batch; returns (B,) losses, one per sequence, or one 0-d loss, with graph.

Their sum is the micro-batch's trained loss, up to a factor that all micro-batches share.
"""

LossFunction = Callable[[Any], Tensor]

NO_REPLAY = (
    "attribution is not available: the module has no sequence_losses(micro_batch), and no replay= was given"
)


METRIC_CACHES = ("_update_count", "_computed", "_forward_cache", "_is_synced", "_cache")
"""Attributes of a torchmetrics Metric, besides its states, that `update` changes."""


class ReplayUnavailable(Exception):  # noqa: N818 - nothing went wrong
    """A module's updates cannot be run again; the message says why."""


def loss_function(pl_module: pl.LightningModule, replay: ReplayFunction | None) -> LossFunction:
    """Return the function that computes a micro-batch's losses again. It never runs `training_step`.

    Raises:
        ReplayUnavailable: If neither the module nor the user offers one.
    """
    if any(map(is_sharded, pl_module.parameters())):
        raise ReplayUnavailable("attribution is not available: the parameters are sharded over ranks (FSDP2)")
    if pl_module.trainer.world_size > 1 and any(
        isinstance(each, SyncBatchNorm) for each in pl_module.modules()
    ):
        raise ReplayUnavailable("attribution is not available: SyncBatchNorm would wait for the other ranks")
    if replay is not None:
        given = replay
        return lambda micro_batch: given(pl_module, micro_batch)
    for owner, offered in ((SequenceLosses, "sequence_losses"), (SumsLosses, "loss_sum")):
        if isinstance(pl_module, owner) and callable(getattr(pl_module, offered)):
            return getattr(pl_module, offered)
    raise ReplayUnavailable(NO_REPLAY)


def replay_failed(error: Exception) -> str:
    """Return a report's text about a replay that raised."""
    return f"attribution is not available: running the update again raised {type(error).__name__}: {error}"


@contextmanager
def undisturbed(trainer: pl.Trainer, pl_module: pl.LightningModule) -> Generator[None, None, None]:
    """Run the network in the training step's precision, and undo every side effect.

    The context restores random states, buffers (also replaced ones), states of torchmetrics, modes, gradients
    and `requires_grad`, even if restoring one of them fails. It drops what is logged, and no optimizer can
    step. It cannot restore other plain attributes of a module, or undo what the module's own hooks do.

    Raises:
        ReplayUnavailable: Before anything is run, if a buffer cannot be copied.
        RuntimeError: If an optimizer is about to step.
    """
    buffers = [_KeptBuffer(part, name, path) for part, name, path in _buffers(pl_module)]
    with ExitStack() as undo:
        undo.callback(RandomState(pl_module.device).restore)
        for generator in _generators(pl_module):
            undo.callback(generator.set_state, generator.get_state())
        for module in pl_module.modules():
            undo.callback(setattr, module, "training", module.training)
        for parameter in pl_module.parameters():
            undo.callback(parameter.requires_grad_, parameter.requires_grad)
            undo.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None  # a backward pass must not add to the update's
        for metric in pl_module.modules():
            if isinstance(metric, Metric):
                undo.callback(vars(metric).update, _metric_state(metric))
        for buffer in buffers:
            undo.callback(buffer.restore)
        undo.callback(register_optimizer_step_pre_hook(_refuse_step).remove)
        undo.enter_context(watching_paused())
        with _unlogged(pl_module), torch.enable_grad(), trainer.precision_plugin.train_step_context():
            yield


def _refuse_step(optimizer: Any, *_: Any) -> None:
    raise RuntimeError(
        f"{type(optimizer).__name__}.step() was called while losses were only to be computed again; replay "
        "must return losses, and neither call training_step nor run a backward pass"
    )


def _buffers(pl_module: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """Return the modules that have buffers, with each buffer's local and full name."""
    named = cast("Iterator[tuple[str, nn.Module]]", pl_module.named_modules())
    return [
        (part, name, f"{path}.{name}" if path else name)
        for path, part in named
        for name in part._buffers  # pyright: ignore[reportPrivateUsage]
    ]


class _KeptBuffer:
    """A copy of a buffer of any kind: dense, sparse, quantized, complex, empty or without data."""

    def __init__(self, module: nn.Module, name: str, path: str) -> None:
        self._module = module
        self._name = name
        self._path = path
        self._buffer = module._buffers[name]  # pyright: ignore[reportPrivateUsage]
        self._values: Tensor | None = None
        if self._buffer is not None and not self._buffer.is_meta:
            try:
                self._values = self._buffer.detach().clone()
            except Exception as error:  # a kind of tensor that cannot be copied
                raise ReplayUnavailable(
                    f"attribution is not available: the buffer {path} cannot be copied "
                    f"({type(error).__name__}: {error}), and running the update again might change it"
                ) from error

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffer and its values. A buffer that cannot be written is replaced by its copy."""
        self._module._buffers[self._name] = self._buffer  # pyright: ignore[reportPrivateUsage]
        if self._buffer is None or self._values is None or _is_same(self._buffer, self._values):
            return
        try:
            self._buffer.copy_(self._values)
        except (
            Exception
        ):  # views that overlap, sparse ones with other elements, and others torch cannot write
            self._module._buffers[self._name] = self._values  # pyright: ignore[reportPrivateUsage]


def _is_same(one: Tensor, other: Tensor) -> bool | None:
    """Return whether two tensors have the same bits; None if torch cannot compare them."""
    try:
        if one.layout is torch.strided and not one.is_quantized:
            return torch.equal(one, other)
        if one.layout is torch.sparse_coo:
            return one.is_coalesced() == other.is_coalesced() and all(
                map(torch.equal, _coordinates(one), _coordinates(other))
            )
        if one.is_quantized:
            return torch.equal(one, other)
        return torch.equal(one.to_dense(), other.to_dense())
    except Exception:  # kinds that torch does not compare
        return None


def _coordinates(sparse: Tensor) -> tuple[Tensor, Tensor]:
    return sparse._indices(), sparse._values()


@contextmanager
def _unlogged(pl_module: pl.LightningModule) -> Generator[None, None, None]:
    """Make the module's `log` and `log_dict` do nothing."""
    names = ("log", "log_dict")
    kept = {name: vars(pl_module)[name] for name in names if name in vars(pl_module)}
    for name in names:
        vars(pl_module)[name] = _say_nothing
    try:
        yield
    finally:
        for name in names:
            vars(pl_module).pop(name, None)
        vars(pl_module).update(kept)


def _metric_state(metric: Metric) -> dict[str, Any]:
    """Return copies of what `update` changes in a metric: its states and caches."""
    kept = vars(metric)
    states: dict[str, Any] = {}
    for name in cast("dict[str, Any]", kept.get("_defaults", {})):
        value = kept.get(name)
        states[name] = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
    return states | {name: kept[name] for name in METRIC_CACHES if name in kept}


def _say_nothing(*_: Any, **__: Any) -> None:
    """Stand in for a module's `log`."""


def _generators(module: nn.Module) -> list[torch.Generator]:
    found = (
        value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, torch.Generator)
    )
    return list({id(each): each for each in found}.values())


def run_again(
    losses_of: LossFunction, window: UpdateWindow, device: torch.device
) -> Generator[tuple[int, Any, Callable[[], Tensor]], None, None]:
    """Yield each micro-batch's number (from 1), the micro-batch, and a function that runs it, in order.

    Call the function before you ask for the next micro-batch: with dropout, later masks depend on earlier
    draws. A micro-batch that runs twice draws the same numbers again, also when the window is run again.
    """
    for number, (micro_batch, state) in enumerate(
        zip(window.micro_batches, window.states, strict=True), start=1
    ):
        if state is not None:
            state.restore()
        start = RandomState(device) if state is None else state
        window.states[number - 1] = start

        def run(part: Any = micro_batch, before: RandomState = start) -> Tensor:
            before.restore()
            for module, was_training in window.modes:
                module.training = was_training
            return losses_of(part)

        yield number, micro_batch, run


def trainable(module: nn.Module) -> tuple[list[str], list[Tensor]]:
    """Return names and tensors of the trainable parameters, each once."""
    named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    return [name for name, _ in named], [each for _, each in named]


def gradients_of(loss: Tensor, parameters: Sequence[Tensor], keep: bool = False) -> list[Tensor]:
    """Return the gradients of a loss, zeros for parameters that do not affect it. `.grad` does not change.

    Args:
        loss: 0-d, attached to its graph.
        parameters: P tensors.
        keep: Whether to keep the graph for another backward pass.
    """
    if not loss.requires_grad:
        return [torch.zeros_like(each) for each in parameters]
    found = cast(
        "tuple[Tensor | None, ...]",
        torch.autograd.grad(loss, list(parameters), retain_graph=keep, allow_unused=True),
    )
    return [
        torch.zeros_like(each) if gradient is None else _dense(gradient)
        for each, gradient in zip(parameters, found, strict=True)
    ]


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.layout != torch.strided else gradient
