"""Runs each micro-batch of a window forward and backward, one graph at a time; sums losses and tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from andrea_callbacks.numerics.host_transfer import widest
from andrea_pl.errors import UserError
from andrea_pl.strategies.synchronization import only_last_synchronizes
from andrea_pl.training.compiled import compile_like
from andrea_pl.training.ranks import sum_over_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSums:
    """The sums over a window, after its backward passes."""

    tokens: int | Tensor
    """Label tokens over all ranks; a 0-d tensor if the host does not know them."""
    loss_sum: Tensor
    """0-d summed loss over all ranks, in nats for a language model."""
    micro_losses: tuple[Tensor, ...]
    """0-d summed loss of each micro-batch of this rank."""
    sources: Tensor | None
    """(2, K) summed losses and label tokens of each source, over all ranks; None for a single source."""

    def mean_loss(self) -> Tensor:
        """Return the loss per label token, 0-d; 0 for a window without a label."""
        return self.loss_sum / divisor(self.tokens)


class SourceLosses:
    """Sums the losses and label tokens of each source while a window runs."""

    def __init__(self) -> None:
        self._count = 0
        self._sums: Tensor | None = None

    def tell_apart(self, names: Sequence[str]) -> None:
        """Set the sources of this fit. A single source is not recorded."""
        self._count = len(names) if len(names) > 1 else 0

    @property
    def is_open(self) -> bool:
        """Whether a window is running and there are several sources."""
        return self._sums is not None

    def open(self, device: torch.device) -> None:
        """Start a window."""
        shape = (2, self._count)
        self._sums = torch.zeros(shape, dtype=widest(device), device=device) if self._count else None

    def add(self, sources: Tensor, losses: Tensor, counts: Tensor | None) -> None:
        """Add (N,) losses with (N,) label tokens, by default 1 each, to their (N,) sources.

        Negative sources are ignored.
        """
        if self._sums is None:
            return
        wide = self._sums.dtype
        tokens = torch.ones_like(losses, dtype=wide) if counts is None else counts.to(wide)
        parts = torch.stack([losses.detach().to(wide), tokens])
        # neither a matmul, which autocast would run in half precision, nor index_add, which has no fixed
        # order
        is_of = sources[:, None] == torch.arange(self._count, device=sources.device)
        self._sums += torch.where(is_of, parts[:, :, None], 0.0).sum(1)  # a NaN stays with its source

    def close(self) -> Tensor | None:
        """End the window and return its (2, K) sums on this rank."""
        sums, self._sums = self._sums, None
        return sums


class Accumulator:
    """Runs the micro-batches of a window so that their gradients arrive averaged over its label tokens."""

    def __init__(self) -> None:
        self.sources = SourceLosses()
        self._is_broken_off = False

    def reset(self) -> None:
        """Reset what an earlier fit left."""
        self.sources.close()
        self._is_broken_off = False

    def refuse_leftovers(self) -> None:
        """Raise if an earlier window was partly accumulated and this cannot be undone.

        Raises:
            UserError: After an exception between two micro-batches under FSDP2.
        """
        if self._is_broken_off:
            raise UserError(
                "an exception broke an update off between two micro-batches, and FSDP2 keeps what it had "
                "accumulated where nobody can take it back; resume from a checkpoint, with a new module"
            )

    def run(
        self,
        module: pl.LightningModule,
        loss_sum: Callable[[Any], Tensor],
        window: Sequence[Any],
        tokens: int | Tensor,
        trains: bool,
    ) -> WindowSums:
        """Run every micro-batch forward and, if it trains, backward.

        Each backward pass starts from `loss_sum * world_size / tokens`: DDP averages over the ranks, so that
        the gradient is the mean over the label tokens of the whole window.

        Args:
            module: The module that runs the backward passes.
            loss_sum: Returns a micro-batch's loss, summed over its labels.
            window: The micro-batches of this rank.
            tokens: Label tokens of the window over all ranks.
            trains: False for forward passes that only update statistics, such as BatchNorm's.

        Raises:
            UserError: If a loss is not a scalar, or has no graph while other ranks wait for its backward
                pass.
        """
        trainer = module.trainer
        device = trainer.strategy.root_device
        self.sources.open(device)
        scale = trainer.world_size / divisor(tokens)
        loss_sum = compile_like(module, loss_sum)
        losses: list[Tensor] = []
        for number, micro_batch in enumerate(window, start=1):
            with only_last_synchronizes(trainer.strategy, number == len(window)):
                loss = loss_sum(micro_batch)
                _check_loss(loss, number, needs_graph=trains and trainer.world_size > 1)
                losses.append(loss.detach())
                if loss.requires_grad and trains:
                    self._is_broken_off |= number < len(window) and _keeps_partial_gradients(trainer)
                    module.manual_backward(loss * scale)
                del loss  # its graph goes before the next one is built
        self._is_broken_off = False
        total = torch.stack(losses).to(widest(device)).sum()
        sources = self.sources.close()
        if trainer.world_size > 1:
            total, sources = _over_ranks(trainer, total, sources)
        return WindowSums(tokens=tokens, loss_sum=total, micro_losses=tuple(losses), sources=sources)


def divisor(tokens: int | Tensor) -> float | Tensor:
    """Return the number of tokens as an exact divisor; dividing by an integer tensor would give float32."""
    if isinstance(tokens, Tensor):
        return tokens.clamp(min=1).to(widest(tokens.device))
    return float(max(tokens, 1))


def _check_loss(loss: Tensor, number: int, needs_graph: bool) -> None:
    if loss.ndim:
        raise UserError(
            "loss_sum must return a 0-d tensor, the sum over labels, got shape "
            f"{tuple(loss.shape)}; use reduction='sum'"
        )
    if needs_graph and not loss.requires_grad:
        raise UserError(
            f"loss_sum of micro-batch {number} has no graph, and on several ranks every micro-batch must "
            "take part in the backward pass; return a sum over no label (0 with a graph), not a constant"
        )


def _keeps_partial_gradients(trainer: pl.Trainer) -> bool:
    """Return whether the strategy keeps gradients of earlier micro-batches that `zero_grad` cannot reset."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def _over_ranks(trainer: pl.Trainer, total: Tensor, sources: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Sum the loss and the sources' sums over the ranks in one reduction."""
    parts = [total[None]] if sources is None else [total[None], sources.flatten()]
    figures = sum_over_ranks(trainer, torch.cat(parts))
    return figures[0], None if sources is None else figures[1:].reshape(sources.shape)
