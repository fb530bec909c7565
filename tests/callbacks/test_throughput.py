"""Throughput: tokens, padding, phases that add up, and FLOP/s."""

import sys
import time
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from andrea_callbacks import Throughput, throughput
from andrea_pl import DynamicPaddingCollator, LanguageModule, TransformerConfig, Window
from andrea_pl.training import update
from tests.support.toy import ListLoader, RowLogger, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
]
SHAPE = TransformerConfig(vocab_size=40, block_size=8, d_model=16, n_heads=2, n_layers=2)


def text_windows(count: int) -> list[Window]:
    """Return windows of 2 + 1 sequences of 8, 4 and 6 labels: 18 of 22 places are text."""
    collate = DynamicPaddingCollator(0)
    rows = [torch.randint(1, 40, (size + 1,)) for size in (8, 4, 6)]
    items = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
    return [Window([collate(items[:2]), collate(items[2:])]) for _ in range(count)]


class Clock:
    """Stands for `time`: only what sleeps takes time, and a microsecond each look at the clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Have updates take as long as they say, however busy the machine is."""
    clock = Clock()
    for module in (sys.modules[__name__], throughput, update):
        monkeypatch.setattr(module, "time", clock)
    return clock


class Slow(LanguageModule):
    """Every phase takes its time."""

    def loss_sum(self, micro_batch: Any) -> Tensor:
        time.sleep(0.01)
        loss = super().loss_sum(micro_batch)
        loss.register_hook(lambda gradient: (time.sleep(0.02), gradient)[1])
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        time.sleep(0.03)


class SlowLoader(ListLoader):
    def __iter__(self) -> Any:
        for each in self.batches:
            time.sleep(0.04)
            yield each


@pytest.mark.usefixtures("clock")
def test_tokens_padding_and_phases() -> None:
    logger, module = RowLogger(), Slow(SHAPE, schedule="constant")
    trainer = build_trainer(callbacks=[Throughput(every=4)], logger=logger)
    trainer.fit(module, SlowLoader(text_windows(8)))
    assert [step for step, _ in logger.series("throughput/tokens_per_second")] == [4, 8]
    last = {name: value for _, row in logger.rows for name, value in row.items() if "throughput" in name}
    assert last["throughput/padding_share"] == pytest.approx(4 / 22)
    assert last["throughput/tokens_per_second"] == pytest.approx(18 * last["throughput/updates_per_second"])
    assert last["throughput/tokens_per_second"] == pytest.approx(18 / 0.13, rel=1e-3)
    flops = module.flops_per_token * last["throughput/tokens_per_second"]
    assert last["throughput/flops_per_second"] == pytest.approx(flops)
    seconds = {name.rpartition("_")[2]: value for name, value in last.items() if "seconds_" in name}
    assert set(seconds) == {"data", "forward", "backward", "clip", "step", "other"}
    for phase, expected in {"data": 0.04, "forward": 0.02, "backward": 0.04, "step": 0.03}.items():
        assert seconds[phase] == pytest.approx(expected, rel=1e-3), phase
    assert 0 < seconds["clip"] < 1e-4
    whole = 1 / last["throughput/updates_per_second"]
    assert sum(seconds.values()) == pytest.approx(whole, rel=0.05)


def test_flops_agree_with_torchs_count() -> None:
    """6N a token and the attention of full sequences; torch counts the whole of S x S, masked or not."""
    shape = TransformerConfig(vocab_size=512, block_size=64, d_model=64, n_heads=2, n_layers=3)
    module = LanguageModule(shape)
    ids = torch.randint(0, 512, (2, 64))
    counter = FlopCounterMode(display=False)
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        module.network(ids).sum().backward()
    attention = 6 * shape.n_layers * shape.d_model * shape.block_size
    counted = counter.get_total_flops() / ids.numel() - attention  # half of what is counted is masked
    assert module.flops_per_token == pytest.approx(counted, rel=0.05)


def test_foreign_module_has_what_can_be_known() -> None:
    logger = RowLogger()
    trainer = build_trainer(
        callbacks=[Throughput(every=2)], logger=logger, limit_train_batches=8, limit_val_batches=0
    )
    trainer.fit(BoringModel())
    names = {name for _, row in logger.rows for name in row}
    assert "throughput/updates_per_second" in names
    assert "throughput/seconds_step" in names
    assert not names & {
        "throughput/tokens_per_second",
        "throughput/padding_share",
        "throughput/flops_per_second",
        "throughput/seconds_clip",
    }


def test_foreign_batches_that_count_their_tokens() -> None:
    class Text(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["x"], batch_idx)

    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 2:] = False
    batch = {"x": torch.ones(2, 32), "num_tokens": 7, "valid_mask": mask}
    logger = RowLogger()
    trainer = build_trainer(callbacks=[Throughput(every=3)], logger=logger, accumulate_grad_batches=2)
    trainer.fit(Text(), ListLoader([batch] * 12))
    rate = dict(logger.series("throughput/updates_per_second"))
    tokens = dict(logger.series("throughput/tokens_per_second"))
    assert sorted(tokens) == [3, 6]
    assert tokens[6] == pytest.approx(14 * rate[6])
    assert logger.series("throughput/padding_share") == [(3, pytest.approx(0.3)), (6, pytest.approx(0.3))]


@pytest.mark.usefixtures("clock")
def test_validation_is_not_counted() -> None:
    class Validated(BoringModel):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            time.sleep(0.2)

    logger = RowLogger()
    trainer = build_trainer(
        callbacks=[Throughput(every=4)],
        logger=logger,
        val_check_interval=2,
        limit_train_batches=4,
        limit_val_batches=2,
    )
    trainer.fit(Validated())
    assert logger.series("throughput/updates_per_second")[0][1] > 4 / 0.4
