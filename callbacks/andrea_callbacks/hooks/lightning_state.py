"""Every private attribute of Lightning's Trainer, loops and loggers that we touch, in one place.

Each function says what it knows or changes. What Lightning 2.6 calls it is a matter of this file alone.
"""

import time
from typing import Any, Literal, cast

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger

Place = Literal["update", "validation", "validated", "epoch_end", "epoch"]
"""What comes next: the next update; the validation after this one; what follows it; the end of the epoch; the
next epoch."""


def awaits_validation(trainer: pl.Trainer) -> bool:
    """Return whether validation follows the batch that is done, be the run about to stop or not."""
    should_stop, trainer.should_stop = trainer.should_stop, False
    try:
        loop = cast(Any, trainer.fit_loop)
        return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))
    finally:
        trainer.should_stop = should_stop


def ends_epoch(trainer: pl.Trainer) -> bool:
    """Return whether the batch that is done is the last of its epoch."""
    return bool(cast(Any, trainer.fit_loop.epoch_loop)._num_ready_batches_reached())


def validates_to_stop(trainer: pl.Trainer) -> bool:
    """Return whether validation follows because the run is about to stop."""
    loop = cast(Any, trainer.fit_loop)
    return trainer.should_stop and bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def adds_epoch(trainer: pl.Trainer, epochs: int | None) -> bool:
    """Return whether the last epoch asked for is over and another follows, in which weights are averaged.

    StochasticWeightAveraging adds an epoch without updates for batch norm.

    Args:
        trainer: The trainer.
        epochs: What its `max_epochs` was before the fit.
    """
    loop = cast(Any, trainer.fit_loop)
    return epochs == loop.epoch_progress.current.processed < (loop.max_epochs or 0)


def accumulates(trainer: pl.Trainer) -> bool:
    """Return whether the batch that is done leaves its gradients to a later one's step."""
    return bool(cast(Any, trainer.fit_loop.epoch_loop)._should_accumulate())


def skips_backward(trainer: pl.Trainer) -> bool:
    """Return whether batches only update BatchNorm's statistics, as in the last epoch of weight averaging."""
    loop = cast(Any, trainer.fit_loop.epoch_loop)
    return bool(getattr(loop.automatic_optimization, "_skip_backward", False))


def epochs_over(trainer: pl.Trainer) -> int:
    """Return how many epochs are over, the one whose end is under way included."""
    return int(cast(Any, trainer.fit_loop).epoch_progress.current.processed)


def make_validation_due(trainer: pl.Trainer) -> None:
    """Make a validation by time (`val_check_interval` as a duration) due at the next opportunity."""
    interval = getattr(trainer, "_val_check_time_interval", None)
    if interval is not None:
        cast(Any, trainer)._last_val_time = time.monotonic() - interval


def mark_validated(trainer: pl.Trainer) -> None:
    """Make the epoch end without another batch, since its validation is over."""
    cast(Any, trainer.fit_loop.epoch_loop.val_loop)._has_run = True


def start_epoch(trainer: pl.Trainer) -> None:
    """Make a restored fit loop start its next epoch as it would have without a restart."""
    loop = cast(Any, trainer.fit_loop)
    loop.epoch_loop.restarting = False
    loop._resuming_from_checkpoint = False  # which has the loader begin now, after the random states are back
    if loop._combined_loader_states_to_load:
        loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
        loop._combined_loader_states_to_load = []


def bring_counters(trainer: pl.Trainer, counters: dict[str, Any], place: Place) -> None:
    """Set a checkpoint's counters to those of a run that has come to `place`."""
    batches, epochs = counters["epoch_loop.batch_progress"], counters["epoch_progress"]
    for each in (batches["total"], batches["current"]):
        each["completed"] = each["processed"]
    steps_behind = trainer.validating or epochs["current"]["processed"] < epochs["current"]["ready"]
    if steps_behind and place in ("update", "epoch_end"):
        counters["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    for each in (epochs["total"], epochs["current"]):
        each["processed"] = each["completed"] = each["ready"] if place == "epoch" else each["ready"] - 1
    if place == "epoch":
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False
    if place == "validation":
        validation = counters["epoch_loop.val_loop.batch_progress"]
        begun = validation["total"]["completed"]
        if trainer.validating:
            begun -= validation["current"]["completed"]
        # as if its first batch were under way, which has Lightning begin it again
        validation["total"] = {
            "ready": begun + 1,
            "completed": begun,
            "started": begun + 1,
            "processed": begun,
        }
        validation["current"] = {"ready": 1, "completed": 0, "started": 1, "processed": 0}
        validation["is_last_batch"] = False


def evaluation_rows(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """Return the rows, one a loader, that an evaluation will return; Lightning has logged what they hold."""
    return list(cast(Any, trainer)._evaluation_loop._logged_outputs)


def cluster_environment(trainer: pl.Trainer) -> Any:
    """Return what tells the trainer of its cluster, such as a SLURMEnvironment; None where nothing does."""
    return getattr(getattr(trainer, "_accelerator_connector", None), "cluster_environment", None)


def given_version(logger: Logger) -> int | str | None:
    """Return the version that a logger was given, None where it will choose one."""
    return getattr(logger, "_version", None)


def set_version(logger: Logger, version: str) -> None:
    """Set the version of a logger that has not opened its files: `version_<n>`, or a name."""
    cast(Any, logger)._version = int(version) if version.isdigit() else version


def opened_experiment(logger: Logger) -> Any:
    """Return what a logger writes with, None where it has not opened it; asking for it would open it."""
    return getattr(logger, "_experiment", None)
