"""Refuses invalid options of the data module before any text is prepared."""

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from andrea_pl.data.mixing.curriculum import Curriculum, CurriculumSampler
from andrea_pl.data.mixing.mixtures import Fixed
from andrea_pl.data.sources.documents import TextSource
from andrea_pl.errors import UserError


def check_counts(num_workers: int, **counts: int | None) -> None:
    """Raise `UserError` if a count is less than 1, or the number of workers less than 0."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UserError(f"`{name}` must be at least 1, got {value}")
    if num_workers < 0:
        raise UserError(f"`num_workers` must be at least 0, got {num_workers}")


def check_fractions(sources: Sequence[TextSource], val_fraction: float, test_fraction: float) -> None:
    """Raise `UserError` if a share of documents is out of range, or nothing is left to train on."""
    if val_fraction < 0 or test_fraction < 0 or val_fraction + test_fraction >= 1:
        raise UserError(
            "`val_fraction` and `test_fraction` must be at least 0 and leave something to train on, got "
            f"{val_fraction} and {test_fraction}"
        )
    for source in sources:
        if (source.val_fraction or 0) + test_fraction >= 1:
            raise UserError(
                f"source {source.name!r}: val_fraction {source.val_fraction} and `test_fraction` "
                f"{test_fraction} leave nothing to train on"
            )


def choose_curriculum(
    curriculum: Curriculum | None,
    sources: Sequence[TextSource],
    shuffle: bool,
    num_workers: int,
    prefetch_factor: int,
) -> Curriculum | None:
    """Return the given curriculum, one of `Fixed` weights if a source has a weight, or None.

    Raises:
        UserError: If it cannot work with the sources or with workers that read ahead.
    """
    if curriculum is None and not any(source.is_weighed for source in sources):
        return None
    curriculum = curriculum or Curriculum()
    if not shuffle:
        raise UserError("`shuffle`=false and a mixture of sources exclude each other; drop one of them")
    names = [source.name for source in sources]
    for name in curriculum.warmup_sources:
        if name not in names:
            known = ", ".join(names)
            raise UserError(f"`warmup_sources` names {name!r}, and the sources are {known}; name these")
    mixture = Fixed() if curriculum.mixture is None else curriculum.mixture
    for source in sources:
        if source.weight is not None and not mixture.uses_weights:
            raise UserError(
                f"source {source.name!r} has a weight, which {type(mixture).__name__} does not use: give it "
                "a min_weight instead, or leave `mixture` out for fixed weights"
            )
    ahead = num_workers * prefetch_factor + 1 if num_workers else 0
    if mixture.learns and ahead > curriculum.reward_lag:
        raise UserError(
            f"{num_workers} workers, each {prefetch_factor} windows ahead, ask for windows {ahead} updates "
            f"before they are trained on, and `reward_lag` is {curriculum.reward_lag}: raise "
            f"it to {ahead}, or lower `num_workers` or `prefetch_factor`"
        )
    return curriculum


def compare_with_run(sampler: CurriculumSampler, trainer: pl.Trainer | None) -> None:
    """Refuse a run that is longer than all sources' `max_epochs` allow; warn of one that is all warm-up."""
    if trainer is None or sampler.repeat:
        return
    limits = [trainer.max_steps] if trainer.max_steps > 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        limit = trainer.limit_train_batches
        windows = sampler.windows_per_epoch
        limits.append(
            trainer.max_epochs * (int(limit * windows) if isinstance(limit, float) else min(limit, windows))
        )
    warmup = sampler.curriculum.warmup_updates
    if limits and warmup >= min(limits):
        rank_zero_warn(
            f"`warmup_updates`={warmup} is as long as the run of {min(limits):,} updates: "
            f"sources other than {', '.join(sampler.curriculum.warmup_sources)} are never drawn"
        )
    supply = sum(pool.supply for pool in sampler.pools)
    updates = supply // sampler.sequences_per_update
    if limits and min(limits) > updates:
        raise UserError(
            f"the sources' max_epochs allow {updates:,.0f} updates, and the run has {min(limits):,}; raise "
            "max_epochs, leave it out for one source, or shorten the run"
        )
