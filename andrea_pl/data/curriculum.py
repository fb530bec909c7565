"""The curriculum: which sequences of which sources make update k, decided phase by phase.

losses by source of update k ──> observe ──> mixture ──> its state after every update, kept for `reward_lag`
                                                              │ at a phase's start
plan <── cursors of the sources <── draws by weight <── weights of the phase
  └──> keys for the workers, ahead of training ──> deliver, when a window is handed over

Everything random comes from generators made anew from the seed and a counter, so that the counters are all of
their state. What is planned ahead and not delivered is forgotten by a checkpoint, and planned again.
"""

import math
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from andrea_callbacks.clip_norm import HARD
from andrea_pl.data.mixtures import Arm, Fixed, Mixture, Observation, Weights
from andrea_pl.errors import UserError

Numbers = NDArray[np.int64]

PHASES = (7, 14, 21, 28, 42)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """How sources are mixed, and when that changes.

    Args:
        mixture: `Fixed`, `Proportional`, `Ucb1`, `Exp3`, or a class of your own. `Fixed` when left out.
        share_of: What a weight is a share of: the `sequences` of an update, or its label `tokens`.
        phases: Lengths of phases, in updates; each is drawn at random. Weights move at a phase's start alone.
        warmup_updates: Updates at the start that take `warmup_sources` alone.
        warmup_sources: Names of the sources of the warm-up.
        reward_lag: A phase is decided from the losses of updates up to so many before it starts, whatever
            reads ahead. 0 is for no workers.
        hard_clip: An update whose gradient was clipped to less than this share of its norm teaches the
            mixture nothing; 0 lets all teach.
        repetition_penalty: The rewards of a source are multiplied by (1 - r) to this power, r being the share
            of its text that repeats itself, as measured when it was prepared; 0 for no penalty.
        updates_per_epoch: Updates in an epoch; as many as it takes for all sequences once when left out.

    Raises:
        UserError: If a value is out of range.
    """

    mixture: Mixture | None = None
    share_of: Literal["sequences", "tokens"] = "sequences"
    phases: list[int] = field(default_factory=lambda: list(PHASES))
    warmup_updates: int = 0
    warmup_sources: list[str] = field(default_factory=list[str])
    reward_lag: int = 7
    hard_clip: float = HARD
    repetition_penalty: float = 1.0
    updates_per_epoch: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.share_of not in ("sequences", "tokens"):
            raise UserError(f"data.curriculum.share_of must be sequences or tokens, got {self.share_of!r}")
        if not self.phases or any(length < 1 or length != int(length) for length in self.phases):
            raise UserError(
                f"data.curriculum.phases must be whole lengths of at least 1 update, got {self.phases}"
            )
        counts = {"warmup_updates": self.warmup_updates, "reward_lag": self.reward_lag}
        for name, value in counts.items():
            if value < 0:
                raise UserError(f"data.curriculum.{name} must be at least 0, got {value}")
        if self.updates_per_epoch is not None and self.updates_per_epoch < 1:
            raise UserError(
                f"data.curriculum.updates_per_epoch must be at least 1, got {self.updates_per_epoch}"
            )
        if not 0 <= self.hard_clip <= 1:
            raise UserError(f"data.curriculum.hard_clip must lie from 0 to 1, got {self.hard_clip}")
        if not (self.repetition_penalty >= 0 and math.isfinite(self.repetition_penalty)):
            raise UserError(
                f"data.curriculum.repetition_penalty must be at least 0, got {self.repetition_penalty}"
            )
        if bool(self.warmup_updates) != bool(self.warmup_sources):
            raise UserError(
                "data.curriculum.warmup_updates and data.curriculum.warmup_sources go together: give a "
                f"number of updates and names of sources, or neither; got {self.warmup_updates} and "
                f"{self.warmup_sources}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The training sequences of one source."""

    name: str
    first: int
    """Number of its first sequence in the whole data set; the others follow."""
    count: int
    tokens: int
    """Label tokens of all its sequences."""
    weight: float = 1.0
    floor: float = 0.0
    max_epochs: float = math.inf
    repetition: float = 0.0

    @property
    def supply(self) -> float:
        """Sequences that may be drawn in a run."""
        if math.isinf(self.max_epochs):
            return math.inf
        return math.floor(self.max_epochs * self.count + 1e-9)  # 0.29 of 100 are 29


@dataclass(slots=True, kw_only=True)
class Plan:
    """Where planning stands. Counts of windows, which are updates, from 0."""

    window: int = 0
    """The next window."""
    phase: int = 0
    """Phases begun."""
    phase_start: int = 0
    phase_end: int = 0
    weights: list[float]
    """Of the phase, by source; 0 for one that ran out within it."""
    known: dict[str, Any] = field(default_factory=dict[str, Any])
    """State of the mixture that the phase was decided from."""
    drawn: list[int]
    """Sequences drawn so far, by source: the source's epoch and the place in it follow from it."""

    def copy(self) -> "Plan":
        """Return a plan that goes its own way."""
        return Plan(**self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, lists copied."""
        names = ("window", "phase", "phase_start", "phase_end", "weights", "known", "drawn")
        return {name: deepcopy(getattr(self, name)) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What is known of a window that was handed over."""

    window: int
    phase: int
    phase_start: int
    phase_length: int
    weights: tuple[float, ...]
    epochs: tuple[float, ...]
    """How often each source was gone through, this window included."""


class CurriculumSampler:
    """Draws the sequences of each update by weight, each source without replacement within its own epochs.

    Args:
        pools: The sources. One without a sequence is never drawn.
        curriculum: What decides their weights; its mixture is copied.
        sequences_per_update: Sequences in a window.
        seed: Decides everything random.
        repeat: Whether every epoch repeats the first, as `overfit_batches` asks; nothing is learnt then.
        next_update: Tells the number of the update that the next window will be; counts windows when left
            out.
        settle: Called where a loss is needed that is still on its way.

    Raises:
        UserError: If names or weights do not fit together.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        curriculum: Curriculum,
        sequences_per_update: int,
        seed: int = 0,
        repeat: bool = False,
        next_update: Callable[[], int] | None = None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        self.pools = tuple(pools)
        self.curriculum = curriculum
        self.sequences_per_update = sequences_per_update
        self.seed = seed
        self.repeat = repeat
        self.mixture = deepcopy(curriculum.mixture) or Fixed()
        self._options = plain_options(self.mixture)
        _refuse_unfinished(self.mixture)
        self.rewards: dict[int, float] = {}
        """The last reward of each source that got one."""
        self._next_update = next_update or (lambda: self._delivered.window)
        self._settle = settle
        self._warmup = self._warmup_mask()
        penalty = curriculum.repetition_penalty
        self.mixture.start(
            [
                Arm(
                    name=pool.name,
                    tokens=pool.tokens,
                    weight=pool.weight,
                    floor=pool.floor,
                    reward_factor=(1 - pool.repetition) ** penalty,
                )
                for pool in self.pools
            ]
        )
        self._delivered = Plan(weights=[0.0] * len(pools), drawn=[0] * len(pools))
        self._plan = self._delivered.copy()
        self._ahead: deque[Plan] = deque()
        self._observed = 0
        self._states: OrderedDict[int, dict[str, Any]] = OrderedDict({0: deepcopy(self.mixture.state_dict())})
        self._deliveries: OrderedDict[int, Delivery] = OrderedDict()
        self._orders: OrderedDict[tuple[int, int], Numbers] = OrderedDict()
        self._scratch = deepcopy(self.mixture)
        self._weigh(self._allowed(self._plan), self._plan)  # what cannot work is found now

    @property
    def windows_per_epoch(self) -> int:
        """Number of windows in an epoch, as declared."""
        declared = self.curriculum.updates_per_epoch
        return declared or -(-sum(pool.count for pool in self.pools) // self.sequences_per_update)

    @property
    def learns(self) -> bool:
        """Whether the windows depend on losses."""
        return self.mixture.learns and not self.repeat and sum(pool.count > 0 for pool in self.pools) > 1

    def plan(self, epoch: int, start: int, stop: int) -> Iterator[Numbers]:
        """Yield the sequences of windows `start` to `stop` of an epoch, from where delivery stands.

        A window is planned when it is asked for. Planned windows that were never delivered are planned again.
        """
        del epoch
        self._ahead.clear()
        self._plan = self._delivered.copy()
        if self.repeat and not start:
            self._plan = Plan(weights=[0.0] * len(self.pools), drawn=[0] * len(self.pools))
        for _ in range(start, stop):
            numbers = self._next()
            self._ahead.append(self._plan.copy())
            yield numbers

    def deliver(self) -> None:
        """Count the next planned window as handed over to training."""
        self._delivered = plan = self._ahead.popleft()
        self._deliveries[self._next_update()] = Delivery(
            window=plan.window - 1,
            phase=plan.phase,
            phase_start=plan.phase_start,
            phase_length=plan.phase_end - plan.phase_start,
            weights=tuple(plan.weights),
            epochs=tuple(
                drawn / pool.count if pool.count else 0.0
                for drawn, pool in zip(plan.drawn, self.pools, strict=True)
            ),
        )
        while len(self._deliveries) > 4:  # an outcome may be known one update late
            self._deliveries.popitem(last=False)
        while len(self._states) > 1 and next(iter(self._states)) < plan.window - self.curriculum.reward_lag:
            self._states.popitem(last=False)

    def delivery(self, update: int) -> Delivery | None:
        """Return what is known of the window that was update `update`; of late ones alone."""
        return self._deliveries.get(update)

    def observe(self, update: int, losses: Mapping[int, float], teaches: bool = True) -> None:
        """Take in what became of an update.

        Args:
            update: Its number, as `next_update` gave it when the window was delivered.
            losses: Token mean of every source that appeared, in nats.
            teaches: False where the mixture is to learn nothing from it.
        """
        self.rewards = {}
        delivery = self._deliveries.get(update)
        if delivery is None or not self.learns:
            return
        if delivery.window < self._observed:
            raise RuntimeError(f"update {update} was reported after a phase had been decided without it")
        for passed in range(self._observed, delivery.window):  # windows that became no update
            self._states[passed + 1] = deepcopy(self.mixture.state_dict())
        finite = {arm: loss for arm, loss in losses.items() if math.isfinite(loss)}
        if teaches and finite:
            odds = self._chances(np.array(delivery.weights)) * self.sequences_per_update
            chances = {arm: min(1.0, float(odds[arm])) or 1.0 for arm in finite}
            self.rewards = self.mixture.update(Observation(losses=finite, chances=chances))
        self._observed = delivery.window + 1
        self._states[self._observed] = deepcopy(self.mixture.state_dict())

    def settings(self) -> dict[str, Any]:
        """Return what the windows depend on, besides losses and the lengths of the sequences."""
        learnt = self.mixture.state_dict()
        options = {f"mixture.{key}": value for key, value in self._options.items() if key not in learnt}
        sources = {
            f"{pool.name}.{key}": str(value) if key == "max_epochs" else value
            for pool in self.pools
            for key in ("count", "weight", "floor", "max_epochs", "repetition")
            for value in [getattr(pool, key)]
        }
        names = ("share_of", "phases", "warmup_updates", "warmup_sources", "reward_lag", "hard_clip")
        return {
            "mixture": type(self.mixture).__qualname__,
            **options,
            **sources,
            **{name: getattr(self.curriculum, name) for name in (*names, "repetition_penalty")},
            "sequences_per_update": self.sequences_per_update,
            "seed": self.seed,
            "repeat": self.repeat,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return where delivery stands, and what the mixture knew after each of the last updates."""
        return {
            "plan": self._delivered.to_dict(),
            "observed": self._observed,
            "mixture": deepcopy(self.mixture.state_dict()),
            "windows": list(self._states),
            "states": deepcopy(list(self._states.values())),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where a state was taken."""
        self._delivered = Plan(**deepcopy(state["plan"]))
        self._plan = self._delivered.copy()
        self._ahead.clear()
        self._deliveries.clear()
        self._observed = state["observed"]
        self.mixture.load_state_dict(deepcopy(state["mixture"]))
        self._states = OrderedDict(zip(state["windows"], deepcopy(state["states"]), strict=True))

    def _next(self) -> Numbers:
        """Plan one window."""
        plan = self._plan
        if plan.window == plan.phase_end:
            self._start_phase(plan)
        plan.weights = self._still_possible(plan).tolist()
        random = self._generator("draw", plan.window)
        missing = self.sequences_per_update
        chosen: list[Numbers] = []
        while missing:
            weights = self._still_possible(plan)
            counts = spread(self._chances(weights), missing, float(random.random()))
            for source, count in enumerate(counts):
                count = int(min(count, self.pools[source].supply - plan.drawn[source]))
                chosen.append(self._take(source, plan.drawn[source], count))
                plan.drawn[source] += count
                missing -= count
        plan.window += 1
        return np.concatenate(chosen)

    def _start_phase(self, plan: Plan) -> None:
        """Decide weights and length of the phase that starts with the plan's next window."""
        plan.phase += 1
        plan.phase_start = plan.window
        length = int(self._generator("phase", plan.phase).choice(self.curriculum.phases))
        warmup = self.curriculum.warmup_updates
        if plan.window < warmup:
            length = min(length, warmup - plan.window)
        plan.phase_end = plan.window + length
        plan.known = self._knowledge(plan.window)
        plan.weights = self._weigh(self._allowed(plan), plan).tolist()

    def _knowledge(self, window: int) -> dict[str, Any]:
        """Return what the mixture knew `reward_lag` updates before a window."""
        if not self.learns:
            return {}
        wanted = max(0, window - self.curriculum.reward_lag)
        if wanted > self._observed and self._settle is not None:
            self._settle()
        if wanted > 1 and not self._observed:
            raise UserError(
                f"the mixture {type(self.mixture).__name__} has heard of none of {window} updates; give the "
                "datamodule to Trainer.fit (datamodule=…) and not its loader alone"
            )
        # a window that became no update left nothing to know
        return deepcopy(self._states[min(wanted, self._observed)])

    def _still_possible(self, plan: Plan) -> Weights:
        """Return the phase's weights without the sources that ran out within it; the others share theirs."""
        allowed = self._allowed(plan)
        weights = np.array(plan.weights)
        if not weights[~np.array(allowed)].any():
            return weights
        weights *= allowed
        return weights / weights.sum() if weights.any() else self._weigh(allowed, plan)

    def _weigh(self, allowed: list[bool], plan: Plan) -> Weights:
        """Return weights of the sources that may be drawn, by what was known when the phase started."""
        if not any(allowed):
            is_warmup = plan.window < self.curriculum.warmup_updates
            which = "every source of the warm-up" if is_warmup else "every source"
            raise UserError(
                f"update {plan.window + 1}: {which} has reached its max_epochs; raise it, leave it out for "
                "one source, or end the run before"
            )
        if plan.known:
            self._scratch.load_state_dict(deepcopy(plan.known))
        weights = np.asarray(self._scratch.weights(allowed), dtype=np.float64)
        name = type(self.mixture).__name__
        if weights.shape != (len(self.pools),) or not np.isfinite(weights).all() or (weights < 0).any():
            raise UserError(
                f"{name}.weights gave {weights.tolist()}; it must give {len(self.pools)} numbers of at least "
                "0, one a source"
            )
        if not weights.any() or weights[~np.array(allowed)].any():
            raise UserError(
                f"{name}.weights gave {weights.tolist()} where {allowed} may be drawn; give these something "
                "and the others 0"
            )
        return weights / weights.sum()

    def _allowed(self, plan: Plan) -> list[bool]:
        """Return which sources may be drawn for the plan's next window."""
        is_warmup = plan.window < self.curriculum.warmup_updates
        return [
            bool(pool.count) and drawn < pool.supply and (member or not is_warmup)
            for pool, drawn, member in zip(self.pools, plan.drawn, self._warmup, strict=True)
        ]

    def _chances(self, weights: Weights) -> Weights:
        """Return (K,) how likely a sequence is of each source, for weights that are shares as declared."""
        if self.curriculum.share_of == "tokens":
            weights = weights / [pool.tokens / pool.count if pool.count else 1.0 for pool in self.pools]
        return weights / weights.sum()

    def _take(self, source: int, drawn: int, count: int) -> Numbers:
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
            order = self._generator("order", name, epoch).permutation(self.pools[source].count)
            self._orders[key] = order.astype(np.int64, copy=False)
            while len(self._orders) > 2 * len(self.pools):
                self._orders.popitem(last=False)
        self._orders.move_to_end(key)
        return self._orders[key]

    def _generator(self, purpose: Literal["phase", "draw", "order"], *counters: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, zlib.crc32(purpose.encode()), *counters))

    def _warmup_mask(self) -> list[bool]:
        names = [pool.name for pool in self.pools if pool.count]
        for name in self.curriculum.warmup_sources:
            if name not in names:
                raise UserError(
                    f"data.curriculum.warmup_sources names {name!r}, and the sources with training text are "
                    f"{', '.join(names)}"
                )
        return [pool.name in self.curriculum.warmup_sources for pool in self.pools]


def spread(chances: Weights, count: int, start: float) -> list[int]:
    """Return how many of `count` draws fall to each source, by systematic sampling (Madow and Madow, 1944).

    Every source gets its expected number, rounded up or down, and the expected number on average.

    Args:
        chances: (K,) probabilities that sum to 1.
        count: Draws.
        start: Uniform in [0, 1).
    """
    bounds = np.floor(np.cumsum(chances) / chances.sum() * count + start).clip(max=count).astype(np.int64)
    last = int(np.flatnonzero(chances)[-1])
    bounds[last:] = count
    return cast("list[int]", np.diff(bounds, prepend=0).tolist())


def plain_options(mixture: Mixture) -> dict[str, Any]:
    """Return the options of a mixture that was not started yet, as far as they are plain values."""

    def plain(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return all(plain(each) for each in cast("list[Any]", value))
        if isinstance(value, dict):
            return all(plain(each) for each in cast("dict[Any, Any]", value).values())
        return value is None or isinstance(value, int | float | str | bool)

    return {name: deepcopy(value) for name, value in vars(mixture).items() if plain(value)}


def _refuse_unfinished(mixture: Mixture) -> None:
    kind = type(mixture)
    if kind.update is not Mixture.update and not mixture.learns:
        raise UserError(
            f"the mixture {kind.__name__} defines update, which is called where learns is True alone: set it"
        )
    needed = ["weights", *(("update", "state_dict", "load_state_dict") if mixture.learns else ())]
    lacking = [name for name in needed if getattr(kind, name) is getattr(Mixture, name)]
    if lacking:
        raise UserError(
            f"the mixture {kind.__name__} must define {', '.join(lacking)}, as every one that "
            f"{'learns' if mixture.learns else 'is drawn from'} does"
        )
