"""Decides which backward passes exchange gradients among ranks."""

from collections.abc import Generator
from contextlib import contextmanager
from weakref import WeakSet

from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, Strategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_learned: "WeakSet[DistributedDataParallel]" = WeakSet()


@contextmanager
def only_last_synchronizes(strategy: Strategy, is_last: bool) -> Generator[None]:
    """Let ranks exchange gradients only on the last backward pass before a step.

    The context surrounds the forward and backward pass of one micro-batch. DDP with a static graph also
    exchanges on its very first pass, in which it learns the graph. Averaging an average again does not change
    it, so the gradient is the same.
    """
    model = getattr(strategy, "model", None)
    if not isinstance(strategy, ParallelStrategy) or not isinstance(model, nn.Module):
        yield
    elif isinstance(model, DistributedDataParallel):
        if is_last or (model.static_graph and model not in _learned):
            yield
            _learned.add(model)
        else:
            with model.no_sync():
                yield
    elif isinstance(strategy, ModelParallelStrategy):
        _set_sync(model, is_last)
        try:
            yield
        finally:
            _set_sync(model, True)
    elif is_last:
        yield
    else:
        with strategy.block_backward_sync():
            yield


def _set_sync(model: nn.Module, is_on: bool) -> None:
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(is_on, recurse=False)
