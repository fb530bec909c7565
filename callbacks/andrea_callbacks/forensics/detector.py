"""A robust judge of a positive figure such as the gradient's norm: what is typical, and what is a spike.

log x of an update = level + offset of its mixture + excess after a shift + scatter

level    median over the last settled updates; follows the training
offset   median over the mixture's own updates: sources differ, and a switch between them is no spike
excess   median over updates that came as soon after a switch: what was forgotten makes the first ones large
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
"""A tail counts as at most so many times what the median absolute deviation says."""

MEDIAN_SPREAD = math.pi / 2
"""Variance of a median over that of a mean, of normal values."""

SHIFTS = (0.3, 0.5)
"""Shifts from which on an update belongs to the second and the third class: unsettled, and just switched."""


Mixture = tuple[tuple[str, int], ...]
"""Sources in the order of their names, with their shares rounded to quarters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What an update was made of, as far as it bears on what is typical."""

    mixture: "Mixture" = ()
    """Which sources, in which shares."""
    shift: float = 0.0
    """How far the shares are from those of the updates just before, from 0 to 1 (total variation)."""

    @property
    def age(self) -> int:
        """0 for a settled mixture, 1 for an unsettled one, 2 for one that was just switched to."""
        return sum(self.shift >= least for least in SHIFTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a detector thinks of a value."""

    is_spike: bool
    typical: float | None
    """What was to be expected, None where too little is known of the circumstances to say."""
    score: float | None
    """Distance from it in log space, in standard deviations."""


SETTLED = Circumstances()
UNKNOWN = Verdict(is_spike=False, typical=None, score=None)


class SpikeDetector:
    """Judges values; what it is told to take in becomes what is typical.

    Values that are not finite or not positive are no spikes and are never taken in; the caller keeps spikes
    out.

    Medians and median absolute deviations of logarithms, since both withstand what has slipped in (Leys et
    al., 2013).

    Args:
        threshold: Standard deviations above the expected logarithm from which on a value is a spike.
        ratio: A spike is at least this many times the typical value.
        history: Values that each mixture's offset is taken from; scatter takes half as many, and the level a
            sixth, so that it follows the training.
        min_history: Values seen in all before any is judged.
        patience: After this many spikes in a row the level has changed: what was known is forgotten.

    Raises:
        ValueError: If an option is out of range; the message names it.
    """

    MIN_SCATTER = 0.02
    """Standard deviations of a logarithm under this are taken for it."""
    LITTLE_KNOWN = 0.5
    """Standard deviation where there are fewer than five values of an age to tell it from."""
    MIN_OF_MIXTURE = 3
    """Values of a mixture before it is judged."""
    NEIGHBOURHOOD = 1.0
    """Quarters that may lie between a mixture and those that speak for it where it is rare."""
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
        """Judge a value without taking it in."""
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
        """Learn from a value that is no spike."""
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
        """Count a spike; say whether there were so many in a row that they are what is typical now."""
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
        """Go on from where a state was taken."""
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
    """Tells what each update was made of, and how far that is from the updates just before.

    Args:
        memory: Weight of the newest update in the running mean of shares.
    """

    def __init__(self, memory: float = 0.25) -> None:
        self.memory = memory
        self.mean: dict[str, float] = {}
        """Shares of the sources in the updates just before."""

    def follow(self, amounts: Mapping[str, float]) -> Circumstances:
        """Take the sources of the next update.

        Args:
            amounts: Tokens or sequences of each source, in any unit; empty where sources are not known.
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
    """Return a mixture by its sources' shares, rounded to quarters.

    Args:
        amounts: Tokens or sequences of each source, in any unit.

    >>> mixture_of({"prose": 900, "lists": 700, "rare": 20})
    (('lists', 2), ('prose', 2))
    """
    whole = sum(amounts.values())
    quarters = [(name, round(4 * amount / whole)) for name, amount in sorted(amounts.items()) if whole]
    return tuple((name, count) for name, count in quarters if count)


def _distance(one: Mixture, two: Mixture) -> float:
    """Return how many quarters lie between two mixtures."""
    first, second = dict(one), dict(two)
    return sum(abs(first.get(name, 0) - second.get(name, 0)) for name in first.keys() | second.keys()) / 2


def _can_be_judged(value: float) -> bool:
    return math.isfinite(value) and value > 0
