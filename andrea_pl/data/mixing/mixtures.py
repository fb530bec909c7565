"""Mixtures: the weight of each source in a phase.

losses of an update, by source ──> update() ──> the mixture's state ──> weights() ──> the next phase

Pure code: no torch, no files, no clock. `curriculum.py` decides when to ask for weights, and from which
state.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from andrea_pl.deprecation import old_options
from andrea_pl.errors import UserError

Weights = NDArray[np.float64]


@old_options(floor="min_weight")
@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A source as a mixture sees it."""

    name: str
    tokens: int = 1
    """Label tokens of its training text."""
    weight: float = 1.0
    """The user's weight; used by `Fixed`."""
    min_weight: float = 0.0
    """Least weight before weights are normalised."""
    reward_factor: float = 1.0
    """Factor on its rewards; below 1 if its text repeats itself."""

    @property
    def floor(self) -> float:
        """The old name of `min_weight`, for users' mixtures."""
        return self.min_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An update's losses by arm."""

    losses: Mapping[int, float]
    """Token mean, in nats, of every source in the update."""
    chances: Mapping[int, float] = field(default_factory=dict[int, float])
    """Probability that the source would appear; by default 1."""


class Mixture:
    """The base class of mixtures, also of your own.

    A subclass defines `weights`. One that learns also sets `learns`, and defines `update`, `state_dict` and
    `load_state_dict`.
    """

    learns = False
    """Whether weights depend on losses."""
    uses_weights = True
    """Whether the mixture uses the `weight` of a source."""
    arms: tuple[Arm, ...] = ()

    def start(self, arms: Sequence[Arm]) -> None:
        """Start over with these sources."""
        self.arms = tuple(arms)

    def weights(self, allowed: Sequence[bool] | None = None) -> Weights:
        """Return (K,) weights of at least 0; the caller normalises them.

        Args:
            allowed: Which arms may be drawn; the others get 0. By default all.
        """
        raise NotImplementedError(f"{type(self).__name__} must define weights(allowed)")

    def update(self, observation: Observation) -> dict[int, float]:
        """Learn from an update; return the reward of every arm that has one."""
        del observation
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the learnt state, in numbers, strings and lists."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a learnt state."""
        del state

    def _normalise(self, tentative: Sequence[float] | Weights, allowed: Sequence[bool] | None) -> Weights:
        """Raise weights to their least values, then normalise them."""
        least = [arm.min_weight for arm in self.arms]
        weights = np.maximum(np.asarray(tentative, dtype=np.float64), least)
        weights *= self._mask(allowed)
        total = float(weights.sum())
        if not total > 0:
            names = ", ".join(
                arm.name for arm, use in zip(self.arms, self._mask(allowed), strict=True) if use
            )
            raise UserError(
                f"no source can be drawn: all weights are 0 ({names or 'none'}); give one a weight or "
                "a min_weight"
            )
        return weights / total

    def _mask(self, allowed: Sequence[bool] | None) -> NDArray[np.bool_]:
        return (
            np.ones(len(self.arms), dtype=np.bool_) if allowed is None else np.array(allowed, dtype=np.bool_)
        )


class Fixed(Mixture):
    """The sources' given weights, in every phase."""

    def weights(self, allowed: Sequence[bool] | None = None) -> Weights:
        """Return the given weights, normalised over the arms that may be drawn."""
        given = np.array([arm.weight for arm in self.arms]) * self._mask(allowed)
        return self._normalise(given / (given.sum() or 1.0), allowed)


class Proportional(Mixture):
    """Weights by size: tokens to the power of 1 / temperature (Devlin, 2018; Arivazhagan et al., 2019).

    Args:
        temperature: 1 gives weights by size, inf equal weights.

    Raises:
        UserError: If `temperature` is not more than 0.
    """

    uses_weights = False

    def __init__(self, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise UserError(f"Proportional: temperature must be more than 0, got {temperature}")
        self.temperature = temperature

    def weights(self, allowed: Sequence[bool] | None = None) -> Weights:
        """Return the weights by size."""
        mask = self._mask(allowed)
        logs = np.log([max(arm.tokens, 1) for arm in self.arms]) / self.temperature
        logs = np.where(mask, logs, -math.inf)
        sizes: Weights = np.exp(logs - logs.max()) if mask.any() else np.zeros(len(self.arms))
        return self._normalise(sizes / (float(sizes.sum()) or 1.0), allowed)


class Progress:
    """How far a loss is below its exponential moving average, by arm.

    Args:
        alpha: Weight of the newest loss in the average.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.averages: dict[int, float] = {}

    def __call__(self, arm: int, loss: float) -> float:
        """Return max(0, average - loss), and add the loss to the average. The first loss only sets it."""
        before = self.averages.setdefault(arm, loss)
        self.averages[arm] = (1 - self.alpha) * before + self.alpha * loss
        return max(0.0, before - loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the arms that have an average, and their averages."""
        return {"arms": list(self.averages), "averages": list(self.averages.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.averages = dict(zip(state["arms"], state["averages"], strict=True))


class Ucb1(Mixture):
    """UCB1 (Auer, Cesa-Bianchi and Fischer, 2002) with its scores used as weights, as in ANDREA.

    A pull of an arm is an update that contains its source. The reward is `reward_scale` times the distance of
    the source's loss below its moving average; the first loss only sets that average. With n pulls of the arm
    and N of all arms, the score is mean reward + `exploration` * sqrt(ln N / n). The weight is the score over
    the largest score, at least the source's `min_weight`, normalised. Arms that were never pulled come first:
    they share all weight, except for the others' `min_weight`.

    Args:
        exploration: Weight of uncertainty; sqrt 2 in UCB1.
        reward_scale: Factor on progress in nats. The 1000 of ANDREA v1 suppresses exploration: mean rewards
            are then tens, while the second term is tenths.
        alpha: Weight of the newest loss in the moving average.

    Raises:
        UserError: If a value is out of range.
    """

    learns = True
    uses_weights = False

    def __init__(
        self, exploration: float = math.sqrt(2), reward_scale: float = 10.0, alpha: float = 0.1
    ) -> None:
        _check_range("Ucb1", exploration=(exploration, 0, math.inf), reward_scale=(reward_scale, 0, math.inf))
        _check_range("Ucb1", alpha=(alpha, 0, 1))
        self.exploration = exploration
        self.reward_scale = reward_scale
        self.alpha = alpha
        self.progress = Progress(alpha)
        self.pulls: list[int] = []
        self.reward_sums: list[float] = []

    def start(self, arms: Sequence[Arm]) -> None:
        """Start over with these sources."""
        super().start(arms)
        self.progress.averages.clear()
        self.pulls = [0] * len(self.arms)
        self.reward_sums = [0.0] * len(self.arms)

    def pull(self, arm: int, reward: float) -> None:
        """Count a pull and its reward."""
        self.pulls[arm] += 1
        self.reward_sums[arm] += reward

    def update(self, observation: Observation) -> dict[int, float]:
        """Pull every arm whose source appeared."""
        rewards: dict[int, float] = {}
        for arm, loss in sorted(observation.losses.items()):
            rewards[arm] = self.reward_scale * self.arms[arm].reward_factor * self.progress(arm, loss)
            self.pull(arm, rewards[arm])
        return rewards

    def scores(self) -> Weights:
        """Return (K,) upper confidence bounds, inf for an arm that was never pulled."""
        total = math.log(max(sum(self.pulls), 1))
        return np.array(
            [
                reward_sum / pulls + self.exploration * math.sqrt(total / pulls) if pulls else math.inf
                for pulls, reward_sum in zip(self.pulls, self.reward_sums, strict=True)
            ]
        )

    def best(self, allowed: Sequence[bool] | None = None) -> int:
        """Return the arm that plain UCB1 would pull: the highest score, then the lowest index."""
        return int(np.argmax(np.where(self._mask(allowed), self.scores(), -math.inf)))

    def weights(self, allowed: Sequence[bool] | None = None) -> Weights:
        """Return scores over the largest, raised to their least weights, normalised."""
        scores = np.where(self._mask(allowed), self.scores(), 0.0)
        largest = float(scores.max(initial=0.0))
        if math.isinf(largest):
            tentative = np.isinf(scores).astype(np.float64)
        else:
            tentative = scores / largest if largest > 0 else np.ones(len(self.arms))
        return self._normalise(tentative, allowed)

    def state_dict(self) -> dict[str, Any]:
        """Return averages, pulls and rewards."""
        own = {"pulls": list(self.pulls), "reward_sums": list(self.reward_sums)}
        return {**own, "progress": self.progress.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.progress.load_state_dict(state["progress"])
        self.pulls, self.reward_sums = list(state["pulls"]), list(state["reward_sums"])


class Exp3(Mixture):
    """Exp3 (Auer et al., 2002) as in online data mixing (Albalak et al., 2023).

    With K arms, before the t-th update, e(t) = min(1/K, sqrt(ln K / (K t))) and R the rewards so far:
    weight = (1 - K e(t)) * softmax(e(t - 1) R) + e(t). The reward in online data mixing is the loss itself;
    `progress` is the distance of the loss below its moving average, as for `Ucb1`.

    Two things differ from the paper, since an update here contains many sources. A reward is divided by the
    probability that its source would appear in the update, which is usually 1, and not by its weight. And R
    is a decaying sum, not an average, so that it keeps its influence as e(t) falls.

    Args:
        reward: The reward of an arm: `loss` or `progress`.
        reward_scale: Factor on rewards.
        forgetting: Factor on R at every update; 1 is the sum of Exp3.
        alpha: Weight of the newest loss in the moving average of `progress`.

    Raises:
        UserError: If a value is out of range.
    """

    learns = True
    uses_weights = False

    def __init__(
        self,
        reward: Literal["loss", "progress"] = "loss",
        reward_scale: float = 1.0,
        forgetting: float = 0.99,
        alpha: float = 0.1,
    ) -> None:
        if reward not in ("loss", "progress"):
            raise UserError(f"Exp3: reward must be 'loss' or 'progress', got {reward!r}")
        _check_range("Exp3", reward_scale=(reward_scale, 0, math.inf), forgetting=(forgetting, 0, 1))
        _check_range("Exp3", alpha=(alpha, 0, 1))
        self.reward = reward
        self.reward_scale = reward_scale
        self.forgetting = forgetting
        self.alpha = alpha
        self.progress = Progress(alpha)
        self.updates = 0
        self.estimates: list[float] = []

    def start(self, arms: Sequence[Arm]) -> None:
        """Start over with these sources."""
        super().start(arms)
        self.progress.averages.clear()
        self.updates = 0
        self.estimates = [0.0] * len(self.arms)

    def pull(self, rewards: Mapping[int, float], chances: Mapping[int, float]) -> None:
        """Add the rewards of one update, each divided by its probability of being observed."""
        self.updates += 1
        self.estimates = [
            self.forgetting * estimate + rewards.get(arm, 0.0) / chances.get(arm, 1.0)
            for arm, estimate in enumerate(self.estimates)
        ]

    def update(self, observation: Observation) -> dict[int, float]:
        """Reward every arm whose source appeared."""
        rewards: dict[int, float] = {}
        for arm, loss in sorted(observation.losses.items()):
            progress = self.progress(arm, loss)
            gain = loss if self.reward == "loss" else progress
            rewards[arm] = self.reward_scale * self.arms[arm].reward_factor * gain
        self.pull(rewards, observation.chances)
        return rewards

    def weights(self, allowed: Sequence[bool] | None = None) -> Weights:
        """Return the mixture of softmax and exploration, over the arms that may be drawn."""
        mask = self._mask(allowed)
        count = int(mask.sum())
        if not count:
            return self._normalise(np.zeros(len(self.arms)), allowed)
        rate, explored = (
            min(1 / count, math.sqrt(math.log(count) / (count * update)))
            for update in (max(self.updates, 1), self.updates + 1)
        )
        logits = np.where(mask, rate * np.array(self.estimates), -math.inf)
        softmax = np.exp(logits - logits.max())
        return self._normalise(((1 - count * explored) * softmax / softmax.sum() + explored) * mask, allowed)

    def state_dict(self) -> dict[str, Any]:
        """Return averages, updates and estimates."""
        own = {"updates": self.updates, "estimates": list(self.estimates)}
        return {**own, "progress": self.progress.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.progress.load_state_dict(state["progress"])
        self.updates, self.estimates = state["updates"], list(state["estimates"])


def _check_range(owner: str, **options: tuple[float, float, float]) -> None:
    for name, (value, low, high) in options.items():
        if not (low <= value <= high and math.isfinite(value)):
            most = f"to {high:g}" if math.isfinite(high) else "on, and finite"
            raise UserError(f"{owner}: {name} must lie from {low:g} {most}, got {value}")


def plain_options(mixture: Mixture) -> dict[str, Any]:
    """Return the options of a mixture, before its start, that are plain values."""

    def plain(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return all(plain(each) for each in cast("list[Any]", value))
        if isinstance(value, dict):
            return all(plain(each) for each in cast("dict[Any, Any]", value).values())
        return value is None or isinstance(value, int | float | str | bool)

    return {name: deepcopy(value) for name, value in vars(mixture).items() if plain(value)}


def refuse_unfinished(mixture: Mixture) -> None:
    """Raise `UserError` if a user's mixture lacks a required method."""
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
