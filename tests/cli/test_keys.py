"""Options in messages: by themselves in Python, by their full keys in the command."""

import pytest

from andrea_pl.cli.keys import with_full_keys


@pytest.mark.parametrize(
    ("said", "printed"),
    [
        ("`max_norm` must be more than 0", "model.max_norm must be more than 0"),
        (
            "raise `reward_lag`, or lower `num_workers`",
            "raise data.curriculum.reward_lag, or lower data.num_workers",
        ),
        (
            "`vocab_size` is 3 and `network.vocab_size` 2",
            "data.vocab_size is 3 and model.network.vocab_size 2",
        ),
        ("set `schedule`=constant", "set model.schedule=constant"),
        ("or start with `init_from`", "or start with --init_from"),
        ("set `sharded = True`, call `fit`", "set `sharded = True`, call `fit`"),
    ],
)
def test_full_keys(said: str, printed: str) -> None:
    assert with_full_keys(said) == printed
