"""Networks that no machine could hold are refused before anything is allocated."""

from typing import Any

import pytest

import andrea_pl.network.sizes
from andrea_pl import RoPELanguageModel, TransformerConfig, UserError
from andrea_pl.network.sizes import BLOCK_BYTES, memory_needs, refuse_what_cannot_fit

pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"vocab_size": 10**9}, "119.2 GiB of that by vocab_size"),
        ({"block_size": 10**9}, "59.6 GiB of that by block_size"),
        ({"d_model": 10**9}, "of d_model 1,000,000,000"),
        ({"n_layers": 10**9}, "by n_layers 1,000,000,000"),
        ({"d_ff": 10**9}, "119.2 GiB of that by n_layers 1"),
    ],
)
def test_sizes_of_a_billion(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], words: str) -> None:
    """Refused on a machine of 16 GiB; two matrices of 10^9 x 16 float32 are 119.2 GiB."""
    monkeypatch.setattr(andrea_pl.network.sizes, "machine_memory", lambda: 16 * 2**30)
    network = {"d_model": 16, "n_heads": 2, "n_layers": 1, **sizes}
    with pytest.raises(UserError, match=words):
        refuse_what_cannot_fit(network, sizes.get("vocab_size", 300), sizes.get("block_size", 32))


@pytest.mark.parametrize("options", [{}, {"activation": "swiglu"}, {"tie_output": True}, {"d_ff": 40}])
def test_memory_is_that_of_the_weights(options: dict[str, Any]) -> None:
    """Never more than what is there, so that nothing is refused that could be trained."""
    network = {"d_model": 24, "n_heads": 3, "n_layers": 2, "norm_weight": False, **options}
    model = RoPELanguageModel(TransformerConfig(vocab_size=500, block_size=64, **network))
    held = sum(each.nbytes for each in model.parameters())
    needs = memory_needs(network, 500, 64)
    tables = 16 * 64 * 4
    assert sum(needs.values()) == held + tables + 2 * BLOCK_BYTES
