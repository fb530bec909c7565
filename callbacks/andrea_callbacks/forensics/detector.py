"""Tells spikes of a positive figure, such as the gradient's norm, from typical values, robustly.

log x of an update = level + offset of its mixture + excess after a shift + scatter

level    median over the last settled updates; follows the training
offset   median over the mixture's own updates: sources differ, and a switch between them is no spike
excess   median over updates equally soon after a switch: what the model forgot makes the first ones large
scatter  median absolute deviation of what is left, for updates as soon after a switch
"""

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from andrea_callbacks.numerics.bounds import require_at_least

NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

NORMAL_TAIL = 1.645
"""Distance from the median to the 95th percentile of a normal distribution, in standard deviations."""

MOST_TAIL = 3.0
"""Upper bound of a tail, as a multiple of what the median absolute deviation implies."""

MEDIAN_SPREAD = math.pi / 2
"""Variance of a median over that of a mean, of normal values."""

SHIFTS = (0.3, 0.5)
"""Smallest shifts of the second and third class of updates: unsettled, and just switched."""


Mixture = tuple[tuple[str, int], ...]
"""Sources in alphabetical order, with shares rounded to quarters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """The composition of an update, as far as it affects what is typical."""

    mixture: "Mixture" = ()
    """The sources and their shares."""
    shift: float = 0.0
    """Distance of the shares from those of the last updates, from 0 to 1 (total variation)."""

    @property
    def age(self) -> int:
        """0 for a settled mixture, 1 for an unsettled one, 2 for one that was just switched to."""
        return sum(self.shift >= least for least in SHIFTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A detector's verdict on a value."""

    is_spike: bool
    typical: float | None
    """The expected value, None if too little is known to say."""
    score: float | None
    """Distance from the expected value in log space, in standard deviations."""


SETTLED = Circumstances()
UNKNOWN = Verdict(is_spike=False, typical=None, score=None)


class SpikeDetector:
    """Judges values against what it has learnt as typical.

    Values that are not finite or not positive are never spikes and are never learnt. The caller must not
    have it learn spikes.

    The statistics are medians and median absolute deviations of logarithms, since both resist outliers (Leys
    et al., 2013).

    Args:
        threshold: Standard deviations above the expected logarithm that make a value a spike.
        ratio: Least ratio of a spike to the typical value.
        history: Values that each mixture's offset covers. The scatter covers half as many, and the level a
            sixth, so that it follows the training.
        min_history: Total number of values before any is judged.
        patience: Consecutive spikes after which the level has changed, and everything is learnt again.

    Raises:
        ValueError: If an option is out of range; the message names it.
    """

    MIN_SCATTER = 0.02
    """Lower bound of the standard deviation of a logarithm."""
    LITTLE_KNOWN = 0.5
    """Standard deviation assumed with fewer than five values."""
    MIN_OF_MIXTURE = 3
    """Values of a mixture before it is judged."""
    NEIGHBOURHOOD = 1.0
    """Largest distance, in quarters, of mixtures whose values stand in for those of a rare mixture."""
    MOST_MIXTURES = 256

    def __init__(
        self,
        threshold: float = 4.0,
        ratio: float = 2.0,
        history: int = 100,
        min_history: int = 20,
        patience: int = 25,
    ) -> None:
        if not threshold > 0:
            raise ValueError(f"threshold must be more than 0, got {threshold}")
        require_at_least(1, "", ratio=ratio, patience=patience)
        require_at_least(5, "", min_history=min_history)
        if history < min_history:
            raise ValueError(f"history must be at least min_history={min_history}, got {history}")
        self.threshold = threshold
        self.ratio = ratio
        self.history = history
        self.min_history = min_history
        self.patience = patience
        self.start_afresh()

    def judge(self, value: float, of: Circumstances = SETTLED) -> Verdict:
        """Judge a value without learning from it."""
        offsets = self._known_offsets(of.mixture)
        if not _can_be_judged(value) or self._taken < self.min_history:
            return UNKNOWN
        if not self._levels or len(offsets) < self.MIN_OF_MIXTURE:
            return UNKNOWN
        left = self._left[of.age]
        expected = median(self._levels) + median(offsets) + self._excess(of.age)
        known = 1 / len(offsets) + 1 / len(self._levels) + (1 / max(len(left), 1) if of.age else 0.0)
        spread = self._scatter(of.age) * math.sqrt(1 + MEDIAN_SPREAD * known)
        spread = math.hypot(spread, self._lost_by_rounding(of.mixture, median(offsets)))
        score = (math.log(value) - expected) / spread
        typical = math.exp(expected)
        is_spike = score > self.threshold and value > self.ratio * typical
        return Verdict(is_spike=is_spike, typical=typical, score=score)

    def take_in(self, value: float, of: Circumstances = SETTLED) -> None:
        """Learn from a value that is not a spike."""
        if not _can_be_judged(value):
            return
        self.in_a_row = 0
        self._taken = min(self._taken + 1, self.min_history)
        logarithm = math.log(value)
        offsets = self._known_offsets(of.mixture)
        level = median(self._levels) if self._levels else logarithm
        is_known = len(offsets) >= self.MIN_OF_MIXTURE
        if is_known:
            self._left[of.age].append(logarithm - level - median(offsets))
        if not of.age and (is_known or len(self._offsets) <= 1):
            self._levels.append(logarithm - (median(offsets) if is_known else 0.0))
        self._offsets.setdefault(of.mixture, deque(maxlen=self.history)).append(
            logarithm - level - self._excess(of.age)
        )
        self._offsets.move_to_end(of.mixture)
        if len(self._offsets) > self.MOST_MIXTURES:
            self._offsets.popitem(last=False)

    def pass_over(self) -> bool:
        """Count a spike; return whether so many came in a row that the level has changed."""
        self.in_a_row += 1
        return self.in_a_row >= self.patience

    def start_afresh(self) -> None:
        """Forget all values, to learn a new level."""
        self.in_a_row = 0
        self._taken = 0
        self._levels: deque[float] = deque(maxlen=max(self.history // 6, 5))
        self._left: list[deque[float]] = [deque(maxlen=self.history // 2) for _ in range(len(SHIFTS) + 1)]
        self._offsets: OrderedDict[Mixture, deque[float]] = OrderedDict()

    def state_dict(self) -> dict[str, Any]:
        """Return all values that are kept, as lists of numbers."""
        return {
            "levels": list(self._levels),
            "left": [list(each) for each in self._left],
            "offsets": [
                {"mixture": [list(each) for each in mixture], "values": list(values)}
                for mixture, values in self._offsets.items()
            ],
            "in_a_row": self.in_a_row,
            "taken": self._taken,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.start_afresh()
        self._levels.extend(state["levels"])
        for kept, values in zip(self._left, state["left"], strict=True):
            kept.extend(values)
        for each in state["offsets"]:
            mixture = tuple((str(name), int(count)) for name, count in each["mixture"])
            self._offsets[mixture] = deque(each["values"], self.history)
        self.in_a_row, self._taken = state["in_a_row"], state["taken"]

    def _known_offsets(self, mixture: Mixture) -> Sequence[float]:
        """Return the offsets of a mixture, with those of its neighbours where it has few of its own."""
        own = self._offsets.get(mixture, ())
        if len(own) >= self.MIN_OF_MIXTURE:
            return own
        return [
            value
            for other, values in self._offsets.items()
            if _distance(mixture, other) <= self.NEIGHBOURHOOD
            for value in values
        ]

    def _lost_by_rounding(self, mixture: Mixture, offset: float) -> float:
        """Return the deviation of an offset that may lie anywhere within half a quarter (uniformly).

        Its size is that of the step to the mixture one quarter away with the largest offset.
        """
        gaps = [
            median(values) - offset
            for other, values in self._offsets.items()
            if len(values) >= self.MIN_OF_MIXTURE and 0 < _distance(mixture, other) <= 1
        ]
        return max([0.0, *gaps]) / math.sqrt(12)

    def _excess(self, age: int) -> float:
        return median(self._left[age]) if age and self._left[age] else 0.0

    def _scatter(self, age: int) -> float:
        left = self._left[age]
        if len(left) < 5:
            return self.LITTLE_KNOWN
        middle = median(left)
        spread = NORMAL * median([abs(each - middle) for each in left])
        tail = (sorted(left)[-1 - len(left) // 20] - middle) / NORMAL_TAIL
        return max(spread, min(tail, MOST_TAIL * spread), self.MIN_SCATTER)


class MixtureTracker:
    """Describes each update's composition, and how far it is from that of the last updates.

    Args:
        memory: Weight of the newest update in the running mean of shares.
    """

    def __init__(self, memory: float = 0.25) -> None:
        self.memory = memory
        self.mean: dict[str, float] = {}
        """Shares of the sources in the last updates."""

    def follow(self, amounts: Mapping[str, float]) -> Circumstances:
        """Take the sources of the next update.

        Args:
            amounts: Tokens or sequences of each source, in any unit; empty if sources are unknown.
        """
        whole = sum(amounts.values())
        shares = {name: amount / whole for name, amount in amounts.items() if amount} if whole else {}
        if not shares:
            return SETTLED
        names = shares.keys() | self.mean.keys()
        before = self.mean or shares
        shift = sum(abs(shares.get(name, 0.0) - before.get(name, 0.0)) for name in names) / 2
        self.mean = {
            name: before.get(name, 0.0) + self.memory * (shares.get(name, 0.0) - before.get(name, 0.0))
            for name in sorted(names)
        }
        return Circumstances(mixture=mixture_of(shares), shift=shift)


def mixture_of(amounts: Mapping[str, float]) -> Mixture:
    """Return the mixture of sources with shares rounded to quarters.

    Args:
        amounts: Tokens or sequences of each source, in any unit.

    >>> mixture_of({"prose": 900, "lists": 700, "rare": 20})
    (('lists', 2), ('prose', 2))
    """
    whole = sum(amounts.values())
    quarters = [(name, round(4 * amount / whole)) for name, amount in sorted(amounts.items()) if whole]
    return tuple((name, count) for name, count in quarters if count)


def _distance(one: Mixture, two: Mixture) -> float:
    """Return the distance between two mixtures in quarters."""
    first, second = dict(one), dict(two)
    return sum(abs(first.get(name, 0) - second.get(name, 0)) for name in first.keys() | second.keys()) / 2


def _can_be_judged(value: float) -> bool:
    return math.isfinite(value) and value > 0
