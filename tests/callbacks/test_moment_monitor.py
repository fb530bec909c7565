"""Moments: the second seed's exercise, a spike followed through a real AdamW, and weights that moved."""

import math

import pytest
import torch
from torch import nn

from andrea_callbacks import MomentMonitor, RunEvent, SpikeForensics
from andrea_callbacks.hooks.events import publish_event
from tests.support.projects import Given, gradients
from tests.support.toy import ListLoader, RowLogger, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_spike_is_followed_through_adamw(clip: float | None) -> None:
    """Every figure against the optimizer's own recurrence, in float64."""
    batches, logger = gradients(spike_at=30), RowLogger()
    callbacks = [SpikeForensics(max_reports=0), MomentMonitor(every=10)]
    trainer = build_trainer(callbacks=callbacks, logger=logger, gradient_clip_val=clip)
    module = Given()
    trainer.fit(module, ListLoader(batches))
    first, second = torch.zeros(6).double(), torch.zeros(6).double()
    rows: dict[int, dict[str, float]] = {step: row for step, row in logger.rows if "moments/first/1" in row}
    assert sorted(rows) == [1, 11, 21, *range(30, 52)]
    spike = 0.0
    for step, gradient in enumerate(batches, start=1):
        g = gradient.double()
        if clip is not None and float(g.norm()) > clip:
            g = g * clip / (g.norm() + 1e-6)
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
        spike = float(g.norm()) if step == 30 else spike
        row = rows.get(step)
        if row is None:
            continue
        assert row["moments/first/matrices"] == pytest.approx(float(first[:4].norm()), rel=1e-5)
        assert row["moments/second/1"] == pytest.approx(math.sqrt(float(second[4:].sum())), rel=1e-5)
        if step < 30:
            assert "moments/spike_first_fraction" not in row
            continue
        age = step - 30
        share = min(0.1 * 0.9**age * spike / float(first.norm()), 1.0)
        damped = 0.001 * 0.999**age * spike**2 / float(second.sum())
        assert row["moments/spike_first_fraction"] == pytest.approx(share, rel=1e-4)
        assert row["moments/spike_lr_factor"] == pytest.approx(math.sqrt(1 - damped), rel=1e-3, abs=1e-3)
        left = max(math.ceil(math.log(0.01 / share) / math.log(0.9) - 1e-9), 0)
        assert row["moments/spike_first_updates_left"] == pytest.approx(left, abs=1)


def test_the_larger_rest_is_followed_and_skipped_updates_do_not_count() -> None:
    monitor = MomentMonitor()
    trainer = build_trainer(callbacks=[monitor])
    trainer.strategy.optimizers = [torch.optim.Adam([nn.Parameter(torch.zeros(1))])]

    def spike(update: int, norm: float, threshold: float | None = float("inf")) -> None:
        details = {"norm": norm, "clip_threshold": threshold}
        publish_event(trainer, RunEvent(kind="spike", update=update, message="", details=details))

    spike(10, 50.0, None)  # what enters the moments is not known
    assert not monitor.state_dict()["spikes"]
    spike(10, 50.0)
    spike(12, 20.0)  # 50 * 0.81 is left of the first
    followed = {"update": 10, "step": 10, "norm": 50.0, "skipped": []}
    assert monitor.state_dict()["spikes"] == {"0": followed}
    monitor.take_report(trainer, {"outcome": "nonfinite_skip", "update": 13})
    assert monitor.state_dict()["spikes"] == {"0": followed | {"skipped": [13]}}
    spike(14, 40.0)  # 36.45 is left by now, as update 13 did not count: 32.8 otherwise
    spike(30, 100.0, 20.0)
    assert monitor.state_dict()["spikes"] == {"0": {"update": 30, "step": 30, "norm": 20.0, "skipped": []}}
