"""What Lightning's own checkpoints lack for a resume that goes on exactly: random states, and the place.

A fit goes from update to update:   … update k ─> validation ─> end of the epoch ─> update k + 1 …

Lightning's counters say of a checkpoint that k batches are done. Whether the validation after them and the
end of the epoch are still to come it guesses, by the hook that wrote the checkpoint, and passes over some.
Here the place is written down, and the counters with it, as they stand at that place in a run that goes on.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

from andrea_callbacks.hooks.event_files import discard_curves, mark_curves
from andrea_callbacks.hooks.lightning_state import (
    Place,
    accumulates,
    awaits_validation,
    bring_counters,
    ends_epoch,
    make_validation_due,
    mark_validated,
    start_epoch,
)
from andrea_callbacks.hooks.scalars import scalar_buffer, without_module
from andrea_callbacks.numerics.host_transfer import gather_objects
from andrea_callbacks.numerics.rng_state import RandomState

KEY = "andrea_resume"
"""Where the checkpoint has it."""

TRACKS = "track_running_stats"


class ExactResume(Callback):
    """Has every checkpoint of a fit resume exactly where it was taken, whoever saves it.

    With this callback a checkpoint holds the states of Python's, NumPy's and torch's generators, of every
    rank, and the place in the run: a validation or an end of epoch that was still to come is made up for, and
    one that was over is not repeated. It also holds which parameters were trained and which were frozen, so
    that a layer unfrozen by a callback goes on training. `ModelCheckpoint` and `Trainer.save_checkpoint` need
    nothing else. The data are as exact as their loader: one with `state_dict` and `load_state_dict`, or at
    the end of an epoch any loader that draws its order from torch's generator.

    A checkpoint saved while a batch is under way, in `on_train_batch_start` say or between the batches of an
    accumulated update, is left to Lightning. With another number of ranks than it was saved by, generators
    start from the seed, which a warning says.

    In the log folders of TensorBoard loggers, a resume discards what earlier event files have of updates
    after the checkpoint, so that TensorBoard shows every step once. It happens when training starts, after
    every callback's `setup`: a run that is refused there leaves the curves as they are.

    Not exact are two things of Lightning's: a scheduler that waits for a metric at the end of an epoch moves
    after checkpoints are saved there, and `reload_dataloaders_every_n_epochs` draws from torch's generator
    when it makes a loader.
    """

    def __init__(self) -> None:
        super().__init__()
        self._restored: dict[str, Any] | None = None
        self._is_resumed = False
        self._has_validated = False
        self._mends_validation = False
        self._finishes_epoch = False
        self._before_validation: RandomState | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the module out."""
        return without_module(self.__dict__)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the random states that validation starts from, where it follows."""
        self.note_states(trainer, pl_module)

    def note_states(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the random states of now for a checkpoint that is saved within the validation which follows.

        A validation that was broken off is run again as a whole, and may draw. Callbacks that come after this
        one, and save, call it again.
        """
        self._before_validation = RandomState(pl_module.device) if awaits_validation(trainer) else None

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add random states and place, and bring the counters to that place."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        place = self.place(trainer)
        if place is not None:
            bring_counters(trainer, checkpoint["loops"]["fit_loop"], place)
            checkpoint["epoch"] = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"]
        is_within = trainer.validating and place == "validation" and self._before_validation is not None
        own = cast(RandomState, self._before_validation) if is_within else RandomState(pl_module.device)
        scalar_buffer(trainer).flush()
        mark_curves(trainer, place)
        checkpoint[KEY] = {
            "place": place,
            "random": gather_objects(own.state_dict()),
            "trained": trained_parameters(pl_module),
        }

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep what is used when training starts."""
        self._restored = checkpoint.get(KEY)
        self._is_resumed = True

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget an earlier fit."""
        self._restored = self._before_validation = None
        self._is_resumed = False
        self._has_validated = self._mends_validation = self._finishes_epoch = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go to the place, and to the random states; discard the curves of what is done again."""
        restored, self._restored = self._restored, None
        if self._is_resumed:
            self._is_resumed = False
            discard_curves(trainer, (restored or {}).get("place"))
        if restored is None:
            return
        restore_trained(pl_module, restored.get("trained", {}))
        place = cast("Place | None", restored["place"])
        self._mends_validation = place == "validation"
        self._finishes_epoch = place == "epoch_end"
        if place == "validation":
            make_validation_due(trainer)
        elif place == "epoch_end":
            mark_validated(trainer)
        elif place == "epoch":
            start_epoch(trainer)
        states = cast("list[dict[str, Any]]", restored["random"])
        if len(states) == trainer.world_size:
            RandomState.from_state_dict(states[trainer.global_rank], pl_module.device).restore()
        else:
            rank_zero_warn(
                f"the checkpoint was written by {len(states)} ranks, this run has {trainer.world_size}: "
                "random generators start from the seed, so that dropout differs from the run that goes on"
            )

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count the validation that is made up for as one that was never begun."""
        self._has_validated = False
        if self._mends_validation and not trainer.sanity_checking:
            self._mends_validation = False
            total = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
            total.ready = cast(Any, total).started = total.completed

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note that this validation is over, for callbacks that save after it."""
        self._has_validated = True

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the next epoch start as any other, where this one was only finished."""
        if self._finishes_epoch:
            self._finishes_epoch = False
            trainer.fit_loop.epoch_loop.restarting = False
            trainer.fit_loop.epoch_loop.reset_restart_stage()

    def place(self, trainer: pl.Trainer) -> Place | None:
        """Return what comes next, None in the middle of a batch or of an accumulated update."""
        loop = cast(Any, trainer.fit_loop)
        batches = loop.epoch_loop.batch_progress.current
        is_batch_end = batches.ready == batches.processed == batches.completed + 1
        if not batches.processed or accumulates(trainer):
            return None
        if trainer.validating or is_batch_end:
            if awaits_validation(trainer):
                return "validated" if trainer.validating and self._has_validated else "validation"
            return "epoch_end" if ends_epoch(trainer) else "update"
        epochs = loop.epoch_progress.current
        if batches.ready == batches.completed and epochs.ready == epochs.processed:
            return "epoch" if ends_epoch(trainer) else "update"
        return None


def trained_parameters(module: pl.LightningModule) -> dict[str, bool]:
    """Return `requires_grad` of every parameter, and `track_running_stats` of every module that has it."""
    flags = {name: each.requires_grad for name, each in module.named_parameters()}
    flags |= {f"{name}.{TRACKS}": bool(getattr(each, TRACKS)) for name, each in _tracking(module)}
    return {_plain(name): flag for name, flag in flags.items()}


def restore_trained(module: pl.LightningModule, flags: Mapping[str, bool]) -> None:
    """Have those parameters trained that were; those of which nothing is known stay, and so do new ones."""
    changed: list[str] = []
    for name, each in module.named_parameters():
        flag = flags.get(_plain(name), each.requires_grad)
        if flag != each.requires_grad:
            each.requires_grad_(flag)
            changed.append(f"{name} ({'trained' if flag else 'frozen'})")
    for name, each in _tracking(module):
        setattr(each, TRACKS, flags.get(_plain(f"{name}.{TRACKS}"), getattr(each, TRACKS)))
    if changed:
        more = f" and {len(changed) - 6} more" if len(changed) > 6 else ""
        rank_zero_info(f"set to what they were when the checkpoint was saved: {', '.join(changed[:6])}{more}")


def _tracking(module: nn.Module) -> list[tuple[str, nn.Module]]:
    named = cast("Iterator[tuple[str, nn.Module]]", cast(Any, module).named_modules())
    return [(name, each) for name, each in named if hasattr(each, TRACKS)]


def _plain(name: str) -> str:
    """Return a name as it is without torch.compile."""
    return name.replace("_orig_mod.", "")
