"""Options of `andrea generate` that cannot work: one line each; temperatures near 0 write the greedy text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from andrea_pl import UserError
from andrea_pl.cli.commands import generate_text
from andrea_pl.network.generation import Sampling, choose
from tests.support.checkpoints import save


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "a.ckpt"
    save(path)
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 99999999999999999999}, "--seed must lie in -9223372036854775808 … 18446744073709551615"),
        ({"seed": -(2**63) - 1}, "--seed must lie in"),
        ({"temperature": float("nan")}, "temperature must be at least 0 and finite, got nan"),
        ({"temperature": float("inf")}, "temperature must be at least 0 and finite, got inf"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_k": -3}, "top_k must be at least 1"),
        ({"top_p": 0.0}, "top_p must lie in"),
        ({"top_p": float("nan")}, "top_p must lie in"),
        ({"top_p": float("inf")}, "top_p must lie in"),
        ({"max_new_tokens": -1}, "max_new_tokens must lie in 0 … 1,000,000, got -1"),
        ({"max_new_tokens": 10**30}, "max_new_tokens must lie in 0 … 1,000,000"),
        ({"device": "cuda:99"}, "--device cuda:99 cannot be used here"),
        ({"device": "abacus"}, "--device abacus cannot be used here"),
        ({"device": "meta"}, "--device meta cannot be used here"),
        ({"device": ""}, "--device  cannot be used here"),
        ({"prompt": "a text " * 99}, "longer than block_size=32; shorten it"),
        ({"prompt": "\ud800"}, "the prompt is not UTF-8"),
    ],
)
def test_refused_in_one_line(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as fault:
        generate_text(str(path), **options)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"top_k": 10**30},
        {"top_p": 5e-324},
        {"temperature": 1e300},
        {"max_new_tokens": 0},
    ],
)
def test_extreme_and_fine(path: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    generate_text(str(path), "a text", **({"max_new_tokens": 3} | options))
    assert capsys.readouterr().out.startswith("a text")


@pytest.mark.parametrize("temperature", [1e-45, 5e-324, 1e-20, 1e-9])
def test_next_to_nothing_is_greedy(
    path: Path, temperature: float, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for each in (0.0, temperature):
        generate_text(str(path), "a text", max_new_tokens=12, temperature=each)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_ids_that_no_token_has_stay_out_at_any_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, float("-inf")]])
    for temperature in (1e-45, 1.0, 1e38, 1e39, 1e308):
        drawn = [int(choose(logits.clone(), Sampling(temperature=temperature))) for _ in range(20)]
        assert set(drawn) <= {0, 1}
