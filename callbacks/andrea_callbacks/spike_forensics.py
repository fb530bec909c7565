"""Finds spikes of the gradient's norm or the loss, and the text behind them."""

from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from andrea_callbacks.forensics.detector import Circumstances, MixtureTracker, SpikeDetector, Verdict
from andrea_callbacks.forensics.options import ReportOptions
from andrea_callbacks.forensics.replay import ReplayFunction
from andrea_callbacks.forensics.sample_identity import DecodeFunction, NameFunction, source_name
from andrea_callbacks.forensics.source_tokens import tokens_of_sources
from andrea_callbacks.forensics.spike_report import JudgedLater, SpikeReports, clip_figures
from andrea_callbacks.hooks.events import RunEvent, publish_event
from andrea_callbacks.hooks.gradient_watch import update_gradient
from andrea_callbacks.hooks.measuring import optimizer_place
from andrea_callbacks.hooks.terminal import say
from andrea_callbacks.hooks.update_gradient import UpdateGradient
from andrea_callbacks.hooks.update_window import WindowCallback
from andrea_callbacks.numerics.bounds import require_at_least
from andrea_callbacks.numerics.host_transfer import (
    HostCopy,
    can_read_at_once,
    reduce_over_ranks,
    stack_scalars,
)


class SpikeForensics(ReportOptions, WindowCallback):
    """Finds the sequences behind a spike of the gradient's norm or of the loss, and writes a report.

    A `SpikeDetector` learns what is typical for each mixture of sources in the batches (`source_id`, see
    `protocols`), and for the first updates after a switch of sources. A switch is therefore not a spike,
    while a spike within a rare source is one.

    On a spike the callback runs the update's micro-batches again, with one backward pass per sequence,
    through the module's `sequence_losses(micro_batch)`, its `loss_sum(micro_batch)` (which tells
    micro-batches apart, but not sequences), or `replay`. It never runs `training_step`. Without any of
    these, and with sharded parameters, the report says which sequences were in the update, and that
    attribution is not available.

    If the gradient of the replay points elsewhere than the update's (cosine below 0.95), the replay does not
    compute the run's loss: the report says so and blames no sequence. The norm is that before any clip, as
    in `PreClipNorm`. If a gradient was changed by other means, only the loss of that update is judged.

    Under automatic optimization, and in modules that report their updates, the loss is that of the whole
    update. Under other manual optimization it is the sum of the losses of all backward passes since the last
    step. Each optimizer has its own statistics. A report takes the time of one update per sequence, and the
    memory of three more gradients. Losses that wait for other ranks themselves (gathered contrastive losses)
    cannot be run again on several ranks. If the replay raises, the report says so.

    On a CPU the report is made before the step. On an accelerator nothing waits: a spike is found during the
    next update, and the replay runs on weights that are one update newer, as the report says. With `wait`,
    every update waits for its norm, and the report is made before the step there too. With a GradScaler every
    update reads the scale, since the scaler itself waits for the device.

    A report is a folder `reports/update-000412-spike` in the trainer's log folder: `report.json`,
    `picture.svg`, and `sequences.txt` if text can be decoded. A table goes to loggers that accept text, one
    line to the console, and an event `spike` to callbacks that take events.

    Args:
        threshold: Standard deviations of the logarithm above the typical value that make a spike.
        ratio: Least ratio of a spike's norm to the typical norm.
        loss_ratio: Least ratio of a spike's loss to the typical loss; None watches only the norm.
        history: Updates that the statistics cover.
        min_history: Updates before anything is judged.
        patience: Consecutive spikes after which the level counts as changed and is learnt again.
        max_reports: Maximum number of reports in any `per_updates` updates. Further spikes are counted and
            published to other callbacks.
        per_updates: See `max_reports`.
        stop_after: Consecutive spikes that stop the run after the update, as `trainer.should_stop` does; None
            never stops.
        wait: Whether to wait for every norm on an accelerator.
        replay: Takes the module and a micro-batch; returns losses, (B,) or 0-d, attached to the graph. Their
            sum must be the trained loss, up to a factor common to all micro-batches.
        decode: Turns ids into text. The default is the tokenizer of the module or datamodule.
        folder: Folder for reports, in place of the log folder.
        name: Tells instances in the same trainer apart.
        identify: Takes a micro-batch of any kind; returns a name for each of its rows.

    Raises:
        ValueError: If an option is out of range; the message names it.

    Metrics recorded:
        train/spikes: Spikes so far.
    """

    def __init__(
        self,
        threshold: float = 4.0,
        ratio: float = 2.0,
        loss_ratio: float | None = 2.0,
        history: int = 100,
        min_history: int = 20,
        patience: int = 25,
        max_reports: int = 3,
        per_updates: int = 1000,
        stop_after: int | None = None,
        wait: bool = False,
        replay: ReplayFunction | None = None,
        decode: DecodeFunction | None = None,
        folder: str | None = None,
        name: str | None = None,
        identify: NameFunction | None = None,
    ) -> None:
        super().__init__(name=name)
        self._options = {
            "threshold": threshold,
            "history": history,
            "min_history": min_history,
            "patience": patience,
        }
        try:
            self._build(ratio)
        except ValueError as error:
            raise ValueError(f"SpikeForensics: {error}") from error
        require_at_least(
            1, "SpikeForensics", loss_ratio=loss_ratio, per_updates=per_updates, stop_after=stop_after
        )
        require_at_least(0, "SpikeForensics", max_reports=max_reports)
        self.stop_after = stop_after
        self.ratio = ratio
        self.loss_ratio = loss_ratio
        self.max_reports = max_reports
        self.per_updates = per_updates
        self.wait = wait
        self._set_report_options(replay, identify, decode, folder)
        self.reset()

    @override
    def reset(self) -> None:
        """Reset what an earlier fit left."""
        self.spikes: int = 0
        """Spikes so far."""
        self.in_a_row: int = 0
        """Consecutive spikes."""
        self._detectors: dict[str, SpikeDetector] = {}
        self._mixtures = MixtureTracker()
        self._reported: list[int] = []
        self._waiting: list[JudgedLater] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drop the state of an update that was cut short."""
        super().on_train_start(trainer, pl_module)
        self._waiting.clear()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Judge the update, or the previous one if its figures arrived only now."""
        if self.steps.next(trainer, optimizer) is None:
            self.window.losses.clear()
            return
        self._judge_waiting(trainer, pl_module)
        gradient = update_gradient(trainer, optimizer)
        waiting = JudgedLater(
            update=trainer.global_step + 1,
            place=optimizer_place(trainer, optimizer),
            figures=HostCopy(self._figures(trainer, gradient)),
            window=self.window,
            optimizer=optimizer,
            gradient=gradient,
        )
        self.window.losses.clear()
        if self.wait or can_read_at_once(pl_module.device):
            self._judge(trainer, pl_module, waiting, is_before=True)
        else:
            self._waiting.append(waiting)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge the last update, so that its figures come first."""
        self._judge_waiting(trainer, pl_module)
        super().on_validation_start(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge the epoch's last update."""
        super().on_train_epoch_end(trainer, pl_module)
        self._judge_waiting(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge the last update, and write the remaining scalars."""
        self._judge_waiting(trainer, pl_module)
        super().on_train_end(trainer, pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the statistics and the updates that have a report."""
        return {
            "steps": self.steps.state_dict(),
            "detectors": {name: each.state_dict() for name, each in self._detectors.items()},
            "mixture": dict(self._mixtures.mean),
            "reported": list(self._reported),
            "spikes": self.spikes,
            "in_a_row": self.in_a_row,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the statistics."""
        self.steps.load_state_dict(state_dict.get("steps", {}))
        self._detectors = {}
        for name, state in state_dict["detectors"].items():
            self._detector(name).load_state_dict(state)
        self._mixtures.mean = dict(state_dict["mixture"])
        self._reported = list(state_dict["reported"])
        self.spikes = state_dict["spikes"]
        self.in_a_row = state_dict.get("in_a_row", 0)

    def _figures(self, trainer: pl.Trainer, gradient: UpdateGradient) -> Tensor:
        """Return the norm (NaN if unknown), the loss and each source's tokens, the same on all ranks."""
        norm = gradient.total
        if gradient.is_altered:
            norm = torch.full_like(norm, float("nan"))
        elif gradient.doubt is not None:
            norm = torch.where(gradient.doubt, float("nan"), norm)
        loss = self.window_loss(trainer)
        figures = stack_scalars(norm, float("nan") if loss is None else loss)
        tokens = tokens_of_sources(self.window, figures)
        # one reduction whatever the batches hold, since every rank must take part and judge alike
        return reduce_over_ranks(torch.cat([figures, tokens]), "mean")

    def _judge_waiting(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._judge(trainer, pl_module, each, is_before=False)

    def _judge(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, waiting: JudgedLater, is_before: bool
    ) -> None:
        norm, loss, *tokens = waiting.figures.read()
        of = self._mixtures.follow(
            {source_name(trainer, at): count for at, count in enumerate(tokens) if count}
        )
        figures = {"norm": norm} | ({} if self.loss_ratio is None else {"loss": loss})
        verdicts: dict[str, Verdict] = {}
        for name, value in figures.items():
            verdicts[name] = self._detector(f"{waiting.place}/{name}").judge(value, of)
        if not any(verdict.is_spike for verdict in verdicts.values()):
            self.in_a_row = 0
            for name, value in figures.items():
                self._detector(f"{waiting.place}/{name}").take_in(value, of)
        else:
            self.spikes += 1
            self.in_a_row += 1
            self._report(trainer, pl_module, waiting, is_before, figures, verdicts, of)
            self._follow_level(trainer, waiting, verdicts)
        self.record(trainer, waiting.update, {"train/spikes": self.spikes})

    def _follow_level(self, trainer: pl.Trainer, waiting: JudgedLater, verdicts: dict[str, Verdict]) -> None:
        for name, verdict in verdicts.items():
            detector = self._detector(f"{waiting.place}/{name}")
            if verdict.is_spike and detector.pass_over():
                detector.start_afresh()
                message = (
                    f"update {waiting.update}: the {name} was a spike {detector.patience} times in a row; "
                    "this is taken for its new level, which is learnt afresh"
                )
                say(message)
                publish_event(trainer, RunEvent(kind="level", update=waiting.update, message=message))

    def _report(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        waiting: JudgedLater,
        is_before: bool,
        figures: dict[str, float],
        verdicts: dict[str, Verdict],
        of: Circumstances,
    ) -> None:
        update = waiting.update
        line = f"update {update}: " + ", ".join(
            f"{name} {value:.3g} (typical {verdicts[name].typical:.3g})"
            for name, value in figures.items()
            if verdicts[name].is_spike
        )
        report: dict[str, Any] = {
            "kind": "spike",
            "update": update,
            "mixture": {name: count / 4 for name, count in of.mixture},
            "shift": of.shift,
            **figures,
            "typical": {name: verdict.typical for name, verdict in verdicts.items()},
            "score": {name: verdict.score for name, verdict in verdicts.items()},
            "optimizer": waiting.place,
            **clip_figures(trainer, pl_module, waiting.gradient),
            "weights": "before the update" if is_before else "after the update, of which nothing was undone",
        }
        recent = [each for each in self._reported if update - self.per_updates < each <= update]
        if len(recent) < self.max_reports:
            self._reported = [*recent, update]
            line += SpikeReports(self).write(
                trainer, pl_module, waiting, is_before, figures["norm"], report, line
            )
        stops = self.stop_after is not None and self.in_a_row >= self.stop_after
        if stops:
            line += f"; {self.in_a_row} spikes in a row: the run stops"
            trainer.should_stop = True
        say(line)
        details = {key: report[key] for key in report if key not in ("kind", "update", "sequences")}
        details["stops"] = stops
        publish_event(trainer, RunEvent(kind="spike", update=update, message=line, details=details))

    def _build(self, ratio: float) -> SpikeDetector:
        return SpikeDetector(ratio=ratio, **cast(Any, self._options))

    def _detector(self, name: str) -> SpikeDetector:
        if name not in self._detectors:
            least = self.ratio if name.endswith("/norm") else self.loss_ratio
            self._detectors[name] = self._build(1.0 if least is None else least)
        return self._detectors[name]
