"""The report of a spike: attribution by running the update again, and the text for readers."""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from andrea_callbacks.forensics.attribution import Attribution, attribute, together
from andrea_callbacks.forensics.options import ReportOptions
from andrea_callbacks.forensics.replay import (
    LossFunction,
    ReplayUnavailable,
    loss_function,
    replay_failed,
)
from andrea_callbacks.forensics.report import Bundle, bar_chart, write_bundle
from andrea_callbacks.forensics.sample_identity import (
    DecodeFunction,
    NameFunction,
    decoder,
    gather_rows,
    identity_of,
    row_names,
    row_numbers,
    spell,
    text_of,
)
from andrea_callbacks.hooks.gradient_watch import watch_of
from andrea_callbacks.hooks.measuring import clip_threshold, remaining_scale
from andrea_callbacks.hooks.scalars import add_text
from andrea_callbacks.hooks.terminal import warn
from andrea_callbacks.hooks.update_gradient import UpdateGradient
from andrea_callbacks.hooks.update_window import UpdateWindow
from andrea_callbacks.numerics.gradient_norm import gradient_norm, optimizer_parameters
from andrea_callbacks.numerics.host_transfer import HostCopy

FAITHFUL = 0.95
"""Least cosine between the gradients of replay and update; below it the replay is not the run's loss."""

SHOWN = 10
"""Number of sequences in the picture and the text of a report."""


@dataclass(slots=True, kw_only=True)
class JudgedLater:
    """An update whose figures are on their way to the host."""

    update: int
    place: str
    figures: HostCopy
    window: UpdateWindow
    optimizer: Optimizer
    gradient: UpdateGradient


class SpikeReports:
    """Attributes spikes to sequences and writes the reports; all ranks must report together.

    Args:
        options: Those of the callback; see `SpikeForensics`.
    """

    def __init__(self, options: ReportOptions) -> None:
        self._options = options

    def write(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        waiting: JudgedLater,
        is_before: bool,
        norm: float,
        report: dict[str, Any],
        title: str,
    ) -> str:
        """Write the report of a spike; return the part of the console line about its origin."""
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
        failed = gather_rows(failed)
        if failed:
            attribution, report["attribution"] = None, {"unavailable": failed[0]}
        report["sequences"] = gather_rows(_identities(trainer, waiting.window, self._options.identify))
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
            decode = decoder(trainer, pl_module, self._options.decode)
            bundle.texts = gather_rows(_texts(trainer, waiting.window, attribution, decode))
            add_text(trainer, "spike", _table(title + origin, attribution), waiting.update)
        elif "agreement" in report:
            origin = f"; {failed[0]}"
            bundle.picture = bar_chart(title + origin, [])
        place = write_bundle(trainer, self._options.folder, f"update-{waiting.update:06d}-spike", bundle)
        report["report"] = place
        return origin + (f"; report: {place}" if place else "")

    def _attribute(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        waiting: JudgedLater,
        is_before: bool,
        norm: float,
    ) -> Attribution:
        losses_of = together(lambda: self._losses_of(pl_module, waiting.window))
        parameters = [each for each in optimizer_parameters(waiting.optimizer) if each.requires_grad]
        whole = _gradient_before(waiting, parameters, trainer) if is_before else None
        return attribute(
            trainer, pl_module, waiting.window, losses_of, parameters, whole, norm, self._options.identify
        )

    def _losses_of(self, pl_module: pl.LightningModule, window: UpdateWindow) -> LossFunction:
        if not window.is_whole or not window.micro_batches:
            raise ReplayUnavailable("attribution is not available: the micro-batches are not all at hand")
        return loss_function(pl_module, self._options.replay)


def clip_figures(
    trainer: pl.Trainer, pl_module: pl.LightningModule, gradient: UpdateGradient
) -> dict[str, float | None]:
    """Return the threshold that a gradient is clipped to, and its norm after clipping, if known."""
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


def _gradient_before(
    waiting: JudgedLater, parameters: list[Tensor], trainer: pl.Trainer
) -> list[Tensor] | None:
    """Return an update's gradient before a clip, without a loss scale; None if it cannot be recovered.

    A clip by the global norm multiplied all elements by one number, which can be undone. Other changes
    cannot.
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
    """Return the identities of this rank's rows, or of its micro-batches if they have no rows."""
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
    """Return headings and texts of this rank's sequences among the largest parts."""
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
