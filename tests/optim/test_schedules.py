"""Schedules: their factors, and what is refused."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from andrea_pl import build_scheduler
from andrea_pl.optim import warmup_cosine


def test_warm_up_and_cosine() -> None:
    """The first of ten takes a tenth, the tenth the whole rate; then half a cosine to the floor."""
    rates = [warmup_cosine(index, 100, 10) for index in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == 0.0
    assert warmup_cosine(500, 100, 10) == 0.0
    assert warmup_cosine(55, 100, 10, min_lr_ratio=0.2) == pytest.approx(0.6)
    assert warmup_cosine(100, 100, 10, min_lr_ratio=0.2) == pytest.approx(0.2)
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
