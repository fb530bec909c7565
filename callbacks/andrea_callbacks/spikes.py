"""Spikes of the gradient's norm or the loss, with the text that made them, before they reach the weights."""

from dataclasses import dataclass
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from andrea_callbacks.attribution import Attribution, attribute, together
from andrea_callbacks.bundle import Bundle, bar_chart, write_bundle
from andrea_callbacks.detector import Circumstances, MixtureTracker, SpikeDetector, Verdict
from andrea_callbacks.events import RunEvent, publish_event
from andrea_callbacks.gradient_watch import UpdateGradient, update_gradient, watch_of
from andrea_callbacks.gradients import gradient_norm, optimizer_parameters
from andrea_callbacks.host import HostCopy, agree, side_by_side
from andrea_callbacks.identity import (
    DecodeFunction,
    NameFunction,
    decoder,
    field,
    gathered,
    identity_of,
    row_names,
    row_numbers,
    source_name,
    spell,
    text_of,
)
from andrea_callbacks.measuring import clip_threshold, optimizer_place, remaining_scale
from andrea_callbacks.replay import (
    LossFunction,
    ReplayFunction,
    ReplayUnavailable,
    loss_function,
    replay_failed,
)
from andrea_callbacks.scalars import add_text
from andrea_callbacks.terminal import say, warn
from andrea_callbacks.window import UpdateWindow, WindowCallback

MOST_SOURCES = 256
"""Sources told apart; the rest share the last place."""

FAITHFUL = 0.95
"""Cosine between a replay's gradient and the update's under which the replay is not the run's loss."""

SHOWN = 10
"""Sequences in the picture and in the text of a report."""


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """Figures on their way to the host."""

    update: int
    place: str
    figures: HostCopy
    window: UpdateWindow
    optimizer: Optimizer
    gradient: UpdateGradient


class SpikeForensics(WindowCallback):
    """Finds the sequences behind a spike of the gradient's norm or of the loss, and writes a report.

    What is typical is learnt by a `SpikeDetector` for each mixture of sources that the batches show
    (`source_id`, see `protocols`), and for the updates after a switch of sources: the switch is no spike, and
    a spike within a rare source is one.
    On a spike the update's micro-batches are run again, one backward pass a sequence, through the module's
    `sequence_losses(micro_batch)`, its `loss_sum(micro_batch)` (which tells micro-batches apart, and no
    sequences), or `replay`; `training_step` never is. With none of these, and with sharded parameters, the
    report says which sequences were in the update, and that attribution is not available.

    A replay whose gradient points elsewhere than the update's (cosine under 0.95) is not the run's loss: the
    report says so and names nobody. The norm is that before any clip, as in `PreClipNorm`; an update whose
    gradient was changed by other means is judged by its loss alone.

    Under automatic optimization and in modules that report their updates the loss is that of the whole
    update; under somebody's own manual optimization the sum of what backward passes started from since the
    last step. Each optimizer has statistics of its own. A report costs as much time as an update for each
    sequence, and the memory of three more gradients; losses that wait for other ranks by themselves (gathered
    contrastive losses) cannot be run again on several ranks. Where the replay raises the report says so.

    On a CPU a report is made before the step. On an accelerator nothing waits: a spike is known during the
    next update, and the replay runs on weights that are one update on; the report says so. With `wait` every
    update waits for its norm, and the report is made before the step there too. A GradScaler's scale is read
    at every update; the scaler itself waits for the device then.

    A report is a folder `reports/update-000412-spike` in the trainer's log folder: `report.json`,
    `picture.svg`, `sequences.txt` where text can be decoded. A table goes to loggers that take text, one line
    to the console, an event `spike` to callbacks that take events.

    Args:
        threshold: Standard deviations above the typical value, of its logarithm, that make a spike.
        ratio: A norm must also be this many times the typical one.
        loss_ratio: A loss must also be this many times the typical one; None watches the norm alone.
        history: Updates that statistics are taken from.
        min_history: Updates before anything is judged.
        patience: After this many spikes in a row the level is taken for changed, and is learnt afresh.
        max_reports: Most reports in any `per_updates` updates; further spikes are counted and told to other
            callbacks.
        per_updates: See `max_reports`.
        stop_after: Spikes in a row that stop the run after the update, as `trainer.should_stop` does; never
            when left out.
        wait: On an accelerator, wait for every norm.
        replay: Takes module and micro-batch and returns losses, (B,) or 0-d, with their graph; up to a factor
            common to all micro-batches, their sum must be what was trained on.
        decode: Turns ids into text; the tokenizer of module or datamodule when left out.
        folder: Where reports go, in place of the log folder.
        name: Tells instances in the same trainer apart.
        identify: Takes a micro-batch, whatever it is, and returns a name for each of its rows.

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
        if loss_ratio is not None and not loss_ratio >= 1:
            raise ValueError(f"SpikeForensics: loss_ratio must be at least 1, got {loss_ratio}")
        if max_reports < 0:
            raise ValueError(f"SpikeForensics: max_reports must be at least 0, got {max_reports}")
        if per_updates < 1:
            raise ValueError(f"SpikeForensics: per_updates must be at least 1, got {per_updates}")
        if stop_after is not None and stop_after < 1:
            raise ValueError(f"SpikeForensics: stop_after must be at least 1, got {stop_after}")
        self.stop_after = stop_after
        self.ratio = ratio
        self.loss_ratio = loss_ratio
        self.max_reports = max_reports
        self.per_updates = per_updates
        self.wait = wait
        self.replay = replay
        self.identify = identify
        self.decode = decode
        self.folder = folder
        self.reset()

    @override
    def reset(self) -> None:
        """Forget an earlier fit."""
        self.spikes: int = 0
        """Spikes so far."""
        self.in_a_row: int = 0
        """Spikes in a row."""
        self._detectors: dict[str, SpikeDetector] = {}
        self._mixtures = MixtureTracker()
        self._reported: list[int] = []
        self._waiting: list[_Waiting] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget an update that broke off."""
        super().on_train_start(trainer, pl_module)
        self._waiting.clear()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Judge the update, or the one before where its figures have only arrived now."""
        if self.steps.next(trainer, optimizer) is None:
            self.window.losses.clear()
            return
        self._judge_waiting(trainer, pl_module)
        gradient = update_gradient(trainer, optimizer)
        waiting = _Waiting(
            update=trainer.global_step + 1,
            place=optimizer_place(trainer, optimizer),
            figures=HostCopy(self._figures(trainer, gradient)),
            window=self.window,
            optimizer=optimizer,
            gradient=gradient,
        )
        self.window.losses.clear()
        if self.wait or _is_read_at_once(pl_module.device):
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
        """Judge the last update, and write what there is."""
        self._judge_waiting(trainer, pl_module)
        super().on_train_end(trainer, pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the statistics and what was reported."""
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
        """Go on with the statistics."""
        self.steps.load_state_dict(state_dict.get("steps", {}))
        self._detectors = {}
        for name, state in state_dict["detectors"].items():
            self._detector(name).load_state_dict(state)
        self._mixtures.mean = dict(state_dict["mixture"])
        self._reported = list(state_dict["reported"])
        self.spikes = state_dict["spikes"]
        self.in_a_row = state_dict.get("in_a_row", 0)

    def _figures(self, trainer: pl.Trainer, gradient: UpdateGradient) -> Tensor:
        """Return norm, NaN where it is not known, loss and the tokens of each source, alike on all ranks."""
        norm = gradient.total
        if gradient.is_altered:
            norm = torch.full_like(norm, float("nan"))
        elif gradient.doubt is not None:
            norm = torch.where(gradient.doubt, float("nan"), norm)
        loss = self.window_loss(trainer)
        figures = side_by_side(norm, float("nan") if loss is None else loss)
        tokens = self._tokens_of_sources(figures)
        # one reduction whatever the batches hold, since every rank must take part and judge alike
        return agree(torch.cat([figures, tokens]), "mean")

    def _tokens_of_sources(self, like: Tensor) -> Tensor:
        """Return (MOST_SOURCES,) tokens of each source in the window, zeros where batches do not say it."""
        tokens = like.new_zeros(MOST_SOURCES)
        for micro_batch in self.window.micro_batches:
            sources, mask = field(micro_batch, "source_id"), field(micro_batch, "valid_mask")
            if not isinstance(sources, Tensor) or sources.ndim != 1 or sources.is_floating_point():
                continue
            is_text = sources >= 0  # fillers have no source
            weights = torch.ones_like(sources)
            if (
                isinstance(mask, Tensor)
                and not mask.is_floating_point()
                and mask.ndim > 1
                and len(mask) == len(sources)
            ):
                weights = (mask != 0).flatten(1).sum(1)
            places = sources.clamp(0, MOST_SOURCES - 1).to(tokens.device, torch.int64)
            tokens.index_add_(0, places, (weights * is_text).to(tokens))
        return tokens

    def _judge_waiting(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._judge(trainer, pl_module, each, is_before=False)

    def _judge(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, waiting: _Waiting, is_before: bool
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

    def _follow_level(self, trainer: pl.Trainer, waiting: _Waiting, verdicts: dict[str, Verdict]) -> None:
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
        waiting: _Waiting,
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
            **_clip_figures(trainer, pl_module, waiting.gradient),
            "weights": "before the update" if is_before else "after the update, of which nothing was undone",
        }
        recent = [each for each in self._reported if update - self.per_updates < each <= update]
        if len(recent) < self.max_reports:
            self._reported = [*recent, update]
            line += self._write(trainer, pl_module, waiting, is_before, figures["norm"], report, line)
        stops = self.stop_after is not None and self.in_a_row >= self.stop_after
        if stops:
            line += f"; {self.in_a_row} spikes in a row: the run stops"
            trainer.should_stop = True
        say(line)
        details = {key: report[key] for key in report if key not in ("kind", "update", "sequences")}
        details["stops"] = stops
        publish_event(trainer, RunEvent(kind="spike", update=update, message=line, details=details))

    def _write(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        waiting: _Waiting,
        is_before: bool,
        norm: float,
        report: dict[str, Any],
        title: str,
    ) -> str:
        """Write the report of a spike and return what the console line says of its origin."""
        attribution, failed = None, list[str]()
        try:
            attribution = self._attribute(trainer, pl_module, waiting, is_before, norm)
            report["attribution"] = attribution.to_dict()
        except ReplayUnavailable as reason:
            failed = [str(reason)]
        except Exception as error:  # the user's code, or what it was given: the run goes on
            failed = [replay_failed(error)]
            warn(f"update {waiting.update}: {failed[0]}")
        agreement = 1.0 if attribution is None or attribution.agreement is None else attribution.agreement
        if not agreement >= FAITHFUL:  # the same on all ranks; NaN is not
            report["agreement"] = agreement
            failed = [_unfaithful(agreement)]
        failed = gathered(failed)
        if failed:
            attribution, report["attribution"] = None, {"unavailable": failed[0]}
        report["sequences"] = gathered(_identities(trainer, waiting.window, self.identify))
        origin, bundle = "", Bundle(figures=report)
        if attribution is not None and attribution.sequences:
            first = attribution.sequences[0]
            if len(attribution.sequences) > 1 or "row" in first.identity:
                origin = f", {100 * first.share:.0f} % from {spell(first.identity)}"
            if "place" in first.identity:
                origin += f" ({first.identity['place']})"
            shown = attribution.sequences[:SHOWN]
            bundle.picture = bar_chart(
                title + origin, [(spell(each.identity), 100 * each.share) for each in shown], " %"
            )
            decode = decoder(trainer, pl_module, self.decode)
            bundle.texts = gathered(_texts(trainer, waiting.window, attribution, decode))
            add_text(trainer, "spike", _table(title + origin, attribution), waiting.update)
        elif "agreement" in report:
            origin = f"; {failed[0]}"
            bundle.picture = bar_chart(title + origin, [])
        place = write_bundle(trainer, self.folder, f"update-{waiting.update:06d}-spike", bundle)
        report["report"] = place
        return origin + (f"; report: {place}" if place else "")

    def _attribute(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        waiting: _Waiting,
        is_before: bool,
        norm: float,
    ) -> Attribution:
        losses_of = together(lambda: self._losses_of(pl_module, waiting.window))
        parameters = [each for each in optimizer_parameters(waiting.optimizer) if each.requires_grad]
        whole = _gradient_before(waiting, parameters, trainer) if is_before else None
        return attribute(
            trainer, pl_module, waiting.window, losses_of, parameters, whole, norm, self.identify
        )

    def _losses_of(self, pl_module: pl.LightningModule, window: UpdateWindow) -> LossFunction:
        if not window.is_whole or not window.micro_batches:
            raise ReplayUnavailable("attribution is not available: the micro-batches are not all at hand")
        return loss_function(pl_module, self.replay)

    def _build(self, ratio: float) -> SpikeDetector:
        return SpikeDetector(ratio=ratio, **cast(Any, self._options))

    def _detector(self, name: str) -> SpikeDetector:
        if name not in self._detectors:
            least = self.ratio if name.endswith("/norm") else self.loss_ratio
            self._detectors[name] = self._build(1.0 if least is None else least)
        return self._detectors[name]


def _is_read_at_once(device: torch.device) -> bool:
    return device.type == "cpu"


def _clip_figures(
    trainer: pl.Trainer, pl_module: pl.LightningModule, gradient: UpdateGradient
) -> dict[str, float | None]:
    """Return what a gradient is clipped to, and the norm that clips have left of it, where that is known."""
    if gradient.clip is not None:
        left = gradient.clip.clipped
        return {
            "clip_threshold": gradient.clip.threshold,
            "clipped_norm": None if left is None else float(left),
        }
    threshold = clip_threshold(trainer, pl_module)
    is_watched = watch_of(trainer) is not None and not gradient.is_altered
    if threshold is None and is_watched and not pl_module.automatic_optimization:
        threshold = float("inf")  # the step is next, and nothing has clipped
    return {"clip_threshold": threshold}


def _gradient_before(waiting: _Waiting, parameters: list[Tensor], trainer: pl.Trainer) -> list[Tensor] | None:
    """Return an update's gradient as it was before a clip, without a loss scale; None where it is not left.

    A clip by the global norm has multiplied all of it by one number; after any other change it is lost.
    """
    gradient = waiting.gradient
    clip = gradient.clip
    if gradient.is_altered or (gradient.doubt is not None and bool(gradient.doubt)):
        return None
    factor = 1.0 / remaining_scale(trainer, waiting.optimizer)
    if clip is not None:
        now = float(gradient_norm(parameters).total) * factor
        if not clip.is_uniform or not now:
            return None
        factor *= float(gradient.total) / now
    return [
        torch.zeros_like(each) if each.grad is None else each.grad.detach().to_dense() * factor
        for each in parameters
    ]


def _unfaithful(agreement: float) -> str:
    return (
        f"the replay is not the run's loss (cosine of its gradient to the update's {agreement:.2f}), and "
        "nobody is named; replay=, sequence_losses or loss_sum must return what training_step trains on"
    )


def _identities(
    trainer: pl.Trainer, window: UpdateWindow, identify: NameFunction | None
) -> list[dict[str, Any]]:
    """Return what is known of this rank's rows, or of its micro-batches where they have none."""
    found: list[dict[str, Any]] = []
    for number, micro_batch in enumerate(window.micro_batches, start=1):
        names = row_names(micro_batch, identify)
        rows = names or row_numbers(micro_batch, "document_id") or row_numbers(micro_batch, "source_id")
        places = range(len(rows)) if rows else [None]
        found += [identity_of(trainer, micro_batch, number, row, names) for row in places]
    return found


def _texts(
    trainer: pl.Trainer, window: UpdateWindow, attribution: Attribution, decode: DecodeFunction | None
) -> list[tuple[str, str]]:
    """Return headings and texts of this rank's sequences among the first."""
    texts: list[tuple[str, str]] = []
    for part in attribution.sequences[:SHOWN]:
        identity = part.identity
        if identity["rank"] != trainer.global_rank or "row" not in identity:
            continue
        text = text_of(window.micro_batches[identity["micro_batch"] - 1], identity["row"] - 1, decode)
        if text is not None:
            place = f" ({identity['place']})" if "place" in identity else ""
            texts.append((f"{100 * part.share:.1f} %  {spell(identity)}{place}", text))
    return texts


def _table(title: str, attribution: Attribution) -> str:
    """Return a Markdown table of the parts."""
    lines = [title, "", "| part | share | norm | cosine | norm without it |", "|---|---|---|---|---|"]
    for part in [*attribution.sources, *attribution.sequences[:SHOWN]]:
        name = spell(part.identity) if "micro_batch" in part.identity else f"source {part.identity['source']}"
        lines.append(
            f"| {name} | {100 * part.share:.1f} % | {part.norm:.3g} | {part.cosine:.3f} "
            f"| {part.without:.3g} |"
        )
    return "\n".join(lines)
