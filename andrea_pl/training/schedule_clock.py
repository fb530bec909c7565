"""Decides when the scheduler from `configure_optimizers` moves.

configure_optimizers ──> read_schedules: the given settings ──> Lightning: one LRSchedulerConfig
    interval step      after every `frequency`-th update that changed weights (the default)
    interval epoch     at the end of every `frequency`-th epoch; with a `monitor`, by its last value

Under manual optimization Lightning ignores these settings, drops `monitor` and `strict`, and gives a bare
scheduler the interval "epoch", as if the user had chosen it. So this module reads the settings before
Lightning does, and passes them on in full. A scheduler that a callback adds, such as that of
StochasticWeightAveraging, uses its own LRSchedulerConfig.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import ReduceLROnPlateau

from andrea_callbacks.hooks.lightning_state import ends_epoch, epochs_over
from andrea_callbacks.numerics.scheduler_rollback import ScheduleMove
from andrea_pl.errors import UserError
from andrea_pl.optim.rates import can_take_new_groups
from andrea_pl.optim.schedules import FactorLR

KEYS = {field.name for field in fields(LRSchedulerConfig)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """The settings of a scheduler that Lightning drops."""

    monitor: str | None
    """The metric that the scheduler steps on, or None."""
    strict: bool
    """Whether a missing metric is an error."""


def read_schedules(returned: Any) -> tuple[Any, list[Watch]]:
    """Read the schedulers' settings in the result of `configure_optimizers`.

    Returns:
        The same result with complete settings and without those that Lightning drops, and a list of the
        dropped settings.

    Raises:
        UserError: If the result is None, or a setting is invalid.
    """
    if returned is None:
        raise UserError(
            "configure_optimizers returned None, and every update steps one optimizer; return an optimizer, "
            "or use trainer.validate, test or predict, which need none"
        )
    if isinstance(returned, dict):
        found = cast("dict[str, Any]", returned)
        if found.get("lr_scheduler") is None:
            return {key: value for key, value in found.items() if key != "lr_scheduler"}, []
        entry, watch = _read_entry(found["lr_scheduler"], found.get("monitor"))
        return {**found, "lr_scheduler": entry}, [watch]
    if not isinstance(returned, list | tuple):
        return returned, []
    parts: list[Any] = list(cast("list[Any]", returned))
    if len(parts) == 2 and isinstance(parts[0], list):
        listed = cast("list[Any]", parts[1]) if isinstance(parts[1], list) else [parts[1]]
        entries = [_read_entry(each, None) for each in listed if each is not None]
        return (parts[0], [entry for entry, _ in entries]), [watch for _, watch in entries]
    if parts and all(isinstance(each, dict) for each in parts):
        pairs = [read_schedules(each) for each in parts]
        return [part for part, _ in pairs], [watch for _, watches in pairs for watch in watches]
    return cast(Any, returned), []


def _read_entry(entry: Any, monitor: Any) -> tuple[dict[str, Any], Watch]:
    """Return one scheduler's complete settings and its watch; `monitor` is the default metric."""
    written = dict(cast("dict[str, Any]", entry)) if isinstance(entry, dict) else {"scheduler": entry}
    unknown = written.keys() - KEYS
    if unknown or "scheduler" not in written:
        fault = f"unknown keys {sorted(unknown)}" if unknown else 'no "scheduler"'
        raise UserError(f"configure_optimizers: lr_scheduler has {fault}; its keys are {sorted(KEYS)}")
    scheduler = written["scheduler"]
    name = type(scheduler).__name__
    is_watching = bool(written.pop("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau)))
    watched, strict = written.pop("monitor", monitor), written.pop("strict", True)
    _check_timing(name, written, is_watching, watched)
    if "interval" not in written and not is_watching:
        rank_zero_info(
            f"{name} moves after every update that changes weights, since configure_optimizers names no "
            f'interval for it; for once an epoch return {{"scheduler": …, "interval": "epoch"}}'
        )
    written.setdefault("interval", "epoch" if is_watching else "step")
    return written, Watch(monitor=watched if is_watching else None, strict=bool(strict))


def _check_timing(name: str, written: Mapping[str, Any], is_watching: bool, monitor: Any) -> None:
    interval, frequency = written.get("interval"), written.get("frequency", 1)
    if interval not in (None, "step", "epoch"):
        raise UserError(
            f'configure_optimizers: the interval of {name} must be "step" or "epoch", got {interval!r}'
        )
    if not isinstance(frequency, int) or frequency < 1:
        raise UserError(
            f"configure_optimizers: the frequency of {name} must be a whole number of at least 1, got "
            f"{frequency!r}"
        )
    if is_watching and not monitor:
        raise UserError(
            f"configure_optimizers: {name} moves by a metric, and no monitor is given; return "
            '{"scheduler": …, "monitor": "val/loss"}'
        )
    if is_watching and interval == "step":
        raise UserError(
            f'configure_optimizers: {name} moves by a metric, at the end of an epoch; use interval "epoch" '
            'instead of "step", with trainer.limit_train_batches for shorter epochs'
        )


class ScheduleClock:
    """Knows when a scheduler moves, and moves per-epoch schedulers.

    Its state holds the number of epochs that moved the schedule, and the last value of a monitored metric,
    which a resume at the end of an epoch would otherwise lack.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset what an earlier run left."""
        self._watches: list[Watch] | None = None
        self._epochs = 0
        self._restored_epochs: int | None = None
        self._monitored: float | None = None

    def read(self, returned: Any) -> Any:
        """Read the result of `configure_optimizers`, and return it for Lightning."""
        completed, self._watches = read_schedules(returned)
        return completed

    def begin(self, trainer: pl.Trainer) -> None:
        """Complete Lightning's settings, and make pending moves of epochs that ended at the checkpoint.

        Raises:
            UserError: If there are several schedulers, or one that moves by an unknown metric.
        """
        configs = trainer.lr_scheduler_configs
        if len(configs) > 1:
            raise UserError(
                f"{type(trainer.lightning_module).__name__} moves one scheduler, and configure_optimizers "
                f"gave {len(configs)}; use SequentialLR or ChainedScheduler to join them"
            )
        if configs and any(group.get("lr") is None for group in trainer.optimizers[0].param_groups):
            raise UserError(
                f"{type(trainer.optimizers[0]).__name__} has lr=None and sets its rate itself, so that "
                f"{type(configs[0].scheduler).__name__} cannot scale it; leave the scheduler out, or give "
                "the optimizer an lr"
            )
        if self._watches is None and any(config.interval == "epoch" for config in configs):
            rank_zero_warn(
                "the scheduler moves once an update, whatever interval configure_optimizers gave it: call "
                f"super().setup(stage) in {type(trainer.lightning_module).__name__}.setup to have it honoured"
            )
            configs[0].interval = "step"
        _warn_of_averaging(trainer)
        for config, watch in zip(configs, self._watches or [], strict=False):
            config.monitor, config.strict = watch.monitor, watch.strict
            config.reduce_on_plateau = watch.monitor is not None
        for config in configs:
            if isinstance(config.scheduler, ReduceLROnPlateau) and config.monitor is None:
                raise UserError(
                    "ReduceLROnPlateau moves by a metric, and which one is not known here: return it with "
                    'its "monitor" from configure_optimizers, and call super().setup(stage) in setup'
                )
        over = epochs_over(trainer)
        restored = over if self._restored_epochs is None else self._restored_epochs
        self._epochs, self._restored_epochs = max(over, restored), None
        if trainer.global_step:
            for optimizer in trainer.optimizers:
                cast(
                    Any, optimizer
                )._opt_called = True  # in the run before, and torch would warn of the order
        for epoch in range(restored, over):
            self._move_by_epoch(trainer, epoch + 1)

    def end_update(self, trainer: pl.Trainer, updates: int, is_revocable: bool) -> ScheduleMove | None:
        """Move a per-update scheduler if it is due.

        Args:
            trainer: The trainer with the scheduler.
            updates: Updates that changed weights, including this one.
            is_revocable: Whether the update may turn out to have changed nothing.

        Returns:
            An object that can undo the move; None if nothing moved or the move is final.
        """
        move = None
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and updates % config.frequency == 0:
                move = ScheduleMove(config.scheduler) if is_revocable else None
                cast(Any, config.scheduler).step()
                if move is not None:
                    move.end()
        return move

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """Move a per-epoch scheduler, once per epoch, and only if the epoch was completed."""
        over = epochs_over(trainer)
        if over > self._epochs and ends_epoch(trainer):
            self._epochs = over
            self._move_by_epoch(trainer, over)

    def state_dict(self, trainer: pl.Trainer | None) -> dict[str, float | int | None]:
        """Return the epochs that moved the schedule and the last value of the monitored metric."""
        return {"epochs": self._epochs, "monitored": None if trainer is None else self._latest(trainer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; a checkpoint of an earlier version has no state."""
        self._restored_epochs = state.get("epochs")
        self._monitored = state.get("monitored")

    def _latest(self, trainer: pl.Trainer) -> float | None:
        """Return the monitored metric's last value, or None."""
        names = [config.monitor for config in trainer.lr_scheduler_configs if config.monitor is not None]
        value = trainer.callback_metrics.get(names[0]) if names else None
        if value is not None:
            self._monitored = float(value)
        return self._monitored

    def _move_by_epoch(self, trainer: pl.Trainer, epochs: int) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.interval != "epoch" or epochs % config.frequency:
                continue
            scheduler = cast(Any, config.scheduler)
            if not config.reduce_on_plateau:
                scheduler.step()
                continue
            value = trainer.strategy.broadcast(self._latest(trainer))  # or ranks would part
            if value is not None:
                scheduler.step(value)
            else:
                _miss_metric(trainer, config)


def _miss_metric(trainer: pl.Trainer, config: LRSchedulerConfig) -> None:
    """Raise or warn because a monitored metric is missing."""
    known = ", ".join(sorted(trainer.callback_metrics)) or "none"
    message = (
        f"{type(config.scheduler).__name__} moves by the metric {config.monitor!r}, which was not logged "
        f"before the end of the epoch; metrics that were: {known}"
    )
    if config.strict:
        raise UserError(f'{message}. Log it by self.log, or set "strict": False to pass over such epochs')
    rank_zero_warn(f"{message}; the rate stays")


def _warn_of_averaging(trainer: pl.Trainer) -> None:
    """Warn if Lightning will resume the schedule of StochasticWeightAveraging an epoch late."""
    if cast(Any, trainer.fit_loop).restarted_mid_epoch and any(
        isinstance(each, StochasticWeightAveraging) and cast(Any, each)._scheduler_state is not None
        for each in cast("list[Any]", cast(Any, trainer).callbacks)
    ):
        rank_zero_warn(
            "StochasticWeightAveraging is resumed within an epoch, and Lightning builds its schedule again "
            "at the next one only: annealing will be an epoch late; resume from a checkpoint of an epoch's "
            "end"
        )


def follow_new_groups(trainer: pl.Trainer) -> None:
    """Make parameter groups that were added since the last update follow the schedule.

    Raises:
        UserError: If the scheduler does not support it; torch would raise after the weights moved.
    """
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, FactorLR):
            config.scheduler.take_new_groups()
        elif not can_take_new_groups(config.scheduler):
            raise UserError(
                f"a parameter group was added to the optimizer, which {type(config.scheduler).__name__} "
                "cannot follow; use `schedule`=cosine or constant, build_scheduler, or add all groups in "
                "configure_optimizers"
            )


def read_next_configuration(module: pl.LightningModule, clock: ScheduleClock) -> None:
    """Wrap the next call of `configure_optimizers` to read the schedulers' settings.

    LightningCLI may have put its own method on the instance. It is restored after the call.
    """
    own = vars(module).get("configure_optimizers")
    if isinstance(own, partial) and cast("partial[Any]", own).func is _configure_and_read:
        own = cast("partial[Any]", own).args[2]  # of a fit that ended before the call
    vars(module)["configure_optimizers"] = partial(_configure_and_read, module, clock, own)


def _configure_and_read(module: pl.LightningModule, clock: ScheduleClock, own: Any) -> Any:
    """Replace a module's `configure_optimizers` for one call, and then restore `own`."""
    del vars(module)["configure_optimizers"]
    if own is not None:
        vars(module)["configure_optimizers"] = own
    return clock.read(module.configure_optimizers())
