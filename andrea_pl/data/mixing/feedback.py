"""Carries the losses of each source back to the mixture that drew the sources.

sampler ──window──> training ──losses by source of update k──> UpdateReport
   ↑                                                               │ take
   └──────────── observe: the mixture learns from update k <───────┘
   a phase starts: the sampler needs losses up to `reward_lag` updates before it
   └── finalize ──> the module waits for the last update's outcome and reports it
"""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from andrea_callbacks.hooks.reports import UpdateReport, finalize_updates
from andrea_pl.data.mixing.curriculum import CurriculumSampler
from andrea_pl.errors import UserError


class LossFeedback:
    """Carries the losses of a trainer's updates to a curriculum's sampler.

    Args:
        trainer: Runs the updates.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def next_update(self) -> int:
        """Return the number of the update that the next window will be."""
        return self._trainer.global_step + 1

    def finalize(self) -> None:
        """Make the module report a loss that is still pending on the device."""
        finalize_updates(self._trainer.lightning_module)


def take_losses(sampler: CurriculumSampler, report: UpdateReport, module: Any) -> None:
    """Tell the mixture what became of an update: the losses of its sources, and whether to learn from them.

    Raises:
        UserError: If the mixture learns from losses and the module reports none.
    """
    if not sampler.learns:
        return
    losses = report.source_losses
    if losses is None and report.is_applied:
        raise UserError(
            f"the mixture {type(sampler.mixture).__name__} learns from the loss of each source, and "
            f"{type(module).__name__} reports none: have its loss_sum call record_source_losses, or take "
            "Fixed or Proportional"
        )
    known = {source: loss for source, loss in enumerate(losses or ()) if loss is not None}
    coefficient = 1.0 if report.clip_coefficient is None else float(report.clip_coefficient)
    is_calm = coefficient >= sampler.curriculum.min_clip_coefficient
    sampler.observe(report.update, known, teaches=report.is_applied and is_calm)


def mixing_figures(sampler: CurriculumSampler, names: Sequence[str], update: int) -> dict[str, Any]:
    """Return the mixture's figures of an update, by source name; empty if unknown.

    See `MixesSources` in `andrea_callbacks.hooks.protocols`.
    """
    delivery = sampler.delivery(update)
    if delivery is None:
        return {}
    return {
        "phase": delivery.phase,
        "phase_length": delivery.phase_length,
        "weight": dict(zip(names, delivery.weights, strict=True)),
        "epochs": dict(zip(names, delivery.epochs, strict=True)),
        "reward": {names[source]: reward for source, reward in sampler.rewards.items()},
    }


def say_mixing(sampler: CurriculumSampler) -> None:
    """Print which mixture draws from which sources."""
    texts = ", ".join(
        f"{pool.name} ({pool.count:,} sequences, repetition {pool.repetition:.2f})" for pool in sampler.pools
    )
    rank_zero_info(
        f"{type(sampler.mixture).__name__} mixes by shares of {sampler.curriculum.weight_unit}, "
        f"{sampler.windows_per_epoch:,} updates an epoch: {texts}"
    )
