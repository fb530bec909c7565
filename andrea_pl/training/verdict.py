"""Decides whether an update may change weights, and what its outcome is.

loss, norm, tokens ──> is_bad, on the device ──> decide, on the host ──> outcome ──> reason_to_stop
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from andrea_callbacks.hooks.measuring import FALLING_SCALE_UPDATES
from andrea_callbacks.hooks.reports import Outcome
from andrea_callbacks.numerics.gradient_norm import GradientNorm
from andrea_callbacks.numerics.host_transfer import HostCopy, stack_scalars
from andrea_pl.training.accumulation import WindowSums


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The judged gradient of an update, and the copy of its figures for the host."""

    loss: Tensor
    """Token mean, 0-d."""
    norm: GradientNorm
    """Norm before clipping, 0-d."""
    coefficient: Tensor | None
    """Factor on the gradients, 0-d; None if the update changes nothing."""
    figures: HostCopy
    """The row that `figure_row` made."""

    def on_host(self, figures: "Figures", coefficient: float) -> "Measured":
        """Return a copy with loss, norm and coefficient on the host, so that callbacks need no device."""
        loss, norm, clip = (
            torch.tensor(each, dtype=torch.float64) for each in (figures.loss, figures.norm, coefficient)
        )
        return replace(self, loss=loss, norm=replace(self.norm, total=norm), coefficient=clip)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """An update's figures on the host."""

    loss: float
    norm: float
    tokens: int
    is_bad: bool
    sources: tuple[float, ...]
    """K summed losses of the sources, then their K label tokens; empty for a single source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision about an update."""

    outcome: Outcome
    nonfinite: str | None = None
    """The loss, gradient or tensor that was not finite; None if all were finite."""


def is_bad(loss: Tensor, norm: Tensor, tokens: int | Tensor, max_norm: float) -> Tensor:
    """Return 0-d float32: 1 if an update must change nothing, else 0. Does not wait for the device.

    A step cannot clip if the norm, or its ratio to `max_norm`, overflows in float32.
    """
    reach = norm / min(1.0, max_norm)
    is_good = torch.isfinite(loss).to(norm.device) & torch.isfinite(reach.float())
    if isinstance(tokens, Tensor):
        is_good &= tokens.to(norm.device) > 0
    return (~is_good).float()


def figure_row(
    sums: WindowSums, loss: Tensor, norm: Tensor, bad: Tensor, coefficient: Tensor | float = 1.0
) -> Tensor:
    """Return the figures of an update in one row, (5 + 2K,), for one transfer to the host."""
    row = stack_scalars(loss, norm, sums.tokens, bad, coefficient)
    return row if sums.sources is None else torch.cat([row, sums.sources.flatten().to(row)])


def read_figures(row: HostCopy) -> tuple[Figures, float]:
    """Return the figures of a `figure_row`, and the clip coefficient. Waits until the row has arrived."""
    loss, norm, tokens, bad, coefficient, *sources = row.read()
    figures = Figures(loss=loss, norm=norm, tokens=int(tokens), is_bad=bool(bad), sources=tuple(sources))
    return figures, coefficient


def decide(
    figures: Figures, refusal: str | None, skips_nonfinite: bool, has_scaler: bool, fault: "Fault"
) -> Verdict:
    """Return the verdict on an update.

    Args:
        figures: The update's figures on the host.
        refusal: What a callback found to be not finite, or None.
        skips_nonfinite: Whether to skip an update that is not finite instead of raising.
        has_scaler: Whether there is a GradScaler; then a finite loss with an infinite gradient is its
            overflow.
        fault: Names what is not finite.
    """
    if figures.tokens == 0:
        return Verdict(outcome="empty")
    refused: Outcome = "nonfinite_skip" if skips_nonfinite else "nonfinite_raise"
    if refusal is not None:
        return Verdict(outcome=refused, nonfinite=refusal)
    if not figures.is_bad:
        return Verdict(outcome="applied")
    is_loss_finite = math.isfinite(figures.loss)
    outcome: Outcome = "scaler_skip" if has_scaler and is_loss_finite else refused
    return Verdict(outcome=outcome, nonfinite=fault.name(is_loss_finite))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Finds what was not finite in an update."""

    module: nn.Module
    norm: GradientNorm
    micro_losses: Sequence[Tensor]

    def name(self, is_loss_finite: bool) -> str:
        """Return in words which micro-batch's loss and which parameter's gradient. Waits for the device."""
        parts: list[str] = []
        if not is_loss_finite:
            values = cast("list[float]", torch.stack(list(self.micro_losses)).tolist())
            bad = next((at for at, value in enumerate(values, start=1) if not math.isfinite(value)), None)
            of = (
                f"micro-batch {bad} of {len(values)} ({values[bad - 1]})"
                if bad
                else "another rank's micro-batch"
            )
            parts.append(f"the loss of {of}")
        parameter = self.norm.first_nonfinite(self.module)
        if parameter is not None:
            parts.append(f"the gradient of {parameter}")
        return " and ".join(parts) or "the norm of the gradients"


class SkipCounter:
    """Counts consecutive updates that a NaN or Inf kept from changing weights, and decides when to stop."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def count(self, verdict: Verdict) -> None:
        """Count the verdict on an update. An empty update does not change the count."""
        if verdict.outcome == "applied":
            self.in_a_row = 0
        elif verdict.outcome != "empty":
            self.in_a_row += 1

    def reason_to_stop(
        self, verdict: Verdict, number: int, limit: int, scale: float | None, min_scale: float
    ) -> str | None:
        """Return why the run must stop after this update, or None.

        Args:
            verdict: The verdict on the update.
            number: The update's number.
            limit: Maximum number of consecutive skipped updates.
            scale: The GradScaler's scale, None without a GradScaler.
            min_scale: The scale at which an overflow stops the run.
        """
        if verdict.outcome in ("applied", "empty"):
            return None
        if verdict.outcome == "nonfinite_raise":
            return "`on_nonfinite` is 'raise' ('skip' would pass over such updates)"
        if self.in_a_row > limit:
            return f"more than `max_consecutive_skips`={limit} in a row were skipped"
        if verdict.outcome == "scaler_skip" and scale is not None:
            if scale <= min_scale:
                return f"the loss scale is down to {scale:g} (`min_loss_scale`={min_scale:g})"
            if self.in_a_row == FALLING_SCALE_UPDATES:
                rank_zero_warn(
                    f"update {number}: the loss scale keeps falling, now {scale:g} after "
                    f"{FALLING_SCALE_UPDATES} overflows in a row; check the learning rate, or use bf16-mixed"
                )
        return None
