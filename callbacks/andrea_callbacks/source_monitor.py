"""Figures of each text source: weights, tokens, losses, rewards, and the phases of the mixture."""

from collections.abc import Mapping
from typing import Any, cast

import lightning.pytorch as pl
from typing_extensions import override

from andrea_callbacks.hooks.events import RunEvent, publish_event
from andrea_callbacks.hooks.protocols import MixesSources, NamesSources
from andrea_callbacks.hooks.reports import ReportCallback, UpdateReport
from andrea_callbacks.hooks.terminal import say


class SourceMonitor(ReportCallback):
    """Follows every source of text if the module reports losses by source and the datamodule names sources.

    If the datamodule mixes its sources (`MixesSources`), each start of a phase is published as an event
    `phase` with its length and weights, and each source that reaches its last epoch as an event `exhausted`.
    The journal keeps both. At the end of an epoch the console shows one line per source. A resume within an
    epoch continues the sums.

    Args:
        name: Tells instances in the same trainer apart.

    Metrics recorded:
        data/<source>/tokens: Label tokens of the source in the update, over all ranks.
        data/<source>/loss: Their token mean; absent if there were none.
        data/<source>/weight: The source's weight in this phase.
        data/<source>/reward: The mixture's reward; absent if there was none.
        data/<source>/epochs: Passes over the source's text so far.
        data/phase: Number of the phase; it changes when the weights do.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.reset()

    @override
    def reset(self) -> None:
        """Reset what an earlier fit left."""
        self._tokens: dict[str, int] = {}
        self._loss_sums: dict[str, float] = {}
        self._names: list[str] = []
        self._mixed: Mapping[str, Any] = {}
        self._phase = 0
        self._weights: dict[str, float] = {}

    @override
    def on_report(self, trainer: pl.Trainer, report: UpdateReport) -> None:
        """Record an update's figures by source."""
        datamodule = cast(Any, trainer).datamodule
        names = list(datamodule.source_names) if isinstance(datamodule, NamesSources) else []
        if isinstance(datamodule, MixesSources):
            self._record_mixture(trainer, report.update, datamodule.source_figures(report.update))
        self._names = names
        losses, tokens = report.source_losses, report.source_tokens
        if losses is None or tokens is None:
            return
        figures: dict[str, float] = {}
        for name, loss, count in zip(names, losses, tokens, strict=True):
            figures[f"data/{name}/tokens"] = count
            if loss is not None:
                figures[f"data/{name}/loss"] = loss
                if report.is_applied:
                    self._tokens[name] = self._tokens.get(name, 0) + count
                    self._loss_sums[name] = self._loss_sums.get(name, 0.0) + loss * count
        self.record(trainer, report.update, figures)

    def _record_mixture(self, trainer: pl.Trainer, update: int, mixed: Mapping[str, Any]) -> None:
        self._mixed = mixed
        if not mixed:
            return
        figures = {"data/phase": mixed["phase"]}
        for figure in ("weight", "epochs", "reward"):
            figures |= {f"data/{name}/{figure}": value for name, value in mixed[figure].items()}
        self.record(trainer, update, figures)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Publish the changes that take effect with the next update."""
        datamodule, update = cast(Any, trainer).datamodule, trainer.global_step + 1
        if not isinstance(datamodule, MixesSources):
            return
        mixed = datamodule.source_figures(update)
        if not mixed:
            return
        before, self._weights = self._weights, dict(mixed["weight"])
        if mixed["phase"] != self._phase:
            self._phase = mixed["phase"]
            details = {"phase": mixed["phase"], "length": mixed["phase_length"], "weights": mixed["weight"]}
            shares = ", ".join(f"{name} {weight:.3f}" for name, weight in mixed["weight"].items())
            message = f"phase {mixed['phase']}, {mixed['phase_length']} updates: {shares}"
            publish_event(trainer, RunEvent(kind="phase", update=update, message=message, details=details))
            return
        for name, weight in mixed["weight"].items():
            if not weight and before.get(name):
                message = f"update {update}: {name} has reached its max_epochs and is drawn no more"
                say(message)
                details = {"source": name, "weights": mixed["weight"]}
                publish_event(
                    trainer, RunEvent(kind="exhausted", update=update, message=message, details=details)
                )

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the epoch's figures of each source, then start over."""
        super().on_train_epoch_end(trainer, pl_module)
        total = sum(self._tokens.values())
        if len(self._tokens) > 1:
            lines = [self._summary_of(name, total) for name in self._names if name in self._tokens]
            say("\n".join([f"epoch {trainer.current_epoch + 1}, by source:", *lines]))
        self._tokens, self._loss_sums = {}, {}

    def _summary_of(self, name: str, total: int) -> str:
        tokens = self._tokens[name]
        loss, share = self._loss_sums[name] / tokens, tokens / total
        line = f"  {name}: loss {loss:.4f} over {tokens:,} tokens, {share:.1%}"
        if not self._mixed:
            return line
        return (
            f"{line}; weight now {self._mixed['weight'][name]:.3f}, {self._mixed['epochs'][name]:.2f} epochs"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the unfinished epoch, and the last published phase."""
        sums = {"tokens": dict(self._tokens), "loss_sums": dict(self._loss_sums)}
        return {**sums, "phase": self._phase, "weights": dict(self._weights)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the unfinished epoch."""
        self._tokens, self._loss_sums = dict(state_dict["tokens"]), dict(state_dict["loss_sums"])
        self._phase, self._weights = state_dict["phase"], dict(state_dict["weights"])
