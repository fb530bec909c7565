"""Computes how long one large gradient stays in Adam's moments.

m <- beta1 m + (1 - beta1) g        a gradient g is (1 - beta1) beta1^k g of m after k more updates
v <- beta2 v + (1 - beta2) g²       and (1 - beta2) beta2^k g² of v, whose root divides the rate
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentTrace:
    """The effect of one large gradient on Adam's moments; entry k is k updates after it.

    The figures assume that all gradients point the same way, so that norms add up: the worst case.
    """

    first_from_spike: tuple[float, ...]
    """Norm of the spike's part of the first moment."""
    first: tuple[float, ...]
    """Norm of the first moment."""
    second_from_spike: tuple[float, ...]
    """The spike's part of the second moment, in units of the squared gradient."""
    second: tuple[float, ...]
    """The second moment."""
    half_life_first: float
    """Updates in which the spike's part of the first moment halves."""
    half_life_second: float
    """Updates in which its part of the second moment halves."""

    @property
    def share_of_first(self) -> tuple[float, ...]:
        """The spike's share of the first moment."""
        return tuple(
            part / whole if whole else 0.0
            for part, whole in zip(self.first_from_spike, self.first, strict=True)
        )

    @property
    def rate_factor(self) -> tuple[float, ...]:
        """Factor on the learning rate of later updates that the spike causes in the second moment."""
        return tuple(
            math.sqrt(1.0 - part / whole) if whole else 1.0
            for part, whole in zip(self.second_from_spike, self.second, strict=True)
        )


def moment_trace(
    spike: float,
    typical: float,
    updates: int,
    beta1: float = 0.9,
    beta2: float = 0.999,
    max_norm: float | None = None,
) -> MomentTrace:
    """Follow one gradient with an unusual norm through Adam's moments (Kingma and Ba, 2015, algorithm 1).

    All other gradients have the typical norm, and the moments are steady before the spike.

    Args:
        spike: Norm of the unusual gradient.
        typical: Norm of all other gradients.
        updates: Number of updates to follow.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        max_norm: Norm that gradients are clipped to first; None for no clip.

    Returns:
        `updates + 1` entries each, the first at the spike's own update.

    Raises:
        ValueError: If an argument is out of range.

    >>> trace = moment_trace(spike=50.0, typical=0.5, updates=10)
    >>> round(trace.first_from_spike[0], 3), round(trace.first_from_spike[10], 3)
    (5.0, 1.743)
    >>> round(trace.half_life_first, 2), round(trace.half_life_second, 1)
    (6.58, 692.8)
    >>> round(moment_trace(50.0, 0.5, 0, max_norm=1.0).first_from_spike[0], 3)
    0.1
    """
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"moment_trace: {name} must lie in [0, 1), got {beta}")
    if updates < 0:
        raise ValueError(f"moment_trace: updates must be at least 0, got {updates}")
    if not (spike >= 0 and typical >= 0):
        raise ValueError(f"moment_trace: norms must be at least 0, got {spike} and {typical}")
    if max_norm is not None:
        spike, typical = min(spike, max_norm), min(typical, max_norm)
    shares = [(1 - beta1) * beta1**k for k in range(updates + 1)]
    squares = [(1 - beta2) * beta2**k for k in range(updates + 1)]
    return MomentTrace(
        first_from_spike=tuple(share * spike for share in shares),
        first=tuple(share * spike + (1 - share) * typical for share in shares),
        second_from_spike=tuple(share * spike**2 for share in squares),
        second=tuple(share * spike**2 + (1 - share) * typical**2 for share in squares),
        half_life_first=half_life(beta1),
        half_life_second=half_life(beta2),
    )


def half_life(beta: float) -> float:
    """Return the half-life, in updates, of a moving average with decay `beta`; 0 for beta 0."""
    return math.log(0.5) / math.log(beta) if beta > 0 else 0.0
