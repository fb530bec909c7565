"""Windows: cutting, sharding, the order of epochs, and resuming."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SubsetRandomSampler

from andrea_pl import TokenizedDataset, UserError, Window, WindowLoader
from andrea_pl.data.windows.dataset import DynamicPaddingCollator
from andrea_pl.data.windows.loaders import MicroBatchLoader, TextWindowLoader, WindowReader
from andrea_pl.data.windows.window import EpochSampler, pack, shard_window


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    budget=st.integers(1, 200),
    most=st.none() | st.integers(1, 5),
    world_size=st.integers(1, 4),
)
@pytest.mark.guarantee("every sequence once an epoch")
def test_shards_hold_each_sequence_once(
    lengths: list[int], budget: int, most: int | None, world_size: int
) -> None:
    shares = shard_window(lengths, budget, most, world_size)
    assert len({len(share) for share in shares}) == 1, "equally many micro-batches a rank"
    places = [place for share in shares for micro_batch in share for place in micro_batch]
    assert sorted(places) == list(range(len(lengths)))
    for micro_batch in (part for share in shares for part in share if part):
        widest = max(lengths[place] for place in micro_batch)
        assert len(micro_batch) == 1 or widest * len(micro_batch) <= budget
        assert most is None or len(micro_batch) <= most


def test_sorting_saves_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 256, 32)
    padded = sum(max(lengths[part]) * len(part) for part in pack(lengths, 1024))
    assert 1 - lengths.sum() / padded < 0.2


@pytest.mark.guarantee("windows follow from the seed")
def test_epoch_sampler() -> None:
    sampler = EpochSampler(10, 4, seed=3)
    assert sampler.windows_per_epoch == 3
    epochs = [np.concatenate(list(sampler.plan(epoch, 0, 3))) for epoch in (0, 1, 0)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0].tolist() == epochs[2].tolist() != epochs[1].tolist()
    first = next(sampler.plan(0, 0, 3)).tolist()
    assert next(EpochSampler(10, 4, seed=4).plan(0, 0, 3)).tolist() != first
    assert next(EpochSampler(10, 4, shuffle=False).plan(5, 2, 3)).tolist() == [8, 9]
    repeated = EpochSampler(10, 4, seed=3, repeat=True)
    assert next(repeated.plan(7, 0, 3)).tolist() == first


def text_loader(num_workers: int = 0, limit: int | None = None) -> TextWindowLoader:
    """Return a loader over 11 documents of different lengths, four an update."""
    dataset = TokenizedDataset([list(range(n + 2)) for n in range(11)], 16)
    reader = WindowReader(dataset, dataset.lengths, DynamicPaddingCollator(0), 24)
    return TextWindowLoader(reader, EpochSampler(11, 4, seed=1), num_workers=num_workers, limit=limit)


def documents(window: Window) -> list[int]:
    return [document for micro_batch in window for document in micro_batch["document_id"].tolist()]


def inner_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(list(torch.arange(11)), batch_size=1, **options)


def values(window: Window) -> list[int]:
    return [int(value) for micro_batch in window for value in micro_batch]


LOADERS = {
    "text": (text_loader, documents),
    "text workers": (lambda: text_loader(num_workers=2), documents),
    "in order": (lambda: WindowLoader(inner_loader(), 4), values),
    "shuffled": (lambda: WindowLoader(inner_loader(shuffle=True), 4), values),
    "batch sampler": (
        lambda: WindowLoader(
            DataLoader(
                list(torch.arange(11)), batch_sampler=BatchSampler(RandomSampler(range(11)), 1, False)
            ),
            4,
        ),
        values,
    ),
    "subset": (
        lambda: WindowLoader(DataLoader(list(torch.arange(11)), sampler=SubsetRandomSampler(range(11))), 4),
        values,
    ),
    "own generator": (
        lambda: WindowLoader(inner_loader(shuffle=True, generator=torch.Generator().manual_seed(8)), 4),
        values,
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_two_epochs(kind: str) -> None:
    """Sized, every item once an epoch, the tail a shorter window."""
    build, read = LOADERS[kind]
    loader = build()
    assert len(loader) == 3
    epochs = [[read(window) for window in loader] for _ in range(2)]
    for epoch in epochs:
        assert [len(window) for window in epoch] == [4, 4, 3]
        assert sorted(value for window in epoch for value in window) == list(range(11))
    if kind != "in order":
        assert epochs[0] != epochs[1]


@pytest.mark.system
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.guarantee("windows follow from the seed")
def test_resume_at_any_window(kind: str) -> None:
    """A state taken after any window leads to the same windows, and so does a second resume."""
    build, read = LOADERS[kind]
    straight = [read(window) for loader in [build()] for _ in range(3) for window in loader]
    for cut in range(1, 7):
        loader = build()
        state: Any = None
        delivered = 0
        while delivered < cut:
            for window in loader:
                delivered += 1
                assert read(window) == straight[delivered - 1]
                if delivered == cut:
                    state = loader.state_dict()
                    break
        resumed = build()
        iter(resumed)  # asking for an iterator changes nothing
        resumed.load_state_dict(state)
        rest = [read(window) for _ in range(3) for window in resumed]
        assert rest[: 9 - cut] == straight[cut:]
        again = build()
        again.load_state_dict(state)
        first = next(iter(again))
        assert read(first) == straight[cut]
        third = build()
        third.load_state_dict(again.state_dict())
        assert [read(window) for _ in range(3) for window in third][: 8 - cut] == straight[cut + 1 :]


@pytest.mark.parametrize("kind", ["shuffled", "own generator"])
def test_repeat(kind: str) -> None:
    """With `overfit_batches` every epoch takes the order of the first."""
    build, read = LOADERS[kind]
    loader = build()
    loader.repeat = True
    epochs = [[read(window) for window in loader] for _ in range(3)]
    assert epochs[0] == epochs[1] == epochs[2]


def test_negative_control() -> None:
    """Without its state a loader starts again."""
    assert documents(next(iter(text_loader()))) != documents(list(text_loader())[1])


@pytest.mark.parametrize("kind", LOADERS)
def test_asking_draws_nothing(kind: str) -> None:
    """The global random generator is left alone, and the order does not depend on it."""
    build, read = LOADERS[kind]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = [read(window) for window in build()]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert [read(window) for window in build()] == first


def test_a_broken_off_epoch_is_over() -> None:
    """Where the trainer takes two windows an epoch, the third never comes, and resuming knows that."""
    loader = text_loader(limit=2)
    epochs = []
    for _ in range(3):
        iterator = iter(loader)
        epochs.append([documents(next(iterator)), documents(next(iterator))])
    whole = text_loader()
    expected = [[documents(window) for window in whole][:2] for _ in range(3)]
    assert epochs == expected
    resumed = text_loader(limit=2)
    state = {**text_loader().state_dict(), "delivered": 2}
    resumed.load_state_dict(state)
    assert documents(next(iter(resumed))) == expected[1][0]


def test_changed_text_is_noticed() -> None:
    loader = text_loader()
    with pytest.raises(UserError, match="epoch has 5 windows, this run's has 3"):
        loader.load_state_dict({"epoch": 0, "delivered": 1, "windows_per_epoch": 5})
    other = text_loader()
    other.window_sampler.seed = 2
    with pytest.raises(UserError, match=r"'seed': 1.*'seed': 2.*`seed`"):
        other.load_state_dict(loader.state_dict())
    with pytest.raises(UserError, match="accumulate=2, this run has 4"):
        WindowLoader(inner_loader(), 4).load_state_dict({"epoch": 0, "delivered": 1, "accumulate": 2})


def test_unsized_inner_loader() -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(range(5))

    loader = WindowLoader(Stream(), 2)
    with pytest.raises(TypeError):
        len(loader)
    assert [list(window) for window in loader] == [[0, 1], [2, 3], [4]]


def test_accumulate_is_checked() -> None:
    with pytest.raises(UserError, match="accumulate must be at least 1"):
        WindowLoader(inner_loader(), 0)


def test_set_epoch_is_forwarded() -> None:
    sampler = DistributedSampler(list(range(12)), num_replicas=2, rank=0, shuffle=True)
    loader = WindowLoader(DataLoader(list(range(12)), sampler=sampler, batch_size=1), 2)
    orders = [[values(window) for window in loader] for _ in range(2)]
    assert sampler.epoch == 1
    assert orders[0] != orders[1]


def test_refuses_an_unsharded_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="not sharded"):
        next(iter(WindowLoader(inner_loader(), 2)))

    class Sharded(list[int]):
        sharded = True

    assert list(next(iter(WindowLoader(Sharded([1, 2]), 2)))) == [1, 2]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.guarantee("every sequence once an epoch")
def test_evaluation_takes_every_sequence_once(world_size: int) -> None:
    dataset = TokenizedDataset([list(range(n + 2)) for n in range(11)], 16)
    shares = []
    for rank in range(world_size):
        reader = WindowReader(
            dataset, dataset.lengths, DynamicPaddingCollator(0), 24, rank=rank, world_size=world_size
        )
        shares.append(list(MicroBatchLoader(reader)))
    assert len({len(share) for share in shares}) == 1
    seen = [
        number
        for share in shares
        for batch in share
        for number in batch["document_id"].tolist()
        if number >= 0
    ]
    assert sorted(seen) == list(range(11))
