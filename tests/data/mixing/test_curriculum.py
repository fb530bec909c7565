"""The curriculum: windows by seed and rewards alone, weights that come true, nothing lost or doubled."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from andrea_pl import (
    Curriculum,
    DynamicPaddingCollator,
    Exp3,
    Fixed,
    Mixture,
    Proportional,
    TextDataModule,
    TextSource,
    TokenizedDataset,
    Ucb1,
    UserError,
    Window,
)
from andrea_pl.data.mixing.curriculum import CurriculumSampler
from andrea_pl.data.mixing.plan import Pool, spread
from andrea_pl.data.windows.loaders import TextWindowLoader, WindowReader
from tests.support.toy import build_trainer

SIZES = {"prose": 90, "lists": 50, "answers": 200}
WINDOWS = 500
PER_EPOCH = 120
SEQUENCES = 6


def lengths_of(source: int, count: int) -> np.ndarray:
    return np.random.default_rng(source).integers(1, (20, 12, 5)[source], count)


def data_set() -> tuple[torch.utils.data.ConcatDataset[Any], np.ndarray, list[Pool]]:
    """Return three sources of documents of one sequence each."""
    parts, pools, first = [], [], 0
    for source, (name, count) in enumerate(SIZES.items()):
        lengths = lengths_of(source, count)
        documents = [list(range(length + 1)) for length in lengths]
        parts.append(TokenizedDataset(documents, 32, source, np.arange(first, first + count)))
        pools.append(Pool(name=name, first=first, count=count, tokens=int(lengths.sum())))
        first += count
    return torch.utils.data.ConcatDataset(parts), np.concatenate([part.lengths for part in parts]), pools


def build_loader(
    curriculum: Curriculum | None = None,
    workers: int = 0,
    prefetch: int = 2,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 3,
) -> TextWindowLoader:
    dataset, lengths, pools = data_set()
    curriculum = curriculum or Curriculum(mixture=Ucb1(), updates_per_epoch=PER_EPOCH)
    sampler = CurriculumSampler(pools, curriculum, SEQUENCES, seed)
    reader = WindowReader(dataset, lengths, DynamicPaddingCollator(0), 64, rank=rank, world_size=world_size)
    return TextWindowLoader(reader, sampler, workers, prefetch_factor=prefetch)


def documents(window: Window) -> list[int]:
    return [document for batch in window for document in batch["document_id"].tolist() if document >= 0]


def recorded_loss(update: int, source: int) -> float:
    """The recording: what source lost at an update; it falls, in bursts that differ by source."""
    return 5.0 - 0.004 * update + math.sin(update / (7.0 + 3 * source)) * (0.2 + 0.2 * source)


def run(
    loader: TextWindowLoader, count: int, first: int = 1, keep: dict[int, Any] | None = None
) -> list[list[int]]:
    """Take windows, reporting the recorded losses as training would; keep states where there is a key."""
    seen: list[list[int]] = []
    update = first
    while len(seen) < count:
        for window in loader:
            seen.append(documents(window))
            losses = {source: recorded_loss(update, source) for source in range(3)}
            loader.window_sampler.observe(update, losses)
            if keep is not None and update in keep:
                keep[update] = loader.state_dict()
            update += 1
            if len(seen) == count:
                break
    return seen


@pytest.fixture(scope="module")
def straight() -> list[list[int]]:
    return run(build_loader(), WINDOWS)


class TestDeterminism:
    """With rewards replayed from a recording, the windows are a function of the seed."""

    @pytest.mark.system
    @pytest.mark.parametrize(("workers", "prefetch"), [(1, 2), (2, 1), (2, 3)])
    def test_workers_and_prefetch(self, straight: list[list[int]], workers: int, prefetch: int) -> None:
        assert run(build_loader(workers=workers, prefetch=prefetch), WINDOWS) == straight

    @pytest.mark.system
    @pytest.mark.guarantee("windows follow from the seed")
    def test_rewards_and_seed_matter(self, straight: list[list[int]]) -> None:
        assert run(build_loader(seed=4), WINDOWS) != straight
        loader = build_loader()
        seen = []
        for window in (window for _ in range(5) for window in loader):
            seen.append(documents(window))
            loader.window_sampler.observe(len(seen), dict.fromkeys(range(3), 5.0))
        assert seen[:WINDOWS] != straight

    @pytest.mark.system
    def test_the_recording_moves_weights(self, straight: list[list[int]]) -> None:
        loader = build_loader()
        run(loader, WINDOWS)
        plan = loader.window_sampler.state_dict()["plan"]
        assert plan["phase"] > 15
        assert max(plan["weights"]) - min(plan["weights"]) > 0.02

    @pytest.mark.system
    def test_two_ranks(self, straight: list[list[int]]) -> None:
        """Each rank in a process of its own: the same decisions, disjoint shares, together the window."""
        script = "import tests.data.mixing.test_curriculum as t; print(t.share_of_rank(1))"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        other = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env={**environment, "PYTHONHASHSEED": "5"},
        )
        assert other.returncode == 0, other.stderr
        shares = [json.loads(share_of_rank(0)), json.loads(other.stdout)]
        for first, second, whole in zip(*shares, straight, strict=True):
            assert not set(first) & set(second)
            assert sorted(first + second) == sorted(whole)

    @pytest.mark.system
    @pytest.mark.parametrize("workers", [0, 2])
    def test_resume_at_ten_windows(self, straight: list[list[int]], workers: int, tmp_path: Path) -> None:
        """Within a phase, at its start and at an epoch's end; and a resume of a resume."""
        cuts = sorted({PER_EPOCH, *np.random.default_rng(0).integers(1, WINDOWS - 60, 9).tolist()})
        assert len(cuts) == 10
        states: dict[int, Any] = dict.fromkeys(cuts)
        assert run(build_loader(workers=workers), WINDOWS, keep=states) == straight
        inside = 0
        for cut in cuts if not workers else cuts[::4]:  # processes take seconds to start
            resumed = build_loader(workers=workers)
            resumed.load_state_dict(self.through_a_file(states[cut], tmp_path))
            plan = resumed.window_sampler.state_dict()["plan"]
            inside += plan["phase_start"] < plan["window"] < plan["phase_end"]
            assert run(resumed, 25, first=cut + 1) == straight[cut : cut + 25]
            again = build_loader(workers=workers)
            again.load_state_dict(self.through_a_file(resumed.state_dict(), tmp_path))
            assert run(again, 35, first=cut + 26) == straight[cut + 25 : cut + 60]
        assert inside >= (2 if workers else 5), "most cuts are within a phase"

    def test_without_the_state_it_differs(self, straight: list[list[int]], tmp_path: Path) -> None:
        loader = build_loader()
        run(loader, 100)
        state = self.through_a_file(loader.state_dict(), tmp_path)
        fresh = build_loader()
        state["sampler"] = fresh.window_sampler.state_dict()
        fresh.load_state_dict(state)
        assert run(fresh, 20, first=101) != straight[100:120]

    @staticmethod
    def through_a_file(state: dict[str, Any], folder: Path) -> dict[str, Any]:
        torch.save(state, folder / "state.pt")
        return torch.load(folder / "state.pt", weights_only=True)

    @pytest.mark.system
    def test_a_limit_forgets_what_was_read_ahead(self) -> None:
        """Where the trainer takes 50 windows of an epoch of 120, workers change nothing."""
        runs = []
        for workers in (0, 2):
            loader = build_loader(workers=workers)
            loader.limit = 50
            seen = []
            update = 0
            for _ in range(3):
                windows = iter(loader)
                for _ in range(50):
                    seen.append(documents(next(windows)))
                    update += 1
                    loader.window_sampler.observe(update, {0: recorded_loss(update, 0)})
            runs.append(seen)
        assert runs[0] == runs[1]


def share_of_rank(rank: int) -> str:
    """Return the documents of a rank's windows, as JSON; run in a process of its own."""
    return json.dumps(run(build_loader(rank=rank, world_size=2), WINDOWS))


class TestWeights:
    """Weights come true, in sequences and in tokens."""

    @staticmethod
    def draw(
        curriculum: Curriculum, pools: list[Pool], windows: int, sequences: int = 16
    ) -> tuple[Any, list[Any]]:
        sampler = CurriculumSampler(pools, curriculum, sequences)
        drawn, weights = [], []
        for numbers in sampler.plan(0, 0, windows):
            sampler.deliver()
            drawn.append(numbers)
            sampler.observe(len(drawn), {})
            weights.append(sampler.delivery(len(drawn)).weights)
        return drawn, weights

    @pytest.mark.parametrize("share_of", ["sequences", "tokens"])
    def test_shares_of_fixed_weights(self, share_of: Any) -> None:
        """Over 2,000 windows within 3 standard errors of the weight."""
        _, lengths, pools = data_set()
        given_weights = {"prose": 0.5, "lists": 0.2, "answers": 0.3}
        pools = [replace(pool, weight=given_weights[pool.name]) for pool in pools]
        drawn, weights = self.draw(Curriculum(weight_unit=share_of), pools, 2000)
        assert set(weights) == {(0.5, 0.2, 0.3)}
        starts = [pool.first for pool in pools]
        sources = [np.searchsorted(starts, numbers, side="right") - 1 for numbers in drawn]
        measure = [np.ones(len(each)) if share_of == "sequences" else lengths[each] for each in drawn]
        for source, weight in enumerate((0.5, 0.2, 0.3)):
            of_source = np.array(
                [size[each == source].sum() for size, each in zip(measure, sources, strict=True)]
            )
            whole = np.array([size.sum() for size in measure])
            share = of_source.sum() / whole.sum()
            # of a ratio of sums, to first order (Cochran, 1977)
            error = np.std(of_source - share * whole, ddof=1) / whole.mean() / math.sqrt(len(whole))
            multinomial = math.sqrt(weight * (1 - weight) / whole.sum())
            assert abs(share - weight) < 3 * max(error, 1e-9), f"{share} for {weight}, standard error {error}"
            if share_of == "sequences":
                assert error < multinomial, "systematic draws scatter less than independent ones"

    @pytest.mark.system
    @pytest.mark.parametrize("share_of", ["sequences", "tokens"])
    @pytest.mark.parametrize(
        "mixture", [Ucb1(), Exp3(), Proportional(2.0)], ids=["ucb1", "exp3", "proportional"]
    )
    def test_shares_of_moving_weights(self, share_of: Any, mixture: Mixture) -> None:
        """What was drawn is what the weights of the windows add up to."""
        _, lengths, pools = data_set()
        sampler = CurriculumSampler(pools, Curriculum(mixture=mixture, weight_unit=share_of), 16, seed=1)
        starts = [pool.first for pool in pools]
        rests = []
        for update, numbers in enumerate(sampler.plan(0, 0, 2000), start=1):
            sampler.deliver()
            sources = np.searchsorted(starts, numbers, side="right") - 1
            sizes = np.ones(len(numbers)) if share_of == "sequences" else lengths[numbers]
            weights = np.array(sampler.delivery(update).weights)
            parts = np.array([sizes[sources == source].sum() for source in range(3)])
            rests.append(parts - weights * parts.sum())
            sampler.observe(
                update, {source: recorded_loss(update, source) for source in set(sources.tolist())}
            )
        rests = np.array(rests)
        errors = rests.std(0, ddof=1) / math.sqrt(len(rests))
        assert (np.abs(rests.mean(0)) < 3 * np.maximum(errors, 1e-9)).all()

    def test_warm_up_draws_nothing_else(self) -> None:
        _, _, pools = data_set()
        curriculum = Curriculum(mixture=Ucb1(), warmup_updates=100, warmup_sources=["prose", "answers"])
        drawn, weights = self.draw(curriculum, pools, 200)
        lists = pools[1]
        is_list = [
            ((numbers >= lists.first) & (numbers < lists.first + lists.count)).any() for numbers in drawn
        ]
        assert not any(is_list[:100])
        assert is_list[100], "and is over at its declared end"
        assert all(each[1] == 0 for each in weights[:100])

    @pytest.mark.system
    def test_phases(self) -> None:
        """They last what they may, and weights move at their start alone."""
        _, _, pools = data_set()
        sampler = CurriculumSampler(pools, Curriculum(mixture=Ucb1()), 8)
        lengths: list[int] = []
        before: Any = None
        for update, _ in enumerate(sampler.plan(0, 0, 4000), start=1):
            sampler.deliver()
            delivery = sampler.delivery(update)
            if delivery.window == delivery.phase_start:
                lengths.append(delivery.phase_length)
            else:
                assert delivery.weights == before
            before = delivery.weights
            sampler.observe(update, {source: recorded_loss(update, source) for source in range(3)})
        counts = Counter(lengths)
        assert set(counts) == {7, 14, 21, 28, 42}
        expected = len(lengths) / 5
        assert all(abs(count - expected) < 4 * math.sqrt(expected) for count in counts.values())

    @pytest.mark.system
    @given(
        counts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
        caps=st.lists(st.sampled_from([0.5, 1.0, 2.0, math.inf]), min_size=4, max_size=4),
        weights=st.lists(st.floats(0, 1), min_size=4, max_size=4),
        sequences=st.integers(1, 9),
        weight_unit=st.sampled_from(["sequences", "tokens"]),
    )
    def test_caps_hold_and_nothing_is_lost_or_doubled(
        self, counts: list[int], caps: list[float], weights: list[float], sequences: int, weight_unit: Any
    ) -> None:
        """Every sequence comes once in each epoch of its source, and no more often than its cap allows."""
        pools, first = [], 0
        for number, count in enumerate(counts):
            pools.append(
                Pool(
                    name=f"s{number}",
                    first=first,
                    count=count,
                    tokens=count * (number + 1),
                    weight=weights[number],
                    min_weight=0.05,
                    max_epochs=caps[number],
                )
            )
            first += count
        drawn: list[int] = []
        try:
            sampler = CurriculumSampler(pools, Curriculum(weight_unit=weight_unit, phases=[1, 3]), sequences)
            for numbers in sampler.plan(0, 0, 40):
                assert len(numbers) == sequences
                drawn += numbers.tolist()
        except UserError as error:
            assert "every source has reached its max_epochs" in str(error)  # noqa: PT017
            supply = sum(pool.supply for pool in pools)
            assert supply - len(drawn) < sequences
        for pool in pools:
            own = [number for number in drawn if pool.first <= number < pool.first + pool.count]
            assert len(own) <= pool.supply
            for start in range(0, len(own), pool.count):
                epoch = own[start : start + pool.count]
                assert len(set(epoch)) == len(epoch)

    @given(
        chances=st.lists(st.floats(0, 1), min_size=1, max_size=6).filter(lambda each: sum(each) > 0.01),
        count=st.integers(0, 64),
        start=st.floats(0, 1, exclude_max=True),
    )
    def test_spread(self, chances: list[float], count: int, start: float) -> None:
        """Every source gets its expected number rounded up or down, and one without a chance nothing."""
        array = np.array(chances)
        counts = spread(array, count, start)
        assert sum(counts) == count
        for got, chance in zip(counts, array / array.sum(), strict=True):
            assert abs(got - chance * count) < 1 + 1e-9
            assert chance > 0 or got == 0


class TestRewards:
    """What the mixture hears of an update, and what it does not."""

    @pytest.mark.guarantee("a phase is decided from the lag")
    def test_a_phase_is_decided_from_the_lag(self) -> None:
        """Losses of the last 7 updates before a phase change nothing of it; the one before does."""

        def third_phase(changed: int) -> list[float]:
            sampler = CurriculumSampler(data_set()[2], Curriculum(mixture=Ucb1(), phases=[10]), 8)
            for update, _ in enumerate(sampler.plan(0, 0, 21), start=1):
                sampler.deliver()
                sampler.observe(
                    update, {source: 5.0 if update != changed else 1.0 - source for source in range(3)}
                )
            return sampler.state_dict()["plan"]["weights"]

        untouched = third_phase(0)
        for update in range(14, 21):
            assert third_phase(update) == untouched
        assert third_phase(13) != untouched

    def test_lag_0_is_andreas_own(self) -> None:
        sampler = CurriculumSampler(data_set()[2], Curriculum(mixture=Ucb1(), phases=[10], reward_lag=0), 8)
        for update, _ in enumerate(sampler.plan(0, 0, 11), start=1):
            sampler.deliver()
            sampler.observe(update, {source: 5.0 - (source == 2 and update == 10) for source in range(3)})
        weights = sampler.state_dict()["plan"]["weights"]
        assert weights[2] > weights[0] == weights[1]

    def test_windows_that_became_no_update(self) -> None:
        """A callback may skip a batch: its window is then not confused with the next."""

        class Skipping:
            def next_update(self) -> int:
                return update + 1

            def finalize(self) -> None:
                """Nothing is on its way."""

        curriculum = Curriculum(mixture=Ucb1(), phases=[3], reward_lag=0)
        sampler = CurriculumSampler(data_set()[2], curriculum, 8, feedback=Skipping())
        update = 0
        for number, _ in enumerate(sampler.plan(0, 0, 30)):
            sampler.deliver()
            if number % 4 != 2:
                update += 1
                sampler.observe(update, {0: 5.0 - number / 10})
        assert sampler.mixture.pulls[0] == update

    @pytest.mark.parametrize("lag", [0, 7])
    def test_a_source_that_runs_out_within_a_phase(self, lag: int) -> None:
        """After the warm-up the untried arm takes everything and runs out: the rest goes on, also resumed."""

        def build() -> CurriculumSampler:
            pools = [
                replace(pool, max_epochs=1 if pool.name == "lists" else math.inf)
                for pool in data_set()[2][:2]
            ]
            curriculum = Curriculum(
                mixture=Ucb1(), warmup_updates=10, warmup_sources=["prose"], phases=[42], reward_lag=lag
            )
            return CurriculumSampler(pools, curriculum, 8)

        def run_on(sampler: CurriculumSampler, first: int, last: int) -> tuple[list[Any], list[Any]]:
            numbers, weights = [], []
            for update, each in enumerate(sampler.plan(0, first, last), start=first + 1):
                sampler.deliver()
                weights.append(sampler.delivery(update).weights)
                sampler.observe(update, {0: 5.0 - update / 100})
                numbers.append(each.tolist())
            return numbers, weights

        numbers, weights = run_on(build(), 0, 40)
        assert weights[10] == (0.0, 1.0)
        assert weights[39] == (1.0, 0.0), "what ran out has no weight any more"
        for cut in (12, 16, 17, 30):
            first = build()
            run_on(first, 0, cut)
            second = build()
            second.load_state_dict(first.state_dict())
            assert run_on(second, cut, 40)[0] == numbers[cut:]

    @pytest.mark.guarantee("skipped updates teach the mixture nothing")
    def test_what_a_mixture_is_told(self) -> None:
        """Finite losses alone, and how likely each source was to appear."""
        told: list[Any] = []

        class Listening(Ucb1):
            def update(self, observation: Any) -> dict[int, float]:
                told.append(observation)
                return super().update(observation)

        pools = [
            replace(pool, min_weight=floor) for pool, floor in zip(data_set()[2], (0, 0, 0), strict=True)
        ]
        sampler = CurriculumSampler(pools, Curriculum(mixture=Listening()), 2)
        next(sampler.plan(0, 0, 5))
        sampler.deliver()
        sampler.observe(1, {0: 4.0, 1: math.nan, 2: math.inf})
        assert told[0].losses == {0: 4.0}
        assert told[0].chances == {0: pytest.approx(2 / 3)}
        wide = CurriculumSampler(pools, Curriculum(mixture=Listening()), 8)
        next(wide.plan(0, 0, 5))
        wide.deliver()
        wide.observe(1, {0: 4.0, 1: 3.0})
        assert told[1].chances == {0: 1.0, 1: 1.0}
        assert sampler.rewards == {0: 0.0}
        sampler.observe(9, {0: 4.0})
        assert sampler.rewards == {}, "nothing is known of an update that nobody delivered"

    def test_a_mixture_that_hears_nothing(self) -> None:
        sampler = CurriculumSampler(data_set()[2], Curriculum(mixture=Ucb1(), phases=[10]), 8)
        with pytest.raises(UserError, match=r"Ucb1 has heard of none of 10 updates; give the datamodule"):
            [sampler.deliver() for _ in sampler.plan(0, 0, 30)]

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ([math.nan, 1, 1], "it must give 3 numbers of at least 0"),
            ([1.5, -0.5, 0], "it must give 3 numbers of at least 0"),
            ([1.0], "it must give 3 numbers of at least 0"),
            ([0, 0, 0], "give these something"),
        ],
    )
    def test_weights_of_a_user_s_own_are_checked(self, weights: list[float], message: str) -> None:
        class Own(Mixture):
            def weights(self, allowed: Any = None) -> Any:
                return np.array(weights)

        with pytest.raises(UserError, match=f"Own.weights gave .*{message}"):
            CurriculumSampler(data_set()[2], Curriculum(mixture=Own()), 8)

    def test_an_unfinished_mixture(self) -> None:
        class Half(Ucb1):
            state_dict = Mixture.state_dict

        with pytest.raises(
            UserError, match="the mixture Half must define state_dict, as every one that learns"
        ):
            CurriculumSampler(data_set()[2], Curriculum(mixture=Half()), 8)

        class Deaf(Fixed):
            def update(self, observation: Any) -> dict[int, float]:
                return {}

        with pytest.raises(
            UserError, match="Deaf defines update, which is called where learns is True alone"
        ):
            CurriculumSampler(data_set()[2], Curriculum(mixture=Deaf()), 8)
        with pytest.raises(UserError, match="the mixture Mixture must define weights"):
            CurriculumSampler(data_set()[2], Curriculum(mixture=Mixture()), 8)

    def test_options_of_any_plain_kind_are_compared(self) -> None:
        class Own(Fixed):
            def __init__(self, shares: list[float]) -> None:
                self.shares = shares
                self.calls = 0

            def weights(self, allowed: Any = None) -> Any:
                self.calls += 1
                return self._normalise(self.shares, allowed)

        def settings_of(shares: list[float]) -> dict[str, Any]:
            return CurriculumSampler(data_set()[2], Curriculum(mixture=Own(shares)), 8).settings()

        assert settings_of([1, 2, 3]) == settings_of([1, 2, 3]) != settings_of([3, 2, 1])

    def test_overfitting_repeats_the_first_epoch(self) -> None:
        pools = [replace(pool, max_epochs=1) for pool in data_set()[2]]
        sampler = CurriculumSampler(pools, Curriculum(mixture=Ucb1(), phases=[2]), 8, repeat=True)
        epochs = []
        for epoch in range(12):
            numbers = []
            for each in sampler.plan(epoch, 0, 9):
                sampler.deliver()
                sampler.observe(len(numbers) + 1, {0: 5.0, 1: 3.0 - len(numbers), 2: 1.0})
                numbers.append(each.tolist())
            epochs.append(numbers)
        assert all(epoch == epochs[0] for epoch in epochs)


def module(curriculum: Curriculum | None = None, **options: Any) -> TextDataModule:
    sources = [
        TextSource(name=name, kind="tokens", documents=[[1, 2, 3 + number % 20] for number in range(count)])
        for name, count in SIZES.items()
    ]
    data = TextDataModule(
        options.pop("sources", sources), vocab_size=32, val_fraction=0.0, curriculum=curriculum, **options
    )
    data.prepare_data()
    data.setup()
    return data


class TestConfiguration:
    """What is refused, and what is taken for granted."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"weight_unit": "words"}, "`weight_unit` must be sequences or tokens, got 'words'"),
            ({"phases": []}, "`phases` must be whole lengths of at least 1 update"),
            ({"phases": [7, 0]}, "`phases` must be whole lengths"),
            ({"phases": [7.5]}, "`phases` must be whole lengths"),
            ({"reward_lag": -1}, "`reward_lag` must be at least 0, got -1"),
            ({"updates_per_epoch": 0}, "`updates_per_epoch` must be at least 1"),
            ({"min_clip_coefficient": 2}, "`min_clip_coefficient` must lie from 0 to 1"),
            ({"repetition_penalty": -1}, "`repetition_penalty` must be at least 0"),
            ({"warmup_updates": 5}, "`warmup_updates` and `warmup_sources` go together"),
            ({"warmup_sources": ["a"]}, "go together"),
        ],
    )
    def test_values(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            Curriculum(**options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"weight": -1}, "source 's': weight must lie from 0 on, and finite, got -1"),
            ({"min_weight": 1.5}, "source 's': min_weight must lie from 0 to 1, got 1.5"),
            ({"max_epochs": 0}, "source 's': max_epochs must be more than 0, got 0"),
            ({"val_fraction": 1.0}, r"source 's': val_fraction must lie in \[0, 1\), got 1.0"),
            ({"format": "csv"}, "source 's': format must be one of text, jsonl, parquet, tokens"),
        ],
    )
    def test_sources(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            TextSource(name="s", paths=["x"], **options)

    def test_unknown_warm_up_source(self) -> None:
        with pytest.raises(UserError, match=r"names 'poems', and the sources are prose, lists, answers"):
            module(Curriculum(warmup_updates=3, warmup_sources=["poems"]))
        held = TextSource(name="held", kind="tokens", documents=[[1, 2]], split="val")
        kept = TextSource(name="kept", kind="tokens", documents=[[1, 2]])
        data = module(Curriculum(warmup_updates=3, warmup_sources=["held"]), sources=[held, kept])
        with pytest.raises(UserError, match=r"names 'held', and the sources with training text are kept"):
            data.train_dataloader()

    def test_a_weight_that_nobody_heeds(self) -> None:
        sources = [TextSource(name="a", kind="tokens", documents=[[1, 2]], weight=2.0)]
        for mixture in (Ucb1(), Exp3(), Proportional()):
            with pytest.raises(
                UserError, match=f"'a' has a weight, which {type(mixture).__name__} does not use"
            ):
                module(Curriculum(mixture=mixture), sources=sources)
        module(Curriculum(mixture=Fixed()), sources=sources)

    def test_a_run_longer_than_the_text_may_be_read(self) -> None:
        sources = [TextSource(name="a", kind="tokens", documents=[[1, 2]] * 20, max_epochs=2)]
        data = module(Curriculum(updates_per_epoch=2), sources=sources, sequences_per_update=8)
        for options, updates in (
            ({"max_steps": 6}, 6),
            ({"max_epochs": 3}, 6),
            ({"max_epochs": 9, "max_steps": 7}, 7),
        ):
            data.trainer = build_trainer(**options)
            with pytest.raises(
                UserError, match=f"max_epochs allow 5 updates, and the run has {updates}; raise"
            ):
                data.train_dataloader()
        warm = module(
            Curriculum(warmup_updates=5, warmup_sources=["a"]),
            sources=[*sources, TextSource(name="b", kind="tokens", documents=[[1, 2]])],
        )
        warm.trainer = build_trainer(max_steps=4)
        with pytest.warns(
            UserWarning, match="as long as the run of 4 updates: sources other than a are never"
        ):
            warm.train_dataloader()
        for options in ({"max_steps": 5}, {"max_steps": 60, "overfit_batches": 2}):
            data.trainer = build_trainer(**options)
            data.train_dataloader()

    @pytest.mark.parametrize(
        ("workers", "prefetch", "lag", "works"),
        [(2, 3, 7, True), (2, 4, 7, False), (1, 1, 1, False), (1, 1, 2, True)],
    )
    def test_reading_too_far_ahead(self, workers: int, prefetch: int, lag: int, works: bool) -> None:
        options = {"num_workers": workers, "prefetch_factor": prefetch}
        curriculum = Curriculum(mixture=Ucb1(), reward_lag=lag)
        if works:
            module(curriculum, **options).train_dataloader()
        else:
            with pytest.raises(
                UserError, match=f"`reward_lag` is {lag}: raise it to {workers * prefetch + 1}"
            ):
                module(curriculum, **options)
        module(Curriculum(mixture=Fixed(), reward_lag=0), num_workers=3).train_dataloader()

    def test_declared_length(self) -> None:
        assert len(module(Curriculum(updates_per_epoch=17)).train_dataloader()) == 17
        assert len(module(Curriculum(), sequences_per_update=32).train_dataloader()) == math.ceil(340 / 32)

    def test_weights_alone_mean_fixed(self) -> None:
        sources = [
            TextSource(name="a", kind="tokens", documents=[[1, 2]] * 20, weight=3.0),
            TextSource(name="b", kind="tokens", documents=[[1, 2]] * 20),
        ]
        data = module(sources=sources)
        data.train_dataloader()
        assert isinstance(data._sampler.mixture, Fixed)
        assert data._sampler.mixture.weights().tolist() == [0.75, 0.25]
        with pytest.raises(UserError, match="`shuffle`=false and a mixture"):
            module(sources=sources, shuffle=False)

    def test_changed_curriculum_is_refused(self) -> None:
        state = module(Curriculum(mixture=Ucb1())).train_dataloader().state_dict()
        for other in (
            Curriculum(mixture=Ucb1(exploration=1.0)),
            Curriculum(mixture=Ucb1(), reward_lag=0),
            Curriculum(),
        ):
            with pytest.raises(UserError, match="the checkpoint's order of windows comes from"):
                module(other).train_dataloader().load_state_dict(state)
        module(Curriculum(mixture=Ucb1())).train_dataloader().load_state_dict(state)

    def test_a_source_for_validation_alone_is_no_arm(self) -> None:
        sources = [
            TextSource(name="a", kind="tokens", documents=[[1, 2]] * 20),
            TextSource(name="held", kind="tokens", documents=[[1, 2]] * 20, split="val"),
        ]
        data = module(Curriculum(mixture=Ucb1()), sources=sources)
        loader = data.train_dataloader()
        assert {int(source) for window in loader for batch in window for source in batch["source_id"]} == {0}

    def test_exhaustion_says_when(self) -> None:
        sources = [TextSource(name="a", kind="tokens", documents=[[1, 2]] * 20, max_epochs=1)]
        loader = module(
            Curriculum(updates_per_epoch=9), sources=sources, sequences_per_update=8
        ).train_dataloader()
        with pytest.raises(UserError, match="update 3: every source has reached its max_epochs; raise it"):
            list(loader)


@pytest.mark.system
@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), workers=st.just(0), cut=st.integers(1, 60))
def test_any_cut(seed: int, workers: int, cut: int) -> None:
    """A state taken after any window leads to the same windows, whatever the seed."""
    whole = build_loader(seed=seed, workers=workers)
    expected = run(whole, 70)
    loader = build_loader(seed=seed)
    run(loader, cut)
    resumed = build_loader(seed=seed)
    resumed.load_state_dict(loader.state_dict())
    assert run(resumed, 70 - cut, first=cut + 1) == expected[cut:]
