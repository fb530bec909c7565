"""Makes the report of an update from its measurements and verdict."""

from typing import Any

from torch import Tensor

from andrea_callbacks.hooks.reports import Outcome, UpdateReport
from andrea_pl.training.verdict import Figures, Measured


def build_report(
    *,
    number: int,
    lr: float | None,
    outcome: Outcome,
    measured: Measured,
    figures: Figures | None,
    tokens: int | Tensor,
    seconds: float,
    skipped: int,
    loss_scale: float | None,
    nonfinite: str | None = None,
) -> UpdateReport:
    """Return the report of an update. It has no figures while the device's verdict is pending.

    An update without labels has neither loss nor norm. An update that changed nothing has no clip.
    """
    has_labels = outcome != "empty"
    norm = measured.norm.total if has_labels else None
    coefficient = measured.coefficient if has_labels else None
    return UpdateReport(
        update=number,
        outcome=outcome,
        loss=measured.loss if has_labels else None,
        tokens=tokens,
        grad_norm=norm,
        grad_norm_clipped=None if norm is None or coefficient is None else norm * coefficient,
        clip_coefficient=coefficient,
        lr=lr,
        clip_seconds=seconds,
        skipped=skipped,
        loss_scale=loss_scale,
        nonfinite=nonfinite,
        **({} if figures is None else _source_figures(figures.sources)),
    )


def _source_figures(sums: tuple[float, ...]) -> dict[str, Any]:
    """Return a report's figures by source; empty with a single source."""
    count = len(sums) // 2
    losses, tokens = sums[:count], [int(each) for each in sums[count:]]
    if not any(tokens):
        return {}
    means = [loss / number if number else None for loss, number in zip(losses, tokens, strict=True)]
    return {"source_losses": means, "source_tokens": tokens}
