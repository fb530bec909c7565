"""What Lightning's checkpoints lack for an exact resume: random states, and the place in the run.

A fit goes from update to update:   … update k ─> validation ─> end of the epoch ─> update k + 1 …

A Lightning checkpoint says that k batches are done. It does not say whether the validation after them and
the end of the epoch are still pending: Lightning guesses that from the hook that saved the checkpoint, and
sometimes skips one. This callback saves the place, and the counters as an uninterrupted run has them there.
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
"""The checkpoint's key for this callback's state."""

TRACKS = "track_running_stats"


class ExactResume(Callback):
    """Makes every checkpoint of a fit resume exactly where it was taken, whoever saves it.

    The callback adds the states of Python's, NumPy's and torch's generators, for every rank, and the place
    in the run. On resume, a pending validation or epoch end runs. A completed one does not run again. The
    checkpoint also says which parameters were trained and which were frozen, so that a layer unfrozen by a
    callback keeps training. `ModelCheckpoint` and `Trainer.save_checkpoint` need no changes. The data are as
    exact as their loader: use one with `state_dict` and `load_state_dict`. At the end of an epoch, any
    loader that draws its order from torch's generator is exact too.

    A checkpoint saved in the middle of a batch, for example in `on_train_batch_start` or between the batches
    of an accumulated update, resumes as Lightning does it. If the number of ranks differs from the
    checkpoint's, the generators start from the seed, and a warning says so.

    In the log folders of TensorBoard loggers, a resume discards what earlier event files hold of updates
    after the checkpoint, so that TensorBoard shows every step once. This happens when training starts, after
    every callback's `setup`: a run that is refused before that leaves the curves unchanged.

    Two things of Lightning's are not exact: a scheduler that monitors a metric at the end of an epoch moves
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
        """Leave the module out of pickles and copies."""
        return without_module(self.__dict__)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the random states before a validation that follows this batch."""
        self.note_states(trainer, pl_module)

    def note_states(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the current random states for checkpoints saved during the validation that follows.

        A resume runs an interrupted validation again from its start, and validation may draw random numbers.
        Callbacks that come after this one and save must call it again.
        """
        self._before_validation = RandomState(pl_module.device) if awaits_validation(trainer) else None

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add random states and place, and set the counters to that place."""
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
        """Keep the state until training starts."""
        self._restored = checkpoint.get(KEY)
        self._is_resumed = True

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reset what an earlier fit left."""
        self._restored = self._before_validation = None
        self._is_resumed = False
        self._has_validated = self._mends_validation = self._finishes_epoch = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the place and the random states; discard curves of updates that will be repeated."""
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
        """Reset the progress of the pending validation, so that it runs from its start."""
        self._has_validated = False
        if self._mends_validation and not trainer.sanity_checking:
            self._mends_validation = False
            total = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
            total.ready = cast(Any, total).started = total.completed

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record that this validation is complete, for callbacks that save after it."""
        self._has_validated = True

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the next epoch start normally if this one only had its end pending."""
        if self._finishes_epoch:
            self._finishes_epoch = False
            trainer.fit_loop.epoch_loop.restarting = False
            trainer.fit_loop.epoch_loop.reset_restart_stage()

    def place(self, trainer: pl.Trainer) -> Place | None:
        """Return what comes next; None in the middle of a batch or of an accumulated update."""
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
    """Restore which parameters are trained. Parameters that the checkpoint does not name stay as they are."""
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
    """Return a parameter's name without the prefix that torch.compile adds."""
    return name.replace("_orig_mod.", "")
