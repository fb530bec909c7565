"""The clip hook on several ranks."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from andrea_pl.errors import UserError
from andrea_pl.optim.clipping import ClipperKind
from andrea_pl.strategies.clip_mixin import ClipHook
from andrea_pl.strategies.synchronization import only_last_synchronizes


class _SynchronizesLast(ClipHook):
    """A strategy for several ranks that can suppress the gradient exchange by `block_backward_sync`."""

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Accumulate gradients on this rank only."""
        with only_last_synchronizes(self, is_last=False):
            yield


class ClipDDPStrategy(_SynchronizesLast, DDPStrategy):
    """Replicas of the model (DDP) with the clip hook; registered as `clip_ddp`.

    When gradients are clipped, they are equal on all ranks, and so is their norm: it is not reduced again.

    Args:
        clipper: See `Clipper`.
        options: Options of Lightning's DDPStrategy, including `static_graph`.
    """

    strategy_name = "clip_ddp"

    def __init__(self, clipper: ClipperKind = "auto", **options: Any) -> None:
        super().__init__(clipper=clipper, **options)


class ClipModelParallelStrategy(_SynchronizesLast, ModelParallelStrategy):
    """Sharded models (FSDP2) with the clip hook; registered as `clip_model_parallel`.

    Sums of squares are added over the ranks that share a parameter, so that every rank has the same norm. A
    module shards itself in `configure_model`, by `fully_shard` on inner modules.

    Args:
        clipper: See `Clipper`.
        data_parallel_size: Number of ranks that share data and parameters; `auto` uses all ranks that tensor
            parallelism leaves.
        tensor_parallel_size: Number of ranks that work on the same data.
        save_distributed_checkpoint: False writes one file, which any strategy and `andrea generate` can read.
            True writes a folder with one file per rank, which only this strategy can continue.
        options: Options of Lightning's ModelParallelStrategy.
    """

    strategy_name = "clip_model_parallel"

    def __init__(
        self,
        clipper: ClipperKind = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = False,
        **options: Any,
    ) -> None:
        self._takes_all_ranks = data_parallel_size == "auto"
        super().__init__(
            clipper=clipper,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            **options,
        )

    @override
    def setup_environment(self) -> None:
        """Set up the device mesh over all ranks."""
        if self._takes_all_ranks:
            self._data_parallel_size = self.num_processes * self.num_nodes // int(self._tensor_parallel_size)
        super().setup_environment()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Refuse a GradScaler, which checks only one rank's shards."""
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise UserError(
                f"{type(self).__name__} cannot work with a GradScaler, which would skip on one rank and "
                f"step on "
                "another; use trainer.precision: bf16-mixed or bf16-true"
            )
        super().setup(trainer)
        if any(isinstance(each, torch.optim.SGD) and each.defaults["fused"] for each in self.optimizers):
            raise UserError(
                f"torch has no fused SGD for the sharded parameters of {type(self).__name__}; use fused: "
                "false, or fused AdamW"
            )

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint, unless Lightning would assign moments to the wrong parameters.

        This strategy takes an optimizer's parameter numbers for indices in the model. Other strategies number
        parameters by the optimizer's groups.
        """
        path = Path(self.broadcast(checkpoint_path))
        if path.is_file() and self.optimizers:
            kept = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only is not False)
            for state, optimizer in zip(kept.get("optimizer_states", []), self.optimizers, strict=False):
                if [group["params"] for group in state["param_groups"]] != self._places(optimizer):
                    raise UserError(
                        f"{path}: written under another strategy, which numbers an optimizer's parameters in "
                        f"another order than {type(self).__name__}; `init_from` takes the weights alone"
                    )
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _places(self, optimizer: Optimizer) -> list[list[int]]:
        """Return the indices in the model of each group's parameters."""
        model = cast(nn.Module, self.model)
        places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        return [[places[id(each)] for each in group["params"]] for group in optimizer.param_groups]


for each in (ClipDDPStrategy, ClipModelParallelStrategy):
    StrategyRegistry.register(each.strategy_name, each, description=(each.__doc__ or "").partition("\n")[0])
