"""Generation: the cache, the choice of tokens, repeatability, the end."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from andrea_pl import RoPELanguageModel, Sampling, TransformerConfig, UserError
from andrea_pl.network import generate
from andrea_pl.network.generation import choose


def build() -> RoPELanguageModel:
    torch.manual_seed(4)
    shape = TransformerConfig(vocab_size=23, block_size=12, d_model=16, n_heads=2, n_layers=2, init_std=0.4)
    return RoPELanguageModel(shape).double()


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    new=st.integers(0, 30),
    temperature=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=25)
def test_cached_equals_uncached(lengths: list[int], new: int, temperature: float) -> None:
    """Any prompts, any length, beyond the block size too."""
    model = build()
    prompts = [
        torch.randint(0, 23, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths
    ]
    results = [
        generate(
            model,
            prompts,
            new,
            Sampling(temperature=temperature),
            generator=torch.Generator().manual_seed(1),
            use_cache=cached,
        )
        for cached in (True, False)
    ]
    assert results[0] == results[1]
    assert [len(row) for row in results[0]] == [new] * len(lengths)


def test_greedy_follows_the_logits() -> None:
    model = build().eval()
    context = [3, 5]
    for token in generate(model, [context], 8, Sampling(temperature=0))[0]:
        assert token == int(model(torch.tensor([context]))[0, -1].argmax())
        context = [*context, token]


def test_batch_equals_each_alone() -> None:
    model = build()
    prompts = [[1], [2, 3, 4], [5, 6]]
    together = generate(model, prompts, 6, Sampling(temperature=0))
    assert together == [generate(model, [prompt], 6, Sampling(temperature=0))[0] for prompt in prompts]


def test_end_stops_a_row() -> None:
    model = build()
    free = generate(model, [[1]], 10, Sampling(temperature=0))[0]
    end = free[4]
    assert generate(model, [[1]], 10, Sampling(temperature=0), end_id=end)[0] == free[: free.index(end)]


def test_repeatable_and_leaves_the_global_generator_alone() -> None:
    model = build().train()
    state = torch.get_rng_state()
    rows = [generate(model, [[1]], 12, generator=torch.Generator().manual_seed(9)) for _ in range(2)]
    assert rows[0] == rows[1]
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_top_k_and_top_p() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log().expand(4000, 4)
    generator = torch.Generator().manual_seed(0)
    drawn = choose(logits, Sampling(top_k=1), generator)
    assert set(drawn.tolist()) == {0}
    drawn = choose(logits, Sampling(top_p=0.6), generator)
    assert set(drawn.tolist()) <= {0, 1, 2}
    assert len(set(drawn.tolist())) == 2
    drawn = choose(logits, Sampling(top_p=0.5), generator)
    assert set(drawn.tolist()) == {0}
    share = (choose(logits, Sampling(), generator) == 0).double().mean()
    assert float(share) == pytest.approx(0.5, abs=0.04)
    cold = (choose(logits, Sampling(temperature=0.5), generator) == 0).double().mean()
    assert float(cold) == pytest.approx(0.25 / (0.25 + 0.04 + 0.04 + 0.01), abs=0.04)


def test_unusable_ids_are_never_chosen() -> None:
    rows = generate(build(), [[1]], 40, usable_ids=3, generator=torch.Generator().manual_seed(0))
    assert max(rows[0]) < 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
    ],
)
def test_refused_sampling(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampling(**options)


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([], 1, "no prompt"),
        ([[]], 1, "no token"),
        ([[0] * 13], 1, "13 tokens is longer than block_size=12"),
        ([[23]], 1, "outside 0 … 22"),
        ([[0]], -1, "max_new_tokens"),
    ],
)
def test_refused_prompts(prompts: list[list[int]], new: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(build(), prompts, new)
