"""An update's gradient before any change, and the clips that changed it."""

from dataclasses import dataclass

from torch import Tensor

from andrea_callbacks.numerics.gradient_norm import GradientNorm


@dataclass(slots=True, kw_only=True)
class Clip:
    """The effect of clips on a gradient."""

    threshold: float | None
    """Global L2 norm that the whole gradient was clipped to, without a loss scale; None if it was clipped by
    value, by another norm, in parts, or twice."""
    clipped: Tensor | None = None
    """Norm after clipping, 0-d, without a loss scale; None until it is measured."""
    is_uniform: bool = False
    """Whether every element was multiplied by the same number."""


@dataclass(slots=True, kw_only=True)
class UpdateGradient:
    """An update's gradient for one optimizer, before any change."""

    norm: GradientNorm
    """The measured norm, which includes `scale`."""
    scale: float
    """The loss scale in the measured gradients; 1 if they carried none."""
    is_altered: bool = False
    """Whether something other than a clip changed the gradient before the measurement of `norm`."""
    doubt: Tensor | None = None
    """0-d bool on the device: whether the gradient was changed in a way that torch does not count, such as
    through `.data`; None if that is unknown."""
    clip: Clip | None = None
    """The effect of clips so far; None if there was no clip."""
    awaits_clip: bool = False
    """Whether a callback asked for the norm after a clip that comes after the step's hook."""
    expected: float | None = None
    """The threshold of a coming clip whose result is known in advance."""

    @property
    def total(self) -> Tensor:
        """Global L2 norm without a loss scale, 0-d."""
        return self.norm.total.detach() / self.scale
