"""The label tokens of a window over all ranks, and whether every rank has equally many windows.

An update sums its label tokens over the ranks and, in the same reduction, counts the ranks without a next
window. If only some ranks have one, all of them stop together after this update. Otherwise a rank would wait
for the others forever.
"""

import math
from typing import cast

import lightning.pytorch as pl
import torch
from torch import Tensor

from andrea_callbacks.numerics.host_transfer import (
    HostCopy,
    can_read_at_once,
    is_distributed,
    reduce_over_ranks,
)
from andrea_pl.errors import UserError


class RankWindows:
    """Counts the windows of an epoch on every rank, and stops all ranks together if the counts differ."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start an epoch, or another fit."""
        self._is_at_end = self._has_begun = False
        self._pending: HostCopy | None = None

    def count_tokens(self, trainer: pl.Trainer, tokens: int | Tensor, index: int) -> int | Tensor:
        """Return the label tokens of the epoch's `index`-th window over all ranks.

        Raises:
            UserError: On every rank, if another rank had no window left.
        """
        if trainer.world_size == 1:
            return tokens
        self._is_at_end = bool(trainer.is_last_batch) or index + 1 >= trainer.num_training_batches
        tokens, ranks = _sum_with_ranks(trainer, tokens, self._is_at_end, has_none=False)
        # an accelerator is not waited for once an epoch has begun: `check` notices as well, an update later
        must_read = can_read_at_once(trainer.strategy.root_device) or not self._has_begun
        if must_read and ranks.read()[1]:
            raise _unequal_windows(trainer, index + 1, self._is_at_end)
        self._has_begun = True
        self._pending = ranks
        return tokens

    def check(self, trainer: pl.Trainer, windows: int) -> None:
        """Stop if only some ranks have trained their last window of the epoch.

        This waits only until the device has started the update. All ranks reach this point with the same
        figures, before any collective operation of validation or of the epoch's end.
        """
        ranks, self._pending = self._pending, None
        if ranks is not None and ranks.read()[0] not in (0, trainer.world_size):
            raise _unequal_windows(trainer, windows, self._is_at_end)

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """Join one more reduction if the epoch ended without its last window being known as the last.

        Other ranks may be counting the tokens of a window that this rank does not have.
        """
        if trainer.world_size == 1 or self._is_at_end:
            return
        self._is_at_end = True
        _, ranks = _sum_with_ranks(trainer, 0, is_at_end=False, has_none=True)
        if ranks.read()[1] != trainer.world_size:
            windows = int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
            raise _unequal_windows(trainer, windows, True)


def sum_over_ranks(trainer: pl.Trainer, figures: Tensor) -> Tensor:
    """Sum figures over the ranks. Lightning's own reduction makes the host wait at a barrier first."""
    if is_distributed():
        return reduce_over_ranks(figures, "sum")
    return cast(Tensor, trainer.strategy.reduce(figures, reduce_op="sum"))


def compare_lengths(trainer: pl.Trainer) -> None:
    """Stop if loaders with a length give the ranks unequal numbers of windows. All ranks must call this.

    Raises:
        UserError: On every rank.
    """
    if trainer.world_size == 1:
        return
    lengths = [length for length, _ in _gather(trainer, float(trainer.num_training_batches), 0.0)]
    if len(set(lengths)) > 1:
        raise _unequal(
            [str(int(each)) if math.isfinite(each) else "an unknown number of" for each in lengths]
        )


def _sum_with_ranks(
    trainer: pl.Trainer, tokens: int | Tensor, is_at_end: bool, has_none: bool
) -> tuple[Tensor, HostCopy]:
    """Sum over the ranks: tokens, ranks with their epoch's last window, and ranks without a window."""
    local = torch.zeros(3, dtype=torch.int64, device=trainer.strategy.root_device)
    local[0], local[1], local[2] = tokens, int(is_at_end), int(has_none)  # which waits for no copy
    figures = sum_over_ranks(trainer, local)
    return figures[0], HostCopy(figures[1:])


def _unequal_windows(trainer: pl.Trainer, windows: int, is_over: bool) -> UserError:
    """Return the error about unequal numbers of windows found within an epoch. All ranks must call this.

    Args:
        trainer: The trainer.
        windows: Windows that this rank has trained in this epoch.
        is_over: Whether this rank has no more windows.
    """
    counts = _gather(trainer, float(windows), float(is_over))
    return _unequal([str(int(n)) if over else f"at least {int(n) + 1}" for n, over in counts])


def _unequal(counts: list[str]) -> UserError:
    each = ", ".join(
        f"rank {rank} has {count}{' windows in this epoch' if rank == 0 else ''}"
        for rank, count in enumerate(counts)
    )
    return UserError(
        f"ranks have unequal numbers of windows: {each}; they would train in different epochs, or wait for "
        "each other for ever. Give every rank equally many (DistributedSampler does), or limit all by "
        "trainer.limit_train_batches"
    )


def _gather(trainer: pl.Trainer, *figures: float) -> list[list[float]]:
    """Return the figures of every rank, in rank order."""
    device = trainer.strategy.root_device
    own = torch.tensor(figures, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    return cast("list[list[float]]", trainer.strategy.all_gather(own).reshape(-1, len(figures)).tolist())
