"""Parameter groups: what decays, what is frozen or tied."""

import pytest
from torch import nn

from andrea_pl import RoPELanguageModel, TransformerConfig, UserError, build_optimizer
from andrea_pl.optim import parameter_groups


def model(**options: object) -> RoPELanguageModel:
    shape = {"vocab_size": 9, "block_size": 4, "d_model": 8, "n_heads": 2, "n_layers": 1, "bias": True}
    return RoPELanguageModel(TransformerConfig(**(shape | options)))  # type: ignore[arg-type]


def test_matrices_decay_vectors_do_not() -> None:
    network = model()
    decaying, others = parameter_groups(network, 0.1)
    assert {p.ndim for p in decaying["params"]} == {2}
    assert {p.ndim for p in others["params"]} == {1}
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert (
        sum(p.numel() for group in (decaying, others) for p in group["params"]) == network.count_parameters()
    )


def test_tied_and_frozen_parameters() -> None:
    network = model(tie_output=True, norm_weight=False, bias=False)
    network.embedding.weight.requires_grad_(False)
    groups = parameter_groups(network, 0.1)
    assert len(groups) == 1
    listed = [id(p) for p in groups[0]["params"]]
    assert len(listed) == len(set(listed))
    assert id(network.embedding.weight) not in listed


def test_build_optimizer() -> None:
    optimizer = build_optimizer(model(), lr=2e-3, weight_decay=0.2)
    assert optimizer.defaults["fused"] is True
    assert [group["lr"] for group in optimizer.param_groups] == [2e-3, 2e-3]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert optimizer.param_groups[0]["eps"] == 1e-8
    with pytest.raises(UserError, match="no trainable parameter"):
        build_optimizer(nn.ReLU())
    with pytest.raises(UserError, match="at least 0"):
        build_optimizer(model(), lr=-1.0)
