"""The curriculum decides, phase by phase, which sequences of which sources make update k.

losses by source of update k ──> observe ──> mixture ──> its state after each update, kept for `reward_lag`
                                                              │ at a phase's start
plan <── cursors of the sources <── draws by weight <── weights of the phase
  └──> keys for the workers, ahead of training ──> deliver, when a window is handed to training

All random generators are made from the seed and a counter, so that the counters are their whole state. A
checkpoint does not hold windows that were planned but not delivered; they are planned again.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from andrea_callbacks.hooks.measuring import HARD_CLIP
from andrea_pl.data.mixing.mixtures import (
    Arm,
    Fixed,
    Mixture,
    Observation,
    Weights,
    plain_options,
    refuse_unfinished,
)
from andrea_pl.data.mixing.plan import (
    Delivery,
    Feedback,
    Numbers,
    Plan,
    Pool,
    SourceOrders,
    generator,
    spread,
)
from andrea_pl.deprecation import old_options
from andrea_pl.errors import UserError

PHASES = (7, 14, 21, 28, 42)

STATE_NAMES = {"weight_unit": "share_of", "min_clip_coefficient": "hard_clip", "min_weight": "floor"}
"""Names of renamed options in checkpoints; a resume compares the windows' settings by these."""


@old_options(share_of="weight_unit", hard_clip="min_clip_coefficient")
@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """How to mix sources, and when the weights change.

    Args:
        mixture: `Fixed` (the default), `Proportional`, `Ucb1`, `Exp3`, or your own class.
        weight_unit: What weights are shares of: the `sequences` of an update, or its label `tokens`.
        phases: Lengths of phases in updates. Each phase draws one at random. Weights change only when a phase
            starts.
        warmup_updates: Number of updates at the start that use only `warmup_sources`.
        warmup_sources: Names of the sources of the warm-up.
        reward_lag: Number of updates before a phase whose losses do not affect it, so that results do not
            depend on reading ahead. 0 requires num_workers=0.
        min_clip_coefficient: The mixture does not learn from an update whose clip coefficient is below this;
            0 learns from all updates.
        repetition_penalty: Exponent p: the rewards of a source are multiplied by (1 - r)^p, where r is the
            share of its text that repeats itself; 0 for no penalty.
        updates_per_epoch: Number of updates in an epoch; by default enough for every sequence once.

    Raises:
        UserError: If a value is out of range.
    """

    mixture: Mixture | None = None
    weight_unit: Literal["sequences", "tokens"] = "sequences"
    phases: list[int] = field(default_factory=lambda: list(PHASES))
    warmup_updates: int = 0
    warmup_sources: list[str] = field(default_factory=list[str])
    reward_lag: int = 7
    min_clip_coefficient: float = HARD_CLIP
    repetition_penalty: float = 1.0
    updates_per_epoch: int | None = None

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if self.weight_unit not in ("sequences", "tokens"):
            raise UserError(f"`weight_unit` must be sequences or tokens, got {self.weight_unit!r}")
        if not self.phases or any(length < 1 or length != int(length) for length in self.phases):
            raise UserError(f"`phases` must be whole lengths of at least 1 update, got {self.phases}")
        counts = {"warmup_updates": self.warmup_updates, "reward_lag": self.reward_lag}
        for name, value in counts.items():
            if value < 0:
                raise UserError(f"`{name}` must be at least 0, got {value}")
        if self.updates_per_epoch is not None and self.updates_per_epoch < 1:
            raise UserError(f"`updates_per_epoch` must be at least 1, got {self.updates_per_epoch}")
        if not 0 <= self.min_clip_coefficient <= 1:
            raise UserError(f"`min_clip_coefficient` must lie from 0 to 1, got {self.min_clip_coefficient}")
        if not (self.repetition_penalty >= 0 and math.isfinite(self.repetition_penalty)):
            raise UserError(f"`repetition_penalty` must be at least 0, got {self.repetition_penalty}")
        if bool(self.warmup_updates) != bool(self.warmup_sources):
            raise UserError(
                "`warmup_updates` and `warmup_sources` go together: give a "
                f"number of updates and names of sources, or neither; got {self.warmup_updates} and "
                f"{self.warmup_sources}"
            )

    @property
    def hyperparameters(self) -> dict[str, int | float | str | bool]:
        """The mixture and the options that affect its learning, for TensorBoard."""
        names = ("weight_unit", "warmup_updates", "reward_lag", "min_clip_coefficient", "repetition_penalty")
        mixture = type(Fixed() if self.mixture is None else self.mixture).__name__
        return {"mixture": mixture} | {f"curriculum.{name}": getattr(self, name) for name in names}


class CurriculumSampler:
    """Draws the sequences of each update by weight, each source without replacement within its own epochs.

    Args:
        pools: The sources. A source without sequences is never drawn.
        curriculum: Determines the weights; its mixture is copied.
        sequences_per_update: Number of sequences in a window.
        seed: Seed of everything random.
        repeat: Whether every epoch repeats the first, as for `overfit_batches`; then nothing is learnt.
        feedback: Knows the next window's update, and makes the module report pending losses. By default
            windows are counted.

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
        feedback: Feedback | None = None,
    ) -> None:
        self.pools = tuple(pools)
        self.curriculum = curriculum
        self.sequences_per_update = sequences_per_update
        self.seed = seed
        self.repeat = repeat
        self.mixture = deepcopy(curriculum.mixture) or Fixed()
        self._options = plain_options(self.mixture)
        refuse_unfinished(self.mixture)
        self.rewards: dict[int, float] = {}
        """The last reward of each source that has one."""
        self._feedback = feedback
        self._warmup = self._warmup_mask()
        penalty = curriculum.repetition_penalty
        self.mixture.start(
            [
                Arm(
                    name=pool.name,
                    tokens=pool.tokens,
                    weight=pool.weight,
                    min_weight=pool.min_weight,
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
        self._orders = SourceOrders(self.pools, seed)
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
        """Yield the sequences of windows `start` to `stop` of an epoch, after the delivered windows.

        A window is planned when it is requested. Planned windows that were not delivered are planned again.
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
        """Record that the next planned window is handed to training."""
        self._delivered = plan = self._ahead.popleft()
        update = plan.window if self._feedback is None else self._feedback.next_update()
        self._deliveries[update] = Delivery(
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
        """Return the record of the window that was update `update`, if it is recent, else None."""
        return self._deliveries.get(update)

    def observe(self, update: int, losses: Mapping[int, float], teaches: bool = True) -> None:
        """Observe the losses of an update.

        Args:
            update: The update's number, as `feedback` gave it when the window was delivered.
            losses: Token mean of every source in the update, in nats.
            teaches: Whether the mixture may learn from the update.
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
        """Return the settings that the windows depend on, besides losses and the sequences' lengths."""
        learnt = self.mixture.state_dict()
        options = {f"mixture.{key}": value for key, value in self._options.items() if key not in learnt}
        sources = {
            f"{pool.name}.{STATE_NAMES.get(key, key)}": str(value) if key == "max_epochs" else value
            for pool in self.pools
            for key in ("count", "weight", "min_weight", "max_epochs", "repetition")
            for value in [getattr(pool, key)]
        }
        names = ("weight_unit", "phases", "warmup_updates", "warmup_sources", "reward_lag")
        names += ("min_clip_coefficient", "repetition_penalty")
        return {
            "mixture": type(self.mixture).__qualname__,
            **options,
            **sources,
            **{STATE_NAMES.get(name, name): getattr(self.curriculum, name) for name in names},
            "sequences_per_update": self.sequences_per_update,
            "seed": self.seed,
            "repeat": self.repeat,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of delivery, and the mixture's state after each of the last updates."""
        return {
            "plan": self._delivered.to_dict(),
            "observed": self._observed,
            "mixture": deepcopy(self.mixture.state_dict()),
            "windows": list(self._states),
            "states": deepcopy(list(self._states.values())),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
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
        random = generator(self.seed, "draw", plan.window)
        missing = self.sequences_per_update
        chosen: list[Numbers] = []
        while missing:
            weights = self._still_possible(plan)
            counts = spread(self._chances(weights), missing, float(random.random()))
            for source, count in enumerate(counts):
                count = int(min(count, self.pools[source].supply - plan.drawn[source]))
                chosen.append(self._orders.take(source, plan.drawn[source], count))
                plan.drawn[source] += count
                missing -= count
        plan.window += 1
        return np.concatenate(chosen)

    def _start_phase(self, plan: Plan) -> None:
        """Decide weights and length of the phase that starts with the plan's next window."""
        plan.phase += 1
        plan.phase_start = plan.window
        length = int(generator(self.seed, "phase", plan.phase).choice(self.curriculum.phases))
        warmup = self.curriculum.warmup_updates
        if plan.window < warmup:
            length = min(length, warmup - plan.window)
        plan.phase_end = plan.window + length
        plan.known = self._knowledge(plan.window)
        plan.weights = self._weigh(self._allowed(plan), plan).tolist()

    def _knowledge(self, window: int) -> dict[str, Any]:
        """Return the mixture's state `reward_lag` updates before a window."""
        if not self.learns:
            return {}
        wanted = max(0, window - self.curriculum.reward_lag)
        if wanted > self._observed and self._feedback is not None:
            self._feedback.finalize()
        if wanted > 1 and not self._observed:
            raise UserError(
                f"the mixture {type(self.mixture).__name__} has heard of none of {window} updates; give the "
                "datamodule to Trainer.fit (datamodule=…) and not its loader alone"
            )
        # a window that became no update left nothing to know
        return deepcopy(self._states[min(wanted, self._observed)])

    def _still_possible(self, plan: Plan) -> Weights:
        """Return the phase's weights without exhausted sources, whose weight goes to the others."""
        allowed = self._allowed(plan)
        weights = np.array(plan.weights)
        if not weights[~np.array(allowed)].any():
            return weights
        weights *= allowed
        return weights / weights.sum() if weights.any() else self._weigh(allowed, plan)

    def _weigh(self, allowed: list[bool], plan: Plan) -> Weights:
        """Return weights of the sources that may be drawn, from the mixture's state for this phase."""
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
        """Return (K,) probabilities that a sequence comes from each source, for weights in `weight_unit`."""
        if self.curriculum.weight_unit == "tokens":
            weights = weights / [pool.tokens / pool.count if pool.count else 1.0 for pool in self.pools]
        return weights / weights.sum()

    def _warmup_mask(self) -> list[bool]:
        names = [pool.name for pool in self.pools if pool.count]
        for name in self.curriculum.warmup_sources:
            if name not in names:
                raise UserError(
                    f"`warmup_sources` names {name!r}, and the sources with training text are "
                    f"{', '.join(names)}"
                )
        return [pool.name in self.curriculum.warmup_sources for pool in self.pools]
