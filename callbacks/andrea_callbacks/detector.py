"""A robust judge of a positive figure such as the gradient's norm: what is typical, and what is a spike.

log x of update t = level + offset of its kind + scatter

level     median over the last updates of what is left without the kind's offset; follows the training
offset    median over the kind's own updates; a switch of sources is a change of kind, and no anomaly
scatter   median absolute deviation of what is left, over all kinds
"""

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

MEDIAN_SPREAD = math.pi / 2
"""Variance of a median over that of a mean, of normal values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a detector thinks of a value."""

    is_spike: bool
    typical: float | None
    """What was to be expected, None where too little is known of the kind to say."""
    score: float | None
    """Distance from it in log space, in standard deviations."""


class SpikeDetector:
    """Judges values; what it is told to take in becomes what is typical.

    Values that are not finite or not positive are no spikes and are never taken in; the caller keeps spikes
    out.

    Median and median absolute deviation in log space (Leys et al., 2013, for the use of the median absolute
    deviation in place of the standard deviation).

    Args:
        threshold: Standard deviations above the expected logarithm from which on a value is a spike.
        ratio: A spike is at least this many times the typical value.
        history: Values that level, scatter and each kind's offset are taken from.
        min_history: Values seen in all before any is judged.
        patience: After this many spikes in a row the level has changed: what was known is forgotten.

    Raises:
        ValueError: If an option is out of range; the message names it.
    """

    MIN_SCATTER = 0.02
    """Standard deviations of a logarithm under this are taken for it."""
    MIN_OF_KIND = 3
    """Values of a kind before it is judged."""
    MOST_KINDS = 256

    def __init__(
        self,
        threshold: float = 5.0,
        ratio: float = 2.0,
        history: int = 100,
        min_history: int = 20,
        patience: int = 25,
    ) -> None:
        if not threshold > 0:
            raise ValueError(f"threshold must be more than 0, got {threshold}")
        if not ratio >= 1:
            raise ValueError(f"ratio must be at least 1, got {ratio}")
        if min_history < 5:
            raise ValueError(f"min_history must be at least 5, got {min_history}")
        if history < min_history:
            raise ValueError(f"history must be at least min_history={min_history}, got {history}")
        if patience < 1:
            raise ValueError(f"patience must be at least 1, got {patience}")
        self.threshold = threshold
        self.ratio = ratio
        self.history = history
        self.min_history = min_history
        self.patience = patience
        self.in_a_row = 0
        """Spikes in a row so far."""
        self._forget()

    def judge(self, value: float, kind: str = "") -> Verdict:
        """Judge a value without taking it in."""
        if not (math.isfinite(value) and value > 0):
            return Verdict(is_spike=False, typical=None, score=None)
        offsets = self._offsets.get(kind, ())
        if len(self._adjusted) < self.min_history or len(offsets) < self.MIN_OF_KIND:
            return Verdict(is_spike=False, typical=None, score=None)
        expected = median(self._adjusted) + median(offsets)
        uncertainty = math.sqrt(1.0 + MEDIAN_SPREAD / len(offsets))
        score = (math.log(value) - expected) / (self._scatter() * uncertainty)
        typical = math.exp(expected)
        return Verdict(
            is_spike=score > self.threshold and value > self.ratio * typical, typical=typical, score=score
        )

    def take_in(self, value: float, kind: str = "") -> None:
        """Learn from a value that is no spike."""
        if math.isfinite(value) and value > 0:
            self.in_a_row = 0
            self._take_in(math.log(value), kind)

    def pass_over(self) -> bool:
        """Count a spike; say whether there were so many in a row that they are what is typical now."""
        self.in_a_row += 1
        return self.in_a_row >= self.patience

    def start_afresh(self) -> None:
        """Forget all values, to learn a new level."""
        self.in_a_row = 0
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return all values that are kept, as lists of numbers."""
        return {
            "adjusted": list(self._adjusted),
            "left": list(self._left),
            "offsets": {kind: list(values) for kind, values in self._offsets.items()},
            "in_a_row": self.in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where a state was taken."""
        self._forget()
        self._adjusted.extend(state["adjusted"])
        self._left.extend(state["left"])
        for kind, values in state["offsets"].items():
            self._offsets[kind] = deque(values, self.history)
        self.in_a_row = state["in_a_row"]

    def _forget(self) -> None:
        self._adjusted: deque[float] = deque(maxlen=self.history // 2)
        self._left: deque[float] = deque(maxlen=2 * self.history)
        self._offsets: OrderedDict[str, deque[float]] = OrderedDict()

    def _take_in(self, logarithm: float, kind: str) -> None:
        level = median(self._adjusted) if self._adjusted else logarithm
        offsets = self._offsets.setdefault(kind, deque(maxlen=self.history))
        self._offsets.move_to_end(kind)
        if len(self._offsets) > self.MOST_KINDS:
            self._offsets.popitem(last=False)
        if len(offsets) >= self.MIN_OF_KIND:
            left = logarithm - level - median(offsets)
            self._left.append(left)
            self._adjusted.append(logarithm - median(offsets))
        elif len(self._offsets) == 1:
            self._adjusted.append(logarithm)
        offsets.append(logarithm - level)

    def _scatter(self) -> float:
        if len(self._left) < 5:
            return 0.5  # little is known: a factor of twelve is a spike
        middle = median(self._left)
        return max(NORMAL * median([abs(each - middle) for each in self._left]), self.MIN_SCATTER)


def mixture(shares: Mapping[str, float]) -> str:
    """Return the kind of a window by its sources: their shares rounded to quarters.

    Args:
        shares: Tokens or sequences of each source, in any unit.

    >>> mixture({"prose": 900, "lists": 700, "rare": 20})
    'lists:2 prose:2'
    """
    whole = sum(shares.values())
    if not whole:
        return ""
    quarters = {name: round(4 * share / whole) for name, share in sorted(shares.items())}
    return " ".join(f"{name}:{count}" for name, count in quarters.items() if count)
