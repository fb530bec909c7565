"""The gradient of an update as it was before anybody changed it, and what clips made of it."""

from dataclasses import dataclass

from torch import Tensor

from andrea_callbacks.numerics.gradient_norm import GradientNorm


@dataclass(slots=True, kw_only=True)
class Clip:
    """What clips made of a gradient."""

    threshold: float | None
    """Global L2 norm that the whole gradient was clipped to, without a loss scale; None where it was clipped
    by value, by another norm, in parts, or twice."""
    clipped: Tensor | None = None
    """Norm that was left, 0-d, without a loss scale; None until it is measured."""
    is_uniform: bool = False
    """Whether every element was multiplied by the same number."""


@dataclass(slots=True, kw_only=True)
class UpdateGradient:
    """The gradient of an update as it was before anybody changed it, for one optimizer."""

    norm: GradientNorm
    """As measured, with `scale` in it."""
    scale: float
    """The loss scale that the measured gradients carried; 1 where there was none any more."""
    is_altered: bool = False
    """Whether something other than a clip changed it before it was measured; `norm` is of what was left."""
    doubt: Tensor | None = None
    """0-d bool on the device: whether it was changed in a way that torch does not count, such as through
    `.data`; None where that cannot be told."""
    clip: Clip | None = None
    """What clips made of it so far, None where there was none."""
    awaits_clip: bool = False
    """Whether somebody wants to know of a clip that comes after the step's hook, and what it leaves."""
    expected: float | None = None
    """The threshold of a clip that is coming, of which it is known beforehand what it leaves."""

    @property
    def total(self) -> Tensor:
        """Global L2 norm without a loss scale, 0-d."""
        return self.norm.total.detach() / self.scale
