"""The network: shapes, causality, padding, options, parameter counts, errors."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from andrea_pl import FeedForward, RoPELanguageModel, TransformerConfig, UserError
from andrea_pl.network.layout import TokenLayout, is_right_padded, select_rows
from andrea_pl.network.transformer import RotaryEmbedding, rotate


def build(**options: Any) -> RoPELanguageModel:
    """Return a small model in float64 with weights large enough to matter."""
    shape = {"vocab_size": 19, "block_size": 16, "d_model": 24, "n_heads": 3, "n_layers": 2, "init_std": 0.3}
    torch.manual_seed(2)
    return RoPELanguageModel(TransformerConfig(**{**shape, **options})).double().eval()


VARIANTS = [
    {},
    {"activation": "swiglu", "norm": "rms"},
    {"bias": True, "d_ff": 40},
    {"norm_weight": False},
    {"tie_output": True},
    {"activation_checkpointing": True},
]


@pytest.mark.parametrize("options", VARIANTS)
def test_causal(options: Any) -> None:
    """No place changes when a later token does."""
    model = build(**options)
    ids = torch.randint(0, 19, (2, 9))
    base = model(ids)
    assert base.shape == (2, 9, 19)
    for place in range(1, 9):
        changed = ids.clone()
        changed[:, place] = (changed[:, place] + 1) % 19
        after = model(changed)
        assert torch.equal(after[:, :place], base[:, :place])
        assert not torch.allclose(after[:, place], base[:, place])


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5), extra=st.integers(0, 4))
@settings(max_examples=30)
def test_any_padding_gives_the_row_alone(lengths: list[int], extra: int) -> None:
    """Right padding, left padding and holes give each valid place what the row alone gives it."""
    model = build()
    generator = torch.Generator().manual_seed(sum(lengths))
    width = max(lengths) + extra
    rows = [torch.randint(0, 19, (length,), generator=generator) for length in lengths]
    for kind in ("right", "left", "holes"):
        ids, mask = (
            torch.zeros(len(rows), width, dtype=torch.int64),
            torch.zeros(len(rows), width, dtype=torch.bool),
        )
        for number, row in enumerate(rows):
            places = {
                "right": torch.arange(len(row)),
                "left": torch.arange(width - len(row), width),
                "holes": torch.randperm(width, generator=generator)[: len(row)].sort().values,
            }[kind]
            ids[number, places], mask[number, places] = row, True
        logits = model(ids, mask)
        assert torch.isfinite(logits).all()
        for number, row in enumerate(rows):
            torch.testing.assert_close(
                logits[number, mask[number]], model(row[None])[0], rtol=1e-9, atol=1e-9
            )


def test_rows_without_a_valid_key() -> None:
    """A row of padding alone gives no NaN, forward or backward."""
    model = build()
    mask = torch.tensor([[False] * 4, [False, True, False, True]])
    logits = model(torch.zeros(2, 4, dtype=torch.int64), mask)
    logits[mask].sum().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_packed_equals_dense() -> None:
    """Leaving padding out of everything but attention changes no loss and no gradient."""
    gradients = []
    ids = torch.randint(0, 19, (3, 7))
    mask = torch.arange(7) < torch.tensor([[7], [2], [5]])
    targets = torch.randint(0, 19, (3, 7))[mask]
    for packed in (False, True):
        model = build()
        if packed:
            index = mask.flatten().nonzero().squeeze(1)
            logits = model.logits(model.hidden_states(ids, token_index=index))
        else:
            logits = model(ids, mask)[mask]
        F.cross_entropy(logits, targets).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


def test_activation_checkpointing_changes_nothing() -> None:
    gradients = []
    ids = torch.randint(0, 19, (2, 6))
    for option in (False, True):
        model = build(activation_checkpointing=option).train()
        model(ids).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_attention_by_hand() -> None:
    """One block against the textbook formula, with rotation by complex numbers."""
    model = build(n_layers=1)
    ids = torch.randint(0, 19, (1, 5))
    block = model.blocks[0]
    x = model.embedding(ids)
    h = F.layer_norm(x, (24,))
    q, k, v = (block.attention.qkv(h).view(5, 3, 3, 8)[:, n] for n in range(3))
    angles = torch.outer(torch.arange(5.0), 10000.0 ** (-torch.arange(0, 8, 2) / 8)).double()
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def turned(t: torch.Tensor) -> torch.Tensor:
        z = torch.complex(t[..., :4], t[..., 4:]) * turn
        return torch.cat((z.real, z.imag), -1)

    scores = torch.einsum("qhk,thk->hqt", turned(q), turned(k)) / math.sqrt(8)
    scores = scores.masked_fill(~torch.ones(5, 5).tril().bool(), float("-inf"))
    mixed = torch.einsum("hqt,thk->qhk", scores.softmax(-1), v).reshape(1, 5, 24)
    x = x + block.attention.out(mixed)
    x = x + block.feed_forward.contract(F.gelu(block.feed_forward.expand(F.layer_norm(x, (24,)))))
    expected = model.output(F.layer_norm(x, (24,)))
    torch.testing.assert_close(model(ids), expected, rtol=1e-6, atol=1e-6)


def test_rotation_depends_on_distance_alone() -> None:
    rotary = RotaryEmbedding(8, 32, 10_000.0).double()
    query, key = torch.randn(2, 8, dtype=torch.float64)

    def product(first: int, second: int) -> float:
        positions = torch.tensor([[first, second]])
        tables = rotary.tables(TokenLayout(batch=1, length=2, positions=positions))
        turned = rotate(torch.stack((query, key))[None, :, None], tables)[0, :, 0]
        return float(turned[0] @ turned[1])

    assert product(5, 2) == pytest.approx(product(20, 17), abs=1e-5)
    assert product(5, 2) != pytest.approx(product(20, 10), abs=1e-3)


def test_tied_output_shares_its_matrix() -> None:
    tied, untied = build(tie_output=True), build()
    assert untied.count_parameters() - tied.count_parameters() == 19 * 24
    assert tied.output.weight is tied.embedding.weight


def test_norms_without_weight_leave_matrices_alone() -> None:
    assert {p.ndim for p in build(norm_weight=False).parameters()} == {2}
    assert {p.ndim for p in build(norm_weight=False, norm="rms").parameters()} == {2}


@pytest.mark.parametrize(
    ("shape", "millions"),
    [
        ({"vocab_size": 2305, "d_model": 384, "n_heads": 12, "n_layers": 6}, 12.4),
        ({"vocab_size": 8449, "d_model": 768, "n_heads": 12, "n_layers": 12}, 97.9),
    ],
)
def test_parameters_of_the_family(shape: Any, millions: float) -> None:
    with torch.device("meta"):
        model = RoPELanguageModel(TransformerConfig(block_size=1024, **shape))
    assert model.count_parameters() / 1e6 == pytest.approx(millions, rel=0.01)


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    model = build(init_std=0.02, vocab_size=500)
    loss = F.cross_entropy(model(torch.randint(0, 500, (8, 16))).flatten(0, 1), torch.randint(0, 500, (128,)))
    assert float(loss.detach()) == pytest.approx(math.log(500), abs=0.05)


def test_dropout_only_in_training() -> None:
    model = build(dropout=0.5)
    ids = torch.randint(0, 19, (1, 8))
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 25}, "d_model must be a multiple of n_heads.*nearest d_model is 24"),
        ({"d_model": 9, "n_heads": 3}, "head width.*must be even"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"d_ff": 0}, "d_ff must be at least 1"),
        ({"dropout": 1.0}, "dropout"),
        ({"activation": "relu"}, "activation"),
        ({"norm": "batch"}, "norm"),
        ({"rope_theta": 0.0}, "rope_theta"),
    ],
)
def test_refused_shapes(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(**options)


def test_too_long_a_sequence() -> None:
    with pytest.raises(UserError, match="17 tokens is longer than block_size=16"):
        build()(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize("token", [-1, 19])
def test_id_out_of_range(token: int) -> None:
    with pytest.raises(UserError, match=f"token id {token} is outside 0 … 18"):
        build()(torch.tensor([[0, token]]))


def test_feed_forward_widths() -> None:
    config = TransformerConfig(
        vocab_size=2, block_size=2, d_model=8, n_heads=2, n_layers=1, activation="swiglu"
    )
    assert FeedForward(config).expand.weight.shape == (64, 8)
    assert TransformerConfig(**config.to_dict()) == config


def test_right_padding_is_told_apart() -> None:
    assert is_right_padded(torch.tensor([[True, True, False], [True, False, False]]))
    assert not is_right_padded(torch.tensor([[True, False, True]]))
    assert not is_right_padded(torch.tensor([[False, True]]))


def test_select_rows_gradient() -> None:
    rows = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: select_rows(r, torch.tensor([4, 0, 2])), (rows,))
