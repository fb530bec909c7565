"""The judge of what is typical: switches of sources, rare sources, drift, and what never gets in."""

import math
import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andrea_callbacks import SpikeDetector
from andrea_callbacks.forensics.detector import Circumstances, MixtureTracker, Verdict

PROSE = Circumstances(mixture=(("prose", 4),))
LISTS = Circumstances(mixture=(("lists", 4),))


def take(detector: SpikeDetector, value: float, of: Circumstances = PROSE) -> Verdict:
    """Judge a value, and take it in unless it is a spike."""
    verdict = detector.judge(value, of)
    if verdict.is_spike:
        detector.pass_over()
    else:
        detector.take_in(value, of)
    return verdict


def values(count: int, level: float = 1.0, scatter: float = 0.1, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0, scatter)) for _ in range(count)]


def test_typical_value_is_the_median() -> None:
    detector = SpikeDetector(min_history=5)
    for value in (2.0, 1.0, 2.0, 4.0, 2.0, 2.0, 1.0, 8.0):
        detector.take_in(value)
    assert detector.judge(2.0).typical == pytest.approx(2.0)


@pytest.mark.parametrize("scatter", [0.05, 0.1, 0.2])
def test_factor_of_five_is_a_spike_and_noise_is_none(scatter: float) -> None:
    detector = SpikeDetector()
    flagged = [take(detector, value).is_spike for value in values(1000, scatter=scatter)]
    assert sum(flagged) == 0
    assert detector.judge(5.0).is_spike is False  # of no mixture that was ever seen
    verdict = detector.judge(5.0, PROSE)
    assert verdict.is_spike
    assert verdict.typical == pytest.approx(1.0, rel=0.1)


def test_nothing_is_judged_before_there_is_a_history() -> None:
    detector = SpikeDetector(min_history=20)
    for value in values(19):
        assert detector.judge(1000.0, PROSE).typical is None
        detector.take_in(value, PROSE)
    detector.take_in(1.0, PROSE)
    assert detector.judge(1000.0, PROSE).is_spike


def test_switch_of_sources_is_no_spike() -> None:
    """Lists have ten times the norm of prose; after a first sight, switches flag nothing."""
    detector, tracker, flagged = SpikeDetector(), MixtureTracker(), 0
    rng = random.Random(1)
    for phase in range(40):
        source, level = (("prose", 1.0), ("lists", 10.0))[phase % 2]
        for age in range(rng.choice((7, 14, 21))):
            forgotten = 3.0 if age == 0 else 1.5 if age < 3 else 1.0
            value = level * forgotten * math.exp(rng.gauss(0, 0.1))
            flagged += take(detector, value, tracker.follow({source: 100.0})).is_spike
    assert flagged == 0


def test_spike_within_a_rare_source_is_found() -> None:
    """Its norm is that of another source's everyday; only its own statistics tell."""
    detector = SpikeDetector()
    for number, value in enumerate(values(400)):
        of, level = (PROSE, 10.0) if number % 20 else (LISTS, 1.0)
        assert not take(detector, level * value, of).is_spike
    assert detector.judge(10.0, LISTS).is_spike
    assert not detector.judge(10.0, PROSE).is_spike


def test_level_may_drift_by_a_factor_of_a_hundred() -> None:
    detector = SpikeDetector()
    drifting = [value * 100 ** (-place / 2000) for place, value in enumerate(values(2000))]
    assert not any(take(detector, value).is_spike for value in drifting)
    assert detector.judge(0.06, PROSE).is_spike


@given(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0]), max_size=30))
def test_what_is_not_finite_never_gets_in(bad: list[float]) -> None:
    clean, dirty = SpikeDetector(), SpikeDetector()
    for place, value in enumerate(values(60)):
        take(clean, value)
        take(dirty, value)
        for each in bad[place : place + 1]:
            assert not take(dirty, each).is_spike
    assert clean.state_dict() == dirty.state_dict()


@given(st.floats(6.0, 1e30), st.integers(1, 20))
def test_spikes_do_not_raise_what_is_typical(size: float, count: int) -> None:
    detector = SpikeDetector()
    for value in values(60):
        take(detector, value)
    before = detector.judge(1.0, PROSE)
    for _ in range(count):
        assert take(detector, size).is_spike
    assert detector.judge(1.0, PROSE) == before


def test_so_many_spikes_in_a_row_are_a_new_level() -> None:
    detector = SpikeDetector(patience=4)
    for value in values(60):
        take(detector, value)
    assert [detector.pass_over() for _ in range(4)] == [False, False, False, True]
    detector.start_afresh()
    assert detector.judge(50.0, PROSE).typical is None
    assert detector.in_a_row == 0


@pytest.mark.system
@given(st.integers(0, 90), st.integers(0, 90))
def test_state_goes_on_from_any_cut(cut: int, second: int) -> None:
    """Cut once or twice, what follows is judged as without a cut."""
    straight, parts = SpikeDetector(), SpikeDetector()
    for place, value in enumerate(values(100, scatter=0.4)):
        of = (PROSE, LISTS)[place // 9 % 2]
        if place in (cut, second):
            state, parts = parts.state_dict(), SpikeDetector()
            parts.load_state_dict(state)
        assert take(straight, value, of) == take(parts, value, of)


def test_shift_is_the_distance_from_what_came_before() -> None:
    tracker = MixtureTracker(memory=0.25)
    assert tracker.follow({"a": 3.0, "b": 1.0}) == Circumstances(mixture=(("a", 3), ("b", 1)), shift=0.0)
    # from shares (3/4, 1/4) to (0, 1): half of 3/4 + 3/4
    assert tracker.follow({"b": 5.0}) == Circumstances(mixture=(("b", 4),), shift=0.75)
    # the mean has moved a quarter of the way, to (9/16, 7/16)
    assert tracker.follow({"b": 5.0}).shift == pytest.approx(9 / 16)
    assert tracker.follow({}) == Circumstances()


def test_scatter_is_the_median_absolute_deviation() -> None:
    detector = SpikeDetector(history=1000, min_history=5, threshold=3.0, ratio=1.0)
    drawn = values(900, scatter=0.2)
    for value in drawn:
        detector.take_in(value)
    logarithms = [math.log(value) for value in drawn]
    middle = median(logarithms)
    expected = 1.4826 * median([abs(each - middle) for each in logarithms])
    verdict = detector.judge(math.exp(middle + 1.0))
    assert verdict.score is not None
    assert 1.0 / verdict.score == pytest.approx(expected, rel=0.2)  # level and offset scatter too


def test_a_harsh_neighbour_hides_little() -> None:
    """The mixture one quarter away has four times the norm: that much may be rounding, and no more."""
    detector = SpikeDetector()
    near = Circumstances(mixture=(("lists", 1), ("prose", 3)))
    for number, value in enumerate(values(200, scatter=0.05)):
        detector.take_in(value * (4.0 if number % 4 == 3 else 1.0), near if number % 4 == 3 else PROSE)
    assert detector.judge(8.0, PROSE).is_spike
    assert not detector.judge(2.5, PROSE).is_spike


def test_one_wild_value_among_the_first_does_not_blind() -> None:
    detector = SpikeDetector()
    for number, value in enumerate(values(30)):
        detector.take_in(value * (30.0 if number == 7 else 1.0), PROSE)
    assert detector.judge(6.0, PROSE).is_spike
