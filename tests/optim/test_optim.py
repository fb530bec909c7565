"""Parameter groups, schedules and the clip."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from andrea_pl import RoPELanguageModel, TransformerConfig, UserError, build_optimizer, build_scheduler
from andrea_pl.optim import parameter_groups, warmup_cosine


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


def test_warm_up_and_cosine() -> None:
    """The first of ten takes a tenth, the tenth the whole rate; then half a cosine to the floor."""
    rates = [warmup_cosine(index, 100, 10) for index in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == 0.0
    assert warmup_cosine(500, 100, 10) == 0.0
    assert warmup_cosine(55, 100, 10, floor=0.2) == pytest.approx(0.6)
    assert warmup_cosine(100, 100, 10, floor=0.2) == pytest.approx(0.2)
    assert all(earlier >= later for earlier, later in pairwise(rates[10:]))


def test_scheduler_of_the_first_seed() -> None:
    """60 updates at 3e-3 with a warm-up of 5: the first update uses 6e-4."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3e-3)
    scheduler = build_scheduler(optimizer, total_updates=60, warmup_updates=5)
    used = []
    for _ in range(60):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert used[:6] == pytest.approx([6e-4, 1.2e-3, 1.8e-3, 2.4e-3, 3e-3, 3e-3])
    assert used[32] == pytest.approx(3e-3 * 0.5 * (1 + math.cos(math.pi * 27 / 55)))


@pytest.mark.parametrize(("total", "warmup"), [(0, 0), (5, 5), (5, -1), (5, 6)])
def test_refused_schedules(total: int, warmup: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="0 <= warmup_updates < total_updates"):
        build_scheduler(optimizer, total, warmup)
