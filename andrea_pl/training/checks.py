"""Refuses options of Trainer, strategy, optimizer and module that would make updates inexact."""

import inspect
import math
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from andrea_pl.errors import UserError


def check_policy(
    max_norm: float | None, on_nonfinite: str, max_consecutive_skips: int, min_loss_scale: float
) -> None:
    """Raise `UserError` if an option of `TokenWeightedModule` is out of range."""
    if max_norm is not None and not (max_norm > 0 and math.isfinite(max_norm)):
        raise UserError(
            f"`max_norm` must be more than 0 and finite, got {max_norm}; to record the norm without clipping "
            "leave it null (None)"
        )
    if on_nonfinite not in ("raise", "skip"):
        raise UserError(f"`on_nonfinite` must be 'raise' or 'skip', got {on_nonfinite!r}")
    if max_consecutive_skips < 0:
        raise UserError(f"`max_consecutive_skips` must be at least 0, got {max_consecutive_skips}")
    if min_loss_scale < 0:
        raise UserError(f"`min_loss_scale` must be at least 0, got {min_loss_scale}")


def refuse_trainer_options(trainer: pl.Trainer) -> None:
    """Refuse trainer options that act on single batches; the message names the replacement."""
    if trainer.gradient_clip_val is not None or trainer.gradient_clip_algorithm is not None:
        raise UserError(
            "trainer.gradient_clip_val and trainer.gradient_clip_algorithm do nothing here; set `max_norm` "
            "(TokenWeightedModule(max_norm=…)), which clips the averaged gradient of the whole update once"
        )
    if trainer.accumulate_grad_batches != 1:
        raise UserError(
            "trainer.accumulate_grad_batches would weigh micro-batches equally whatever their tokens; put "
            "them into one window: `sequences_per_update`, or WindowLoader(loader, accumulate=…)"
        )
    callbacks = cast("list[Any]", getattr(trainer, "callbacks", []))
    if any(isinstance(each, LearningRateFinder) for each in callbacks):
        raise UserError(
            "lr_find reads no loss under manual optimization and would report a rate found in NaN; try a few "
            "values of `lr` for some hundred updates instead"
        )


def refuse_strategy(trainer: pl.Trainer) -> None:
    """Refuse a strategy under which gradients cannot be exact."""
    if isinstance(trainer.strategy, FSDPStrategy):
        raise UserError(
            "FSDPStrategy (FSDP1) cannot run the backward passes of manual optimization; use "
            "ModelParallelStrategy (FSDP2), trainer.strategy: clip_model_parallel, with fully_shard on inner "
            "modules"
        )
    if isinstance(trainer.strategy, ModelParallelStrategy):
        ranks = trainer.strategy.device_mesh["tensor_parallel"].size()
        if ranks > 1:
            raise UserError(
                f"{ranks} ranks of tensor parallelism work on the same text, and its tokens would be counted "
                f"{ranks} times; use trainer.strategy: clip_model_parallel, or give ModelParallelStrategy "
                "tensor_parallel_size 1 and data_parallel_size the number of ranks"
            )


def refuse_optimizers(module: pl.LightningModule) -> None:
    """Refuse everything but a single optimizer whose step needs no closure."""
    optimizers, name = module.trainer.optimizers, type(module).__name__
    if len(optimizers) != 1:
        raise UserError(
            f"{name} makes one step of one optimizer a window, and configure_optimizers gave "
            f"{len(optimizers)}; put the parameters into groups of one optimizer"
        )
    if needs_closure(optimizers[0]):
        raise UserError(
            f"{type(optimizers[0]).__name__} needs a closure that computes the loss anew at each step, and "
            f"{name} computes it once a window; use an optimizer whose step needs no closure, such as AdamW"
        )


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step cannot be called without a closure that computes the loss anew."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    return any(
        each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        for each in parameters
    )


def whole_number(tokens: int | Tensor) -> int | Tensor:
    """Return the result of `count_tokens` if it is an integer."""
    if tokens.is_floating_point() if isinstance(tokens, Tensor) else tokens != int(tokens):
        raise UserError(f"count_tokens must return a whole number of labels, got {tokens}")
    return tokens
