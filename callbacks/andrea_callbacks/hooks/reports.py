"""Update reports of a module, and the base of callbacks that use them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from andrea_callbacks.hooks.protocols import FinalizesUpdates, TakesReports
from andrea_callbacks.hooks.scalars import ScalarCallback

Outcome = Literal["applied", "empty", "nonfinite_skip", "scaler_skip", "nonfinite_raise", "pending"]
"""An update's outcome: it changed the weights; it had no label; a NaN or Inf, or a GradScaler's overflow,
kept it from changing them; a NaN or Inf stops the run; or the device has not told yet."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateReport(Mapping[str, Any]):
    """The report of one update. It is also a mapping of its known fields.

    Args:
        update: The update's number, from 1.
        outcome: The update's outcome; `pending` occurs only in the result of `training_step`.
        loss: Token mean, 0-d; None if there was no label.
        tokens: Label tokens over all ranks; a 0-d tensor while the outcome is pending.
        grad_norm: Global L2 norm before clipping, 0-d.
        grad_norm_clipped: Global L2 norm after clipping, 0-d.
        clip_coefficient: Factor on the gradients, 0-d.
        lr: Learning rate that this update used in the first parameter group; None if the optimizer sets its
            rate itself.
        clip_seconds: Seconds that the host spent on measuring and clipping.
        skipped: Updates so far that left the weights unchanged.
        loss_scale: The GradScaler's scale; None without a GradScaler.
        nonfinite: The loss, gradient or tensor that was not finite; None if all were finite.
        source_losses: Token mean of each source, by `source_id`; None for a source without tokens. None with
            a single source.
        source_tokens: Label tokens of each source, by `source_id`; None with a single source.
        extra: Everything else that a module of another project reports, by name.
    """

    update: int
    outcome: Outcome = "applied"
    loss: Tensor | float | None = None
    tokens: int | Tensor = 0
    grad_norm: Tensor | float | None = None
    grad_norm_clipped: Tensor | float | None = None
    clip_coefficient: Tensor | float | None = None
    lr: float | None = None
    clip_seconds: float | None = None
    skipped: int | None = None
    loss_scale: float | None = None
    nonfinite: str | None = None
    source_losses: Sequence[float | None] | None = None
    source_tokens: Sequence[int] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> "UpdateReport":
        """Return a report from the mapping that a module of any project gives."""
        if isinstance(report, UpdateReport):
            return report
        known = {name: report[name] for name in FIELDS if name in report}
        return cls(**known, extra={name: value for name, value in report.items() if name not in FIELDS})

    @property
    def is_applied(self) -> bool:
        """Whether the update changed weights."""
        return self.outcome == "applied"

    def __getitem__(self, name: str) -> Any:
        value = getattr(self, name) if name in FIELDS else self.extra[name]
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in FIELDS if getattr(self, name) is not None)
        yield from self.extra

    def __len__(self) -> int:
        return sum(1 for _ in self)


FIELDS = tuple(each.name for each in fields(UpdateReport) if each.name != "extra")
"""Keys of a report as a mapping."""


def spell_nonfinite(fault: str | None) -> str:
    """Return "… is not finite", or "… are not finite" where a fault names several things."""
    return f"{fault} {'are' if ' and the gradient of ' in (fault or '') else 'is'} not finite"


def publish_report(trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
    """Hand the report of an update first to the datamodule and then to every callback that takes reports."""
    report = UpdateReport.of(report)
    takers = [cast(Any, trainer).datamodule, *cast("list[Callback]", cast(Any, trainer).callbacks)]
    for taker in takers:
        if isinstance(taker, TakesReports):
            taker.take_report(trainer, report)


def finalize_updates(pl_module: pl.LightningModule) -> None:
    """Make a module publish the report of its last update if its outcome was still pending."""
    if isinstance(pl_module, FinalizesUpdates):
        pl_module.finalize_update()


class ReportCallback(ScalarCallback):
    """The base of callbacks that take the report of every update once, including an update that raised."""

    def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
        """Handle a report from a module of any project; it may be a plain mapping."""
        self.on_report(trainer, UpdateReport.of(report))

    def on_report(self, trainer: pl.Trainer, report: UpdateReport) -> None:
        """Handle a report; `report.update` is its step."""

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make sure that the epoch's last update is reported."""
        finalize_updates(pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make sure that the last update is reported, and write it."""
        finalize_updates(pl_module)
        super().on_train_end(trainer, pl_module)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the last update, if the device can still tell its outcome."""
        with suppress(Exception):
            finalize_updates(pl_module)
        super().on_exception(trainer, pl_module, exception)
