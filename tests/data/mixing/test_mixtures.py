"""Mixtures: their numbers by hand, and how they fare on arms whose rewards are known."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andrea_pl import Arm, Exp3, Fixed, Mixture, Observation, Proportional, Ucb1, UserError


def started(mixture: Any, count: int = 3, **options: Any) -> Any:
    mixture.start([Arm(name=f"s{number}", **options) for number in range(count)])
    return mixture


TEN_PULLS = [
    (0, 5.0),
    (1, 4.0),
    (2, 6.0),
    (0, 4.5),
    (0, 4.75),
    (1, 4.2),
    (1, 3.92),
    (2, 5.0),
    (0, 4.93),
    (1, 4.41),
]


def test_ucb1_by_hand() -> None:
    """Three arms, ten pulls, on paper.

    alpha 0.1, reward_scale 10, exploration sqrt 2. The first loss of an arm sets its average and gives 0.

    pull  arm  loss  average before  reward         average after
    1     0    5.0   none            0              5.0
    2     1    4.0   none            0              4.0
    3     2    6.0   none            0              6.0
    4     0    4.5   5.0             10 * 0.5 = 5   0.9 * 5.0  + 0.1 * 4.5  = 4.95
    5     0    4.75  4.95            10 * 0.2 = 2   0.9 * 4.95 + 0.1 * 4.75 = 4.93
    6     1    4.2   4.0             0, it rose     0.9 * 4.0  + 0.1 * 4.2  = 4.02
    7     1    3.92  4.02            10 * 0.1 = 1   0.9 * 4.02 + 0.1 * 3.92 = 4.01
    8     2    5.0   6.0             10 * 1.0 = 10  0.9 * 6.0  + 0.1 * 5.0  = 5.9
    9     0    4.93  4.93            0              4.93
    10    1    4.41  4.01            0, it rose     0.9 * 4.01 + 0.1 * 4.41 = 4.05

    N = 10, ln 10 = 2.302585; bonus = sqrt 2 * sqrt(ln N / n).

    arm  n  mean reward    sqrt(ln N / n)             bonus     score     over 6.517427
    0    4  7 / 4  = 1.75  sqrt(0.575646) = 0.758714  1.072983  2.822983  0.433144
    1    4  1 / 4  = 0.25  sqrt(0.575646) = 0.758714  1.072983  1.322983  0.202992
    2    2  10 / 2 = 5     sqrt(1.151293) = 1.072983  1.517427  6.517427  1

    Their sum is 1.636135: weights 0.264736, 0.124068, 0.611196.
    With floors of 0.3 arm 1 is raised: 0.433144 + 0.3 + 1 = 1.733144: 0.249918, 0.173096, 0.576986.
    """
    mixture = started(Ucb1(exploration=math.sqrt(2), reward_scale=10.0, alpha=0.1))
    rewards = [mixture.update(Observation(losses={arm: loss}))[arm] for arm, loss in TEN_PULLS]
    assert rewards == pytest.approx([0, 0, 0, 5, 2, 0, 1, 10, 0, 0], abs=1e-12)
    assert mixture.pulls == [4, 4, 2]
    assert mixture.progress.averages == pytest.approx({0: 4.93, 1: 4.05, 2: 5.9})
    assert mixture.scores().tolist() == pytest.approx([2.822983, 1.322983, 6.517427], abs=1e-6)
    assert mixture.weights().tolist() == pytest.approx([0.264736, 0.124068, 0.611196], abs=1e-6)
    assert mixture.best() == 2
    floored = started(Ucb1(reward_scale=10.0), min_weight=0.3)
    for arm, loss in TEN_PULLS:
        floored.update(Observation(losses={arm: loss}))
    assert floored.weights().tolist() == pytest.approx([0.249918, 0.173096, 0.576986], abs=1e-6)


def test_several_sources_of_an_update_are_pulled_at_once() -> None:
    """Two updates of all three arms are six pulls: N = 6, n = 2."""
    mixture = started(Ucb1(exploration=1.0, reward_scale=1.0))
    mixture.update(Observation(losses={0: 2.0, 1: 2.0, 2: 2.0}))
    assert mixture.update(Observation(losses={0: 1.0, 1: 2.0, 2: 3.0})) == {0: 1.0, 1: 0.0, 2: 0.0}
    bonus = math.sqrt(math.log(6) / 2)
    assert mixture.scores().tolist() == pytest.approx([0.5 + bonus, bonus, bonus])


def test_with_andreas_scale_exploration_drowns() -> None:
    """Progress of 0.05 nats in each of 100 updates: a mean reward of 50 against a bonus of 0.3."""
    mixture = started(Ucb1(reward_scale=1000.0), 2)
    for _ in range(100):
        mixture.pull(0, 50.0)
        mixture.pull(1, 0.0)
    assert mixture.weights().tolist() == pytest.approx([0.9935, 0.0065], abs=1e-4)


def test_untried_arms_come_first() -> None:
    """They share everything; the others keep their floors. Ties go to the lower index."""
    mixture = started(Ucb1(), min_weight=0.1)
    assert mixture.weights().tolist() == pytest.approx([1 / 3] * 3)
    assert mixture.best() == 0
    mixture.pull(0, 5.0)
    assert mixture.weights().tolist() == pytest.approx([0.1 / 2.1, 1 / 2.1, 1 / 2.1])
    assert mixture.best() == 1
    assert mixture.best([True, False, True]) == 2
    mixture.pull(1, 5.0)
    mixture.pull(2, 5.0)
    assert mixture.best() == 0
    assert mixture.weights([False, True, True]).tolist() == pytest.approx([0, 0.5, 0.5])


def test_the_penalty_is_a_factor_of_the_reward() -> None:
    mixture = Ucb1(reward_scale=10.0)
    mixture.start([Arm(name="prose"), Arm(name="lists", reward_factor=0.6)])
    mixture.update(Observation(losses={0: 3.0, 1: 3.0}))
    assert mixture.update(Observation(losses={0: 2.5, 1: 2.5})) == pytest.approx({0: 5.0, 1: 3.0})


def test_exp3_by_hand() -> None:
    """Two arms; losses 4 and 2 in the first update, both sure to appear.

    e(1) = min(1/2, sqrt(ln 2 / 2)) = 1/2; e(2) = sqrt(ln 2 / (2 * 2)) = sqrt(0.173287) = 0.416277.
    softmax of 1/2 * (4, 2) = 1 / (1 + exp(-1)) = 0.731059 and 0.268941.
    (1 - 2 * 0.416277) * softmax + 0.416277 = 0.167445 * softmax + 0.416277 = 0.538690 and 0.461310.
    """
    mixture = started(Exp3(), 2)
    assert mixture.update(Observation(losses={0: 4.0, 1: 2.0})) == {0: 4.0, 1: 2.0}
    assert mixture.weights().tolist() == pytest.approx([0.538690, 0.461310], abs=1e-6)
    # seen with probability a half, a reward counts twice; what was there is kept to 99 %
    mixture.update(Observation(losses={1: 3.0}, chances={1: 0.5}))
    assert mixture.estimates == pytest.approx([0.99 * 4, 0.99 * 2 + 6])


def test_exp3_of_huge_rewards() -> None:
    """An arm that may not be drawn does not overflow the others."""
    mixture = started(Exp3(reward_scale=1000.0))
    for _ in range(200):
        mixture.update(Observation(losses={0: 9.0, 1: 4.0, 2: 4.0}))
    assert mixture.weights().tolist() == pytest.approx([1.0, 0.0, 0.0], abs=0.1)
    assert mixture.weights([False, True, True]).tolist() == pytest.approx([0.0, 0.5, 0.5])


Draw = Callable[[Any, np.random.Generator], int]
ROUNDS, ARMS = 300, 5


def regret(mixture: Any, seed: int, draw: Draw) -> float:
    """Return the cumulative regret over rounds of one arm each, whose mean rewards drift."""
    world, choices = np.random.default_rng((seed, 0)), np.random.default_rng((seed, 1))
    phases, paces = world.uniform(0, 2 * np.pi, ARMS), world.uniform(0.5, 1.5, ARMS)
    levels = world.uniform(0.1, 0.9, ARMS)
    noise = world.normal(0, 0.1, ROUNDS)
    total = 0.0
    for step in range(ROUNDS):
        means = np.clip(levels + 0.15 * np.sin(phases + paces * step / ROUNDS * 2 * np.pi), 0, 1)
        arm = draw(mixture, choices)
        reward = float(np.clip(means[arm] + noise[step], 0, 1))
        if isinstance(mixture, Ucb1):
            mixture.pull(arm, reward)
        elif isinstance(mixture, Exp3):
            mixture.pull({arm: reward}, {arm: float(mixture.weights()[arm])})
        total += float(means.max() - means[arm])
    return total


@cache
def uniform_regret(seed: int) -> float:
    return regret(started(Fixed(), ARMS), seed, by_weight)


def by_weight(mixture: Any, choices: np.random.Generator) -> int:
    return int(np.searchsorted(np.cumsum(mixture.weights()), choices.random()))


@pytest.mark.system
@pytest.mark.parametrize(
    ("build", "draw"),
    [
        (lambda: Ucb1(reward_scale=1.0), by_weight),
        (lambda: Ucb1(reward_scale=1.0), lambda mixture, choices: mixture.best()),
        (Exp3, by_weight),
    ],
    ids=["ucb1 by weight", "ucb1 alone", "exp3"],
)
def test_less_regret_than_uniform(build: Callable[[], Mixture], draw: Draw) -> None:
    """In at least 95 of 100 worlds whose rewards drift."""
    wins = sum(regret(started(build(), ARMS), seed, draw) < uniform_regret(seed) for seed in range(100))
    assert wins >= 95, f"{wins} of 100"


def test_without_reward_exp3_stays_uniform_over_the_floors() -> None:
    mixture = Exp3(reward="progress")
    mixture.start([Arm(name="a"), Arm(name="b", min_weight=0.5), Arm(name="c")])
    for _ in range(500):
        mixture.pull(dict.fromkeys(range(3), 0.0), {})
        assert mixture.weights().tolist() == pytest.approx([2 / 7, 3 / 7, 2 / 7])  # 1/3, 1/2, 1/3 over 7/6


@pytest.mark.parametrize("count", [2, 3, 7])
def test_without_reward_ucb1_visits_the_arms_evenly(count: int) -> None:
    """Alone it takes turns; by weight no arm is ahead by more than chance."""
    mixture = started(Ucb1(), count)
    for _ in range(300 * count):
        mixture.pull(mixture.best(), 0.0)
        assert max(mixture.pulls) - min(mixture.pulls) <= 1
    mixture = started(Ucb1(), count)
    choices = np.random.default_rng(0)
    for _ in range(300 * count):
        mixture.pull(by_weight(mixture, choices), 0.0)
    assert min(mixture.pulls) > 270
    assert max(mixture.pulls) < 330


def test_fixed_and_proportional() -> None:
    fixed = Fixed()
    fixed.start([Arm(name="a", weight=3.0), Arm(name="b", weight=1.0), Arm(name="c", weight=0.0)])
    assert fixed.weights().tolist() == [0.75, 0.25, 0.0]
    assert fixed.weights([False, True, True]).tolist() == [0.0, 1.0, 0.0]
    sizes = [Arm(name="a", tokens=800), Arm(name="b", tokens=100), Arm(name="c", tokens=100)]
    for temperature, expected in ((1.0, [0.8, 0.1, 0.1]), (3.0, [0.5, 0.25, 0.25]), (math.inf, [1 / 3] * 3)):
        mixture = Proportional(temperature)
        mixture.start(sizes)
        assert mixture.weights().tolist() == pytest.approx(expected)
    huge = Proportional(0.001)
    huge.start(sizes)
    assert huge.weights([False, True, True]).tolist() == pytest.approx([0, 0.5, 0.5])


BUILDERS: list[Callable[[], Mixture]] = [Fixed, Proportional, Ucb1, lambda: Ucb1(reward_scale=1000.0), Exp3]


@pytest.mark.system
@given(
    build=st.sampled_from(BUILDERS),
    floors=st.lists(st.floats(0, 1), min_size=2, max_size=6),
    losses=st.lists(st.dictionaries(st.integers(0, 5), st.floats(0, 20), max_size=6), max_size=20),
    data=st.data(),
)
def test_floors_and_permissions_hold_always(
    build: Callable[[], Mixture], floors: list[float], losses: list[dict[int, float]], data: Any
) -> None:
    """Weights sum to 1; an arm that is not allowed has none; a floor is kept before weights are normalised.

    The best arm is at most 1 before, so that a weight is at least its floor over the sum of max(1, …).
    """
    mixture = build()
    mixture.start(
        [Arm(name=f"s{number}", tokens=10**number, min_weight=floor) for number, floor in enumerate(floors)]
    )
    for update in losses:
        mixture.update(Observation(losses={arm: loss for arm, loss in update.items() if arm < len(floors)}))
    allowed = data.draw(st.lists(st.booleans(), min_size=len(floors), max_size=len(floors)).filter(any))
    weights = mixture.weights(allowed)
    assert float(weights.sum()) == pytest.approx(1.0)
    assert all(weight == 0 for weight, use in zip(weights, allowed, strict=True) if not use)
    for weight, floor, use in zip(weights, floors, allowed, strict=True):
        assert not use or weight >= floor / sum(allowed) - 1e-12
    again = build()
    again.start(mixture.arms)
    again.load_state_dict(mixture.state_dict())
    assert again.weights(allowed).tolist() == weights.tolist()


def test_state_is_plain(tmp_path: Any) -> None:
    for build in BUILDERS:
        mixture = started(build())
        mixture.update(Observation(losses={0: 3.0, 2: 4.0}))
        torch.save(mixture.state_dict(), tmp_path / "state")
        assert torch.load(tmp_path / "state", weights_only=True) == mixture.state_dict()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Ucb1(exploration=-1), "Ucb1: exploration must lie from 0 on, and finite, got -1"),
        (lambda: Ucb1(reward_scale=math.inf), "Ucb1: reward_scale"),
        (lambda: Ucb1(alpha=2), "Ucb1: alpha must lie from 0 to 1, got 2"),
        (lambda: Exp3(forgetting=1.5), "Exp3: forgetting"),
        (lambda: Exp3(reward="gain"), "Exp3: reward must be 'loss' or 'progress', got 'gain'"),
        (lambda: Proportional(0), "Proportional: temperature must be more than 0, got 0"),
    ],
)
def test_refusals(build: Callable[[], Mixture], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build()


def test_nothing_to_draw() -> None:
    fixed = Fixed()
    fixed.start([Arm(name="a", weight=0.0), Arm(name="b", weight=0.0)])
    with pytest.raises(
        UserError, match=r"no source can be drawn: all weights are 0 \(a, b\); give one a weight"
    ):
        fixed.weights()
