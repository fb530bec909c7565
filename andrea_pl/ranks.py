"""Whether all ranks have equally many windows, before one of them waits for the others for ever.

An update adds up over the ranks its label tokens and, with them, how many ranks have no window after this
one. Where some have and some have not, all of them stop after this update, together.
"""

import math
from typing import cast

import lightning.pytorch as pl
import torch

from andrea_pl.errors import UserError


def is_last_window(trainer: pl.Trainer, index: int) -> bool:
    """Say whether this rank trains its last window of the epoch, as far as its loader knows."""
    return bool(trainer.is_last_batch) or index + 1 >= trainer.num_training_batches


def compare_lengths(trainer: pl.Trainer) -> None:
    """Stop where loaders with a length give the ranks unequal numbers of windows; all ranks call this.

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


def unequal_windows(trainer: pl.Trainer, windows: int, is_over: bool) -> UserError:
    """Return the error for ranks that found out within an epoch; all ranks call this.

    Args:
        trainer: The trainer.
        windows: Windows that this rank has trained in this epoch.
        is_over: Whether it has no other.
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
    """Return figures of every rank, in their order."""
    device = trainer.strategy.root_device
    own = torch.tensor(figures, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    return cast("list[list[float]]", trainer.strategy.all_gather(own).reshape(-1, len(figures)).tolist())
