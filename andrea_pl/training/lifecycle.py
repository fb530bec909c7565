"""The hooks of `TokenWeightedModule` around its updates: at fits, epochs and checkpoints."""

from collections.abc import Generator, Iterator, Sequence
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import nn
from typing_extensions import override

from andrea_callbacks import EpochSummary, ExactResume, FiniteGuard, PreClipNorm, SourceMonitor, UpdateLog
from andrea_callbacks.hooks.lightning_state import epochs_over
from andrea_callbacks.hooks.protocols import NamesSources
from andrea_callbacks.hooks.reports import UpdateReport
from andrea_pl.data.windows.window import WindowLoader
from andrea_pl.runs.checkpoint_callback import DurableCheckpoint
from andrea_pl.training.accumulation import Accumulator
from andrea_pl.training.checks import refuse_optimizers, refuse_strategy, refuse_trainer_options
from andrea_pl.training.compiled import match_wrappers, plain_name, strip_wrappers
from andrea_pl.training.ranks import RankWindows, compare_lengths
from andrea_pl.training.schedule_clock import ScheduleClock, read_next_configuration
from andrea_pl.training.verdict import SkipCounter

STATE_KEY = "andrea_updates"
"""The checkpoint's key for the update counters."""


class UpdateLifecycle(pl.LightningModule):
    """The base of `TokenWeightedModule`: its counters, and all hooks except those of the update itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.updates_applied: int = 0
        self.updates_skipped: int = 0
        self.update_report: UpdateReport | None = None
        self._accumulator = Accumulator()
        self._ranks = RankWindows()
        self._clock = ScheduleClock()
        self._skips = SkipCounter()
        self.register_state_dict_pre_hook(_finalize_before_state)
        self.register_state_dict_post_hook(strip_wrappers)
        self.register_load_state_dict_pre_hook(match_wrappers)

    def finalize_update(self) -> None:
        """Wait for the outcome of the last update if it is pending."""

    def _drop_update(self) -> None:
        """Drop the state of an earlier fit's last update."""

    @override
    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, Any]]:
        """Yield modules, and thereby parameters and buffers, by their names without `torch.compile`."""
        for name, module in cast(
            "Iterator[tuple[str, Any]]", super().named_modules(memo, prefix, remove_duplicate)
        ):
            yield plain_name(name, prefix), module

    @override
    def configure_callbacks(self) -> Sequence[Callback]:
        """Add an `UpdateLog` and an `ExactResume`, unless the trainer has its own."""
        refuse_trainer_options(self.trainer)
        wanted: list[Callback] = [
            UpdateLog(),
            PreClipNorm(),
            FiniteGuard(),
            EpochSummary(),
            SourceMonitor(),
            ExactResume(),
        ]
        present = cast("list[Callback]", getattr(self.trainer, "callbacks", []))
        for each in present:
            if isinstance(each, DurableCheckpoint):
                each.lock_early(self.trainer)
        return [each for each in wanted if not any(isinstance(other, type(each)) for other in present)]

    @override
    def setup(self, stage: str) -> None:
        """Refuse a strategy that cannot work, and reset what an earlier fit left."""
        self._drop_update()
        self._accumulator.reset()
        self._ranks.reset()
        if stage == "fit":
            if self.trainer.global_step == 0:
                self._reset_counters()
            read_next_configuration(self, self._clock)
            refuse_strategy(self.trainer)

    def _reset_counters(self) -> None:
        """Reset the counters for a fit that does not continue the previous one."""
        self.updates_applied = self.updates_skipped = 0
        self._skips.in_a_row = 0
        self.update_report = None
        self._clock.reset()

    @override
    def on_train_start(self) -> None:
        """Refuse unsupported optimizers and schedulers; look up the sources."""
        datamodule = cast(Any, self.trainer).datamodule
        names = datamodule.source_names if isinstance(datamodule, NamesSources) else ()
        self._accumulator.sources.tell_apart(names)
        refuse_optimizers(self)
        self._clock.begin(self.trainer)
        self._begin_windows()

    @override
    def on_train_epoch_start(self) -> None:
        """Tell the loader, which may be a new one, the number of the epoch."""
        self._begin_windows()
        loader = self.trainer.train_dataloader
        if isinstance(loader, WindowLoader):
            loader.reach_epoch(epochs_over(self.trainer))

    def _begin_windows(self) -> None:
        """Compare the ranks' numbers of windows; tell the loader how many windows the trainer will use."""
        compare_lengths(self.trainer)
        self._ranks.reset()
        loader = self.trainer.train_dataloader
        if isinstance(loader, WindowLoader):
            windows = self.trainer.num_training_batches
            loader.repeat = float(getattr(self.trainer, "overfit_batches", 0)) > 0
            loader.limit = int(windows) if windows < 2**62 else None

    @override
    def on_validation_model_eval(self) -> None:
        """Finish the update before validation starts, so that its figures come first."""
        self.finalize_update()
        super().on_validation_model_eval()

    @override
    def on_train_epoch_end(self) -> None:
        """Finish the epoch's last update if no callback did, and move a per-epoch schedule."""
        self.finalize_update()
        self._ranks.end_epoch(self.trainer)
        self._clock.end_epoch(self.trainer)

    @override
    def on_train_end(self) -> None:
        """Finish the last update if no callback did."""
        self.finalize_update()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the counters of updates."""
        checkpoint[STATE_KEY] = {
            "applied": self.updates_applied,
            "skipped": self.updates_skipped,
            "consecutive_skips": self._skips.in_a_row,
            "schedule": self._clock.state_dict(self._trainer),
        }

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue the counters of updates."""
        counters = checkpoint.get(STATE_KEY, {})
        self.updates_applied = counters.get("applied", 0)
        self.updates_skipped = counters.get("skipped", 0)
        self._skips.in_a_row = counters.get("consecutive_skips", 0)
        self._clock.load_state_dict(counters.get("schedule", {}))


def _finalize_before_state(module: nn.Module, *_: Any) -> None:
    """Finish the last update before its weights go into a checkpoint."""
    cast(UpdateLifecycle, module).finalize_update()
