"""The state of planning windows, and how sequences are drawn for them."""

import math
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from andrea_pl.data.mixing.mixtures import Weights

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The training sequences of one source."""

    name: str
    first: int
    """Index of its first sequence in the whole dataset; the others follow."""
    count: int
    tokens: int
    """Label tokens of all its sequences."""
    weight: float = 1.0
    min_weight: float = 0.0
    max_epochs: float = math.inf
    repetition: float = 0.0

    @property
    def supply(self) -> float:
        """Number of sequences that may be drawn in a run."""
        if math.isinf(self.max_epochs):
            return math.inf
        return math.floor(self.max_epochs * self.count + 1e-9)  # 0.29 of 100 are 29


@dataclass(slots=True, kw_only=True)
class Plan:
    """The state of planning. Windows, which are updates, count from 0."""

    window: int = 0
    """The next window."""
    phase: int = 0
    """Phases begun."""
    phase_start: int = 0
    phase_end: int = 0
    weights: list[float]
    """The phase's weights by source; 0 for an exhausted source."""
    known: dict[str, Any] = field(default_factory=dict[str, Any])
    """State of the mixture that determined the phase."""
    drawn: list[int]
    """Number of sequences drawn so far, by source; it determines the source's epoch and position."""

    def copy(self) -> "Plan":
        """Return an independent copy."""
        return Plan(**self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, lists copied."""
        names = ("window", "phase", "phase_start", "phase_end", "weights", "known", "drawn")
        return {name: deepcopy(getattr(self, name)) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The record of a delivered window."""

    window: int
    phase: int
    phase_start: int
    phase_length: int
    weights: tuple[float, ...]
    epochs: tuple[float, ...]
    """Passes over each source so far, including this window."""


class Feedback(Protocol):
    """A sampler's link to training; see `andrea_pl.data.mixing.feedback`."""

    def next_update(self) -> int:
        """Return the number of the update that the next window will be."""
        ...

    def finalize(self) -> None:
        """Make the module report a pending loss."""
        ...


class SourceOrders:
    """The order of the sequences of each source, in each of the source's own epochs.

    Args:
        pools: The sources.
        seed: Seed of the orders.
    """

    def __init__(self, pools: Sequence[Pool], seed: int) -> None:
        self.pools = pools
        self.seed = seed
        self._orders: OrderedDict[tuple[int, int], Numbers] = OrderedDict()

    def take(self, source: int, drawn: int, count: int) -> Numbers:
        """Return the next sequences of a source, over as many of its epochs as it takes."""
        pool = self.pools[source]
        parts: list[Numbers] = []
        while count:
            epoch, place = divmod(drawn, pool.count)
            part = self._order(source, epoch)[place : place + count]
            parts.append(pool.first + part)
            drawn += len(part)
            count -= len(part)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _order(self, source: int, epoch: int) -> Numbers:
        """Return the order of one epoch of a source."""
        key = (source, epoch)
        if key not in self._orders:
            name = zlib.crc32(self.pools[source].name.encode())
            order = generator(self.seed, "order", name, epoch).permutation(self.pools[source].count)
            self._orders[key] = order.astype(np.int64, copy=False)
            while len(self._orders) > 2 * len(self.pools):
                self._orders.popitem(last=False)
        self._orders.move_to_end(key)
        return self._orders[key]


def generator(seed: int, purpose: Literal["phase", "draw", "order"], *counters: int) -> np.random.Generator:
    """Return a generator made from a seed, its purpose, and counters."""
    return np.random.default_rng((seed, zlib.crc32(purpose.encode()), *counters))


def spread(chances: Weights, count: int, start: float) -> list[int]:
    """Return how many of `count` draws each source gets, by systematic sampling (Madow and Madow, 1944).

    Every source gets its expected number, rounded up or down, and on average exactly that number.

    Args:
        chances: (K,) probabilities that sum to 1.
        count: Number of draws.
        start: Uniform in [0, 1).
    """
    bounds = np.floor(np.cumsum(chances) / chances.sum() * count + start).clip(max=count).astype(np.int64)
    last = int(np.flatnonzero(chances)[-1])
    bounds[last:] = count
    return cast("list[int]", np.diff(bounds, prepend=0).tolist())
