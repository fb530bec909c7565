"""What is known of an update while it is made, and until it is known what became of it."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from andrea_callbacks.gradients import GradientNorm
from andrea_callbacks.host import HostCopy
from andrea_callbacks.schedules import ScheduleMove

Outcome = Literal["applied", "empty", "nonfinite_skip", "scaler_skip", "nonfinite_raise"]


@dataclass(slots=True, kw_only=True)
class Attempt:
    """An update being made, from its loss to its outcome."""

    number: int
    lr: float | None
    """Rate of the first parameter group; None where the optimizer sets its rate itself."""
    tokens: int | Tensor
    loss_sum: Tensor
    micro_losses: list[Tensor] = field(default_factory=list[Tensor])
    sources: Tensor | None = None
    """(2, K) summed losses and label tokens of each source, over all ranks; None where sources are not told
    apart."""
    source_sums: list[float] = field(default_factory=list[float])
    """The same in one row, on the host."""
    loss: Tensor | None = None
    norm: GradientNorm | None = None
    coefficient: Tensor | None = None
    outcome: Outcome = "applied"
    nonfinite: str | None = None
    refusal: str | None = None
    """What a callback found not to be finite before the step."""
    clip_seconds: float = 0.0
    """The host's time in measuring and clipping."""
    verdict: HostCopy | None = None
    """Loss, norm, tokens and coefficient on their way to the host, where the device judges the update."""
    schedule: ScheduleMove | None = None
    """How this update moved the schedule."""

    @property
    def is_pending(self) -> bool:
        """Whether the host does not know yet what became of the update."""
        return self.verdict is not None
