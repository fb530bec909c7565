"""Several optimizers in turns, and optimizers that evaluate their loss more than once in a step."""

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.utils.data import DataLoader

from andrea_callbacks import (
    FiniteGuard,
    MomentMonitor,
    NonFiniteError,
    PreClipNorm,
    RunEvent,
    RunJournal,
    SpikeForensics,
    publish_event,
    read_journal,
)
from tests.support.projects import TextRows, everything
from tests.support.toy import ListLoader, RowLogger, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning"),
]


class CriticAndGenerator(pl.LightningModule):
    """Four steps of a critic for one of a generator, in every batch or over five batches."""

    def __init__(self, spread: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic, self.generator = nn.Linear(32, 1), nn.Linear(4, 32)
        self.spread = spread

    def step_of(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        critic, generator = self.optimizers()  # type: ignore[misc]
        noise = torch.ones(len(batch), 4)
        turns = [batch_idx % 5] if self.spread else range(5)
        for turn in turns:
            if turn < 4:
                self.step_of(
                    critic, self.critic(self.generator(noise).detach()).mean() - self.critic(batch).mean()
                )
            else:
                self.step_of(generator, -self.critic(self.generator(noise)).mean())

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-4) for part in (self.critic, self.generator)]


@pytest.mark.system
@pytest.mark.parametrize(("spread", "right"), [(False, (80, 20)), (True, (16, 4))])
def test_each_optimizer_is_recorded_as_often(spread: bool, right: tuple[int, int]) -> None:
    """Lightning#2737: critic 4 times, then the generator, 500 batches, every 25: was 0 for the generator."""
    logger = RowLogger()
    callbacks = [PreClipNorm(every=25), MomentMonitor(every=25)]
    trainer = build_trainer(callbacks=callbacks, logger=logger)
    trainer.fit(CriticAndGenerator(spread), ListLoader([TextRows(2).rows] * 500))
    for scalar in ("grad_norm_group", "update_ratio", "moments/first", "moments/update"):
        assert tuple(len(logger.series(f"{scalar}/{place}/0")) for place in (0, 1)) == right, scalar


@pytest.mark.system
def test_counts_go_on_after_a_resume(tmp_path: Any) -> None:
    batches = [TextRows(2).rows] * 40
    trainer = build_trainer(callbacks=[PreClipNorm(every=7)], max_steps=65)
    trainer.fit(CriticAndGenerator(), ListLoader(batches))
    trainer.save_checkpoint(tmp_path / "cut.ckpt")
    straight, resumed = RowLogger(), RowLogger()
    trainer = build_trainer(callbacks=[PreClipNorm(every=7)], logger=straight)
    trainer.fit(CriticAndGenerator(), ListLoader(batches))
    trainer = build_trainer(callbacks=[PreClipNorm(every=7)], logger=resumed, max_epochs=2)
    trainer.fit(CriticAndGenerator(), ListLoader(batches), ckpt_path=tmp_path / "cut.ckpt")
    for place in (0, 1):
        right = [step for step, _ in straight.series(f"update_ratio/{place}/0") if step > 65]
        found = [step for step, _ in resumed.series(f"update_ratio/{place}/0")]
        assert found[:2] == right[:2]


def test_a_spike_stays_with_its_optimizer() -> None:
    """Two steps of the critic after its spike; the generator's moments have nothing of it."""

    class Spike(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 10:  # the critic's ninth step
                details = {"norm": 50.0, "clip_threshold": float("inf"), "optimizer": "0"}
                publish_event(trainer, RunEvent(kind="spike", update=11, message="", details=details))

    logger, monitor = RowLogger(), MomentMonitor(every=1)
    trainer = build_trainer(callbacks=[Spike(), monitor], logger=logger, limit_train_batches=3)
    trainer.fit(CriticAndGenerator(), ListLoader([TextRows(2).rows] * 3))
    assert [step for step, _ in logger.series("moments/spike_first_updates_left/0")] == [11, 12, 13, 14]
    assert logger.series("moments/spike_first_updates_left/1") == []
    assert monitor.state_dict()["spikes"]["0"]["step"] == 9


class Lbfgs(BoringModel):
    """Four evaluations of the loss in every step, under automatic optimization."""

    def __init__(self, poison: int | None = None) -> None:
        super().__init__()
        self.calls, self.poison = 0, poison

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.calls += 1
        factor = float("nan") if self.calls == self.poison else 1.0
        return {"loss": self.step(batch) * factor}

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1e-3, max_iter=4)


def rows() -> DataLoader[Tensor]:
    return DataLoader(TextRows(32), batch_size=2)


def test_one_row_an_update_whatever_is_evaluated() -> None:
    """Lightning#4188: was one line for every evaluation, 64 for 16 updates."""
    logger, forensics, module = RowLogger(), SpikeForensics(min_history=5), Lbfgs()
    others = [each for each in everything() if not isinstance(each, SpikeForensics)]
    trainer = build_trainer(callbacks=[*others, forensics], logger=logger, limit_val_batches=0)
    trainer.fit(module, rows())
    assert module.calls >= 32
    updates = [row["update"] for row in read_journal("journal.jsonl") if row["kind"] == "update"]
    assert updates == list(range(1, 17))
    assert [step for step, _ in logger.series("train/grad_norm")] == list(range(1, 17))
    assert [step for step, _ in logger.series("train/spikes")] == list(range(1, 17))
    assert forensics.steps.of("0") == 16


def test_the_first_evaluation_is_the_updates() -> None:
    """Its gradient is that of the weights that the update starts from; torch's own step returns its loss."""
    torch.manual_seed(3)
    module, norms = Lbfgs(), []

    class Before(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
            gradients = torch.autograd.grad(pl_module.step(batch), list(pl_module.parameters()))
            norms.append(float(torch.cat([each.double().flatten() for each in gradients]).norm()))

    build_trainer(callbacks=[Before(), RunJournal()], limit_val_batches=0).fit(module, rows())
    found = [row["grad_norm"] for row in read_journal("journal.jsonl") if row["kind"] == "update"]
    assert found == pytest.approx(norms, rel=1e-6)


def test_a_nan_within_a_step_does_not_claim_that_weights_are_as_before() -> None:
    with pytest.raises(NonFiniteError, match=r"update 1: .*LBFGS was within its step, and may have moved"):
        build_trainer(callbacks=[FiniteGuard()], limit_val_batches=0).fit(Lbfgs(poison=3), rows())
    with pytest.raises(NonFiniteError, match=r"update 1: .*weights and optimizer state are as before it"):
        build_trainer(callbacks=[FiniteGuard()], limit_val_batches=0).fit(Lbfgs(poison=1), rows())


def test_a_nan_is_counted_once_a_step() -> None:
    guard = FiniteGuard(policy="flag", max_consecutive=2)

    class Always(Lbfgs):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return {"loss": self.step(batch) * float("nan")}

    with pytest.raises(NonFiniteError, match="3 in a row"):
        build_trainer(callbacks=[guard], limit_val_batches=0).fit(Always(), rows())
    assert guard.flagged == 3
    assert Counter(guard._consecutive) == {"0": 3}


def test_several_steps_of_one_optimizer_in_a_batch() -> None:
    """Adam at rate 0.01 moves each of ten equal weights by 0.01 a step, whichever inner step is recorded."""

    class Inner(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.w = nn.Parameter(torch.ones(10))

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            for _ in range(4):
                optimizer.zero_grad()
                self.manual_backward(self.w.sum())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    logger = RowLogger()
    callbacks = [MomentMonitor(every=3), PreClipNorm(every=3)]
    build_trainer(callbacks=callbacks, logger=logger).fit(Inner(), ListLoader([torch.zeros(1)] * 6))
    found = logger.series("moments/update/0")
    assert [step for step, _ in found] == list(range(1, 25, 3))
    assert [value for _, value in found] == pytest.approx([0.01 * 10**0.5] * 8, rel=1e-3)
    first = [value for _, value in logger.series("moments/first/0")]
    right = [(1 - 0.9**step) * 10**0.5 for step, _ in found]
    assert first == pytest.approx(right, rel=1e-5)
