"""Moments: the second seed's exercise, a spike followed through a real AdamW, and weights that moved."""

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from andrea_callbacks import MomentMonitor, PreClipNorm, RunEvent, SpikeForensics, moment_trace
from andrea_callbacks.events import publish_event
from toy import ListLoader, RowLogger, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
]


def test_the_seeds_exercise() -> None:
    """A gradient of norm 50 among 0.5."""
    trace = moment_trace(spike=50.0, typical=0.5, updates=10, beta1=0.9)
    assert trace.first_from_spike[0] == pytest.approx(5.0)
    assert trace.first_from_spike[10] == pytest.approx(1.743, abs=5e-4)
    assert trace.half_life_first == pytest.approx(6.58, abs=5e-3)
    assert trace.half_life_second == pytest.approx(692.8, abs=0.05)
    assert trace.first[0] == pytest.approx(5.45)  # 0.9 * 0.5 besides
    clipped = moment_trace(spike=50.0, typical=0.5, updates=10, max_norm=1.0)
    assert clipped.first_from_spike[0] == pytest.approx(0.1)
    assert clipped.share_of_first[0] == pytest.approx(0.1 / 0.55)
    assert trace.rate_factor[0] == pytest.approx(0.5 * math.sqrt(0.999) / math.sqrt(2.5 + 0.999 * 0.25))


@given(
    st.floats(0.1, 1e3),
    st.floats(0.01, 10.0),
    st.floats(0.0, 0.99),
    st.floats(0.5, 0.9999),
    st.integers(0, 30),
)
def test_trace_is_adam(spike: float, typical: float, beta1: float, beta2: float, updates: int) -> None:
    """Against the recurrence itself, started where it was steady."""
    trace = moment_trace(spike, typical, updates, beta1, beta2)
    first, second = typical, typical**2
    for k in range(updates + 1):
        gradient = typical if k else spike
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        assert trace.first[k] == pytest.approx(first)
        assert trace.second[k] == pytest.approx(second)


@pytest.mark.parametrize("bad", [{"beta1": 1.0}, {"beta2": -0.1}, {"updates": -1}, {"spike": -1.0}])
def test_trace_refuses(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="moment_trace: "):
        moment_trace(**({"spike": 1.0, "typical": 1.0, "updates": 1} | bad))


class Given(pl.LightningModule):
    """Gradients as the batches say, in one direction each."""

    def __init__(self, build: Any = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.v = nn.Parameter(torch.ones(2))
        self.build = build

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * batch[:4]).sum() + (self.v * batch[4:]).sum()

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.w], "name": "matrices"}, {"params": [self.v]}]
        return torch.optim.AdamW(groups, lr=1e-3) if self.build is None else self.build(groups)


def gradients(spike_at: int | None = None, count: int = 60) -> list[Tensor]:
    rows = torch.randn(count, 6, generator=torch.Generator().manual_seed(2)) * 0.1 + 0.5
    if spike_at is not None:
        rows[spike_at - 1] *= 100.0
    return list(rows)


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
            assert "moments/spike_in_first" not in row
            continue
        age = step - 30
        share = min(0.1 * 0.9**age * spike / float(first.norm()), 1.0)
        damped = 0.001 * 0.999**age * spike**2 / float(second.sum())
        assert row["moments/spike_in_first"] == pytest.approx(share, rel=1e-4)
        assert row["moments/rate_factor"] == pytest.approx(math.sqrt(1 - damped), rel=1e-3, abs=1e-3)
        left = max(math.ceil(math.log(0.01 / share) / math.log(0.9) - 1e-9), 0)
        assert row["moments/updates_until_gone"] == pytest.approx(left, abs=1)


def test_actual_update_and_its_ratio_to_the_weights() -> None:
    logger, seen = RowLogger(), []

    class Keep(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.before = [each.detach().double().clone() for each in (pl_module.w, pl_module.v)]

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            after = [each.detach().double() for each in (pl_module.w, pl_module.v)]
            seen.append(
                [(float(b.norm()), float((a - b).norm())) for a, b in zip(after, self.before, strict=True)]
            )

    callbacks = [Keep(), MomentMonitor(every=5), PreClipNorm(every=5)]
    build_trainer(callbacks=callbacks, logger=logger).fit(Given(), ListLoader(gradients(count=12)))
    for place, group in enumerate(("matrices", "1")):
        moved = logger.series(f"moments/update/{group}")
        assert [step for step, _ in moved] == [1, 6, 11]
        assert [value for _, value in moved] == pytest.approx(
            [seen[at][place][1] for at in (0, 5, 10)], rel=1e-4
        )
        ratios = [value for _, value in logger.series(f"update_ratio/{group}")]
        right = [seen[at][place][1] / seen[at][place][0] for at in (0, 5, 10)]
        assert ratios == pytest.approx(right, rel=1e-4)


def test_other_optimizers_have_their_update_recorded() -> None:
    logger = RowLogger()
    module = Given(lambda groups: torch.optim.SGD(groups, lr=0.1))
    build_trainer(callbacks=[MomentMonitor(every=4)], logger=logger).fit(
        module, ListLoader(gradients(count=8))
    )
    assert [step for step, _ in logger.series("moments/update/matrices")] == [1, 5]
    assert logger.series("moments/first/matrices") == []


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
