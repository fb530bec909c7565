"""What other people's projects do: names and keys that mean something else, rough replays, odd steps."""

import argparse
import json
import math
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torchmetrics import MeanMetric, MinMaxMetric

from andrea_callbacks import (
    CoherenceGate,
    FiniteGuard,
    IncoherenceWarning,
    MomentMonitor,
    NonFiniteError,
    PreClipNorm,
    RunEvent,
    RunJournal,
    SpikeForensics,
    UnwatchedWarning,
    publish_event,
    read_journal,
)
from andrea_callbacks.forensics.attribution import attribute
from andrea_callbacks.hooks.update_window import UpdateWindow
from tests.support.projects import DocumentedGAN, TextRows, everything, loader_of, scaler_plugin
from tests.support.toy import NAN, ListLoader, RowLogger, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Precision 16-mixed is not supported"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]


class Traces(pl.LightningModule):
    """Its losses log, update a metric, replace a buffer and zero gradients whenever they are computed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(32, 2)
        self.seen = MeanMetric()
        self.ema: Tensor
        self.register_buffer("ema", torch.zeros(2))

    def sequence_losses(self, batch: Tensor) -> Tensor:
        out = self.layer(batch) - 0.01 * self.ema
        self.ema = 0.9 * self.ema + 0.1 * out.detach().mean(0)
        losses = out.square().sum(1)
        self.log("loss", losses.mean(), on_epoch=True, on_step=False, batch_size=len(batch))
        self.seen.update(losses.detach())
        return losses

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.sequence_losses(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-5)


def spiky(count: int = 60, spike: int | None = 40) -> list[Tensor]:
    rows = TextRows(4 * count).rows.view(count, 4, 32).clone()
    if spike is not None:
        rows[spike - 1, 2] *= 50.0
    return list(rows)


def test_a_replay_leaves_no_trace() -> None:
    """Metrics, buffers that are replaced, gradients, weights: as without the report."""
    found = []
    for callbacks in ([], [spikes := SpikeForensics()]):
        module = Traces()
        trainer = build_trainer(callbacks=callbacks, logger=RowLogger())
        trainer.fit(module, ListLoader(spiky()))
        weights = [each.detach() for each in module.parameters()]
        found.append([trainer.callback_metrics["loss"], module.seen.compute(), module.ema, *weights])
    assert spikes.spikes == 1
    assert Path("reports/update-000040-spike/report.json").exists()
    assert all(map(torch.equal, *found))
    assert "log" not in vars(module)


def zeroing_replay(module: Any, batch: Tensor) -> Tensor:
    module.zero_grad()
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    return module.sequence_losses(batch)


def failing_replay(module: Any, batch: Tensor) -> Tensor:
    module.eval()
    torch.rand(5)
    raise ValueError("no such thing")


@pytest.mark.parametrize("replay", [zeroing_replay, failing_replay])
def test_a_users_replay_may_be_rough(replay: Any) -> None:
    found = []
    for callbacks in ([], [SpikeForensics(replay=replay)]):
        module = Traces()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build_trainer(callbacks=callbacks).fit(module, ListLoader(spiky()))
        found.append([each.detach() for each in module.parameters()])
    assert all(map(torch.equal, *found))
    report = json.loads(Path("reports/update-000040-spike/report.json").read_text())
    if replay is failing_replay:
        assert "raised ValueError: no such thing" in report["attribution"]["unavailable"]
        assert any("update 40: attribution is not available" in str(each.message) for each in caught)
    else:
        assert report["attribution"]["sequences"][0]["identity"]["row"] == 3


def test_keys_may_be_taken_out_of_a_batch() -> None:
    class Popping(Traces):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch.pop("x"), batch_idx)

    spikes = SpikeForensics(replay=lambda module, batch: module.sequence_losses(batch["x"]))
    build_trainer(callbacks=[spikes]).fit(Popping(), ListLoader([{"x": each} for each in spiky()]))
    report = json.loads(Path("reports/update-000040-spike/report.json").read_text())
    assert report["attribution"]["sequences"][0]["identity"]["row"] == 3


class Homonyms(BoringModel):
    """Every name of the protocols, meaning something else."""

    sequence_losses = 3.0
    loss_sum = 0.0
    flops_per_token = "many"
    hyperparameters = argparse.Namespace(lr=0.1)

    def update_report(self) -> None: ...

    def generate(self, input_ids: Tensor) -> Tensor:
        return input_ids

    def count_tokens(self, batch: Any) -> Tensor:
        return torch.ones(3)

    def describe(self) -> None: ...


@pytest.mark.parametrize("spike", [None, 12])
def test_names_that_mean_something_else(spike: int | None, tmp_path: Path) -> None:
    batches = spiky(16, None)
    if spike:
        batches[spike - 1] = batches[spike - 1] * 1e4
    gate = CoherenceGate(every=4, start=0)
    callbacks = [each for each in everything() if not isinstance(each, (CoherenceGate, SpikeForensics))]
    callbacks += [gate, spikes := SpikeForensics(min_history=5)]
    logger = TensorBoardLogger(tmp_path)
    trainer = build_trainer(callbacks=callbacks, logger=logger, limit_val_batches=0)
    with pytest.warns(IncoherenceWarning) as caught:
        trainer.fit(Homonyms(), ListLoader(batches))
    said = [str(each.message) for each in caught if each.category is IncoherenceWarning]
    assert ["any more" in each for each in said] == [False, False, True]
    assert "generate failed (TypeError" in said[0]
    assert trainer.global_step == 16
    assert spikes.spikes >= (spike is not None)


def test_a_guard_is_not_silenced_by_a_name() -> None:
    class Silent(Homonyms):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"] * NAN

    with pytest.raises(NonFiniteError, match="update 1: the loss"):
        build_trainer(callbacks=[FiniteGuard()], limit_val_batches=0).fit(
            Silent(), ListLoader(spiky(4, None))
        )


@pytest.mark.parametrize(
    "extra",
    [
        {"source_id": torch.rand(4)},
        {"source_id": torch.full((4,), 9_999)},
        {"source_id": torch.zeros(4, 2, dtype=torch.int64)},
        {"num_tokens": torch.ones(4)},
        {"num_tokens": "four"},
        {"source_id": torch.zeros(4, dtype=torch.int64), "valid_mask": torch.full((4, 32), -math.inf)},
        {"source_id": torch.zeros(4, dtype=torch.int64), "valid_mask": torch.ones(2, 32, dtype=torch.bool)},
        {"input_ids": torch.rand(4, 3), "document_id": torch.rand(4)},
    ],
)
def test_keys_that_mean_something_else(extra: dict[str, Any]) -> None:
    class Keyed(Traces):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["x"], batch_idx)

    batches = [{"x": each, **extra} for each in spiky(30, 25)]
    callbacks = everything()
    spikes = next(each for each in callbacks if isinstance(each, SpikeForensics))
    spikes.replay = lambda module, batch: module.sequence_losses(batch["x"])
    build_trainer(callbacks=callbacks, logger=RowLogger()).fit(Keyed(), ListLoader(batches))
    assert Path("reports/update-000025-spike/report.json").exists()


def test_scaler_that_never_comes_to_rest() -> None:
    """fairseq#4555 under automatic optimization: logged, warned about, and not for ever."""

    class Bad(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)["loss"]
            loss.register_hook(lambda gradient: gradient * NAN)
            return loss

    logger = RowLogger()
    trainer = build_trainer(
        callbacks=[FiniteGuard()], plugins=[scaler_plugin()], logger=logger, limit_val_batches=0
    )
    with (
        pytest.warns(UserWarning, match="update 5: 5 overflows in a row, the loss scale is down to 64"),
        pytest.raises(NonFiniteError, match="update 11: 11 overflows in a row"),
    ):
        trainer.fit(Bad())
    assert logger.series("train/loss_scale")[:3] == [(1, 1024.0), (2, 512.0), (3, 256.0)]


def test_optimizers_are_judged_apart() -> None:
    class OneBad(DocumentedGAN):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            hooks = [p.register_hook(lambda g: g * NAN) for p in self.discriminator.parameters()]
            super().training_step(batch, batch_idx)
            for hook in hooks:
                hook.remove()

    guard = FiniteGuard(policy="skip", max_consecutive=3)
    with pytest.raises(NonFiniteError, match="4 in a row"):
        build_trainer(callbacks=[guard]).fit(OneBad(), loader_of("manual"))


@pytest.mark.parametrize("which", [0, 1])
def test_state_of_every_optimizer_is_looked_at(which: int) -> None:
    class Spoil(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:  # before updates 7 and 8, the fourth of each
                next(iter(trainer.optimizers[which].state.values()))["exp_avg"].view(-1)[0] = math.inf

    trainer = build_trainer(callbacks=[Spoil(), FiniteGuard(state_every=4)])
    with pytest.raises(NonFiniteError, match="exp_avg of"):
        trainer.fit(DocumentedGAN(), loader_of("manual"))


class Unscaling(ManualOptimBoringModel):
    """Manual optimization that unscales a fused optimizer itself, to clip."""

    def __init__(self, bad: int | None = None) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.bad = bad

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.step(batch) * (NAN if batch_idx == self.bad else 1.0)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.trainer.precision_plugin.scaler.unscale_(optimizer.optimizer)  # type: ignore[union-attr]
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def test_gradients_that_a_module_unscaled_itself() -> None:
    logger, norms = RowLogger(), []

    class Norms(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            squares = [float(p.grad.double().square().sum()) for p in pl_module.parameters()]
            norms.append(math.sqrt(sum(squares)))

    options: dict[str, Any] = {"plugins": [scaler_plugin()], "limit_train_batches": 6, "limit_val_batches": 0}
    build_trainer(callbacks=[PreClipNorm(), Norms()], logger=logger, **options).fit(Unscaling())
    assert [value for _, value in logger.series("train/grad_norm")] == pytest.approx(norms, rel=1e-6)
    guard = FiniteGuard(policy="skip")
    options["plugins"] = [scaler_plugin()]
    trainer = build_trainer(callbacks=[guard], **options)
    trainer.fit(module := Unscaling(bad=2))
    assert guard.flagged == 1
    assert all(torch.isfinite(each).all() for each in module.parameters())


def test_gate_samples_though_steps_pass_over_multiples() -> None:
    class Odd(ManualOptimBoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for _ in range(1 if batch_idx == 0 else 2):
                super().training_step(batch, batch_idx)

    text = ["the loss of the model fell in every epoch while its norm was small and no update was lost"]
    gate = CoherenceGate(every=10, start=0, generate=lambda *_: text * 3, known=text[0].split())
    logger = RowLogger()
    trainer = build_trainer(callbacks=[gate], logger=logger, limit_train_batches=16, limit_val_batches=0)
    trainer.fit(Odd())
    assert [step for step, _ in logger.series("coherence/score")] == [11, 21, 31]


def test_late_verdicts_join_their_own_step(read_late: Any) -> None:
    """What is known of update k during k + 1 stands in the one row of update k."""
    read_late()
    logger = RowLogger()
    trainer = build_trainer(callbacks=[SpikeForensics(), PreClipNorm()], logger=logger)
    trainer.fit(Traces(), ListLoader(spiky(130, None)))
    own = [step for step, row in logger.rows if any(name.startswith("train/") for name in row)]
    assert own == list(range(1, 131))


def test_a_second_fit_starts_afresh() -> None:
    """Statistics, warnings and counts of the first fit say nothing of the second."""
    spikes, clip, guard = SpikeForensics(), PreClipNorm(), FiniteGuard(policy="flag")
    callbacks = [spikes, clip, guard, MomentMonitor()]
    fresh = [each.state_dict() for each in callbacks]
    build_trainer(callbacks=callbacks).fit(Traces(), ListLoader(spiky()))
    assert [each.state_dict() for each in callbacks] != fresh
    build_trainer(callbacks=callbacks, max_steps=0).fit(Traces(), ListLoader(spiky()))
    assert [each.state_dict() for each in callbacks] == fresh


def test_monitor_does_not_count_what_the_guard_skipped() -> None:
    monitor = MomentMonitor()
    trainer = build_trainer(callbacks=[monitor])
    details = {"norm": 5.0, "clip_threshold": math.inf}
    publish_event(trainer, RunEvent(kind="spike", update=3, message="", details=details))
    publish_event(trainer, RunEvent(kind="nonfinite", update=5, message="", details={"skipped": True}))
    publish_event(trainer, RunEvent(kind="nonfinite", update=6, message="", details={"skipped": False}))
    assert monitor._spikes["0"].skipped == [5]


def test_shares_of_norms_beyond_float32() -> None:
    class Huge(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def sequence_losses(self, batch: Tensor) -> Tensor:
            return (self.w * batch).sum(1)

    module, trainer = Huge(), build_trainer()
    batch = torch.tensor([[1e22, 0.0, 0.0], [0.0, 1e22, 1e22]])
    window = UpdateWindow(number=1, micro_batches=[batch], states=[None])
    whole = [batch.sum(0)]
    found = attribute(trainer, module, window, module.sequence_losses, [module.w], whole, 3**0.5 * 1e22)
    assert [part.share for part in found.sequences] == pytest.approx([2 / 3, 1 / 3])
    assert [part.without for part in found.sequences] == pytest.approx([1e22, 2**0.5 * 1e22])


def test_any_event_is_journalled() -> None:
    class Talk(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            details = {"kind": "x", "update": "y", "trainer": 1, "figures": 2, "message": "z"}
            publish_event(trainer, RunEvent(kind="own", update=0, message="said", details=details))

    options: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 1}
    build_trainer(callbacks=[RunJournal(), Talk()], **options).fit(BoringModel())
    row = next(row for row in read_journal("journal.jsonl") if row["kind"] == "own")
    assert (row["update"], row["message"], row["trainer"]) == (0, "said", 1)


def test_a_dry_run_writes_nothing() -> None:
    build_trainer(callbacks=everything(), fast_dev_run=True).fit(BoringModel())
    assert not Path("journal.jsonl").exists()
    assert not Path("reports").exists()


def test_batches_are_let_go() -> None:
    """Nothing is held after a fit, and little where nobody is seen to step."""

    class Unseen(ManualOptimBoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            loss = self.step(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    spikes, most = SpikeForensics(), []

    class Count(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            most.append(len(spikes.window.micro_batches))

    trainer = build_trainer(callbacks=[spikes, Count()], limit_val_batches=0)
    with pytest.warns(UnwatchedWarning):
        trainer.fit(Unseen(), ListLoader(spiky(200, None)))
    assert max(most) <= 64
    assert not spikes.window.micro_batches
    assert not spikes.previous.micro_batches


@pytest.mark.parametrize("bad", [torch.ones(3), None, "one text", ["too", "few"], [1, 2, 3]])
def test_generate_that_returns_something_else(bad: Any) -> None:
    gate = CoherenceGate(every=2, start=0, patience=2, generate=lambda *_: bad, known=["a"])
    trainer = build_trainer(callbacks=[gate], limit_train_batches=8, limit_val_batches=0)
    with pytest.warns(IncoherenceWarning) as caught:
        trainer.fit(BoringModel())
    said = [str(each.message) for each in caught if each.category is IncoherenceWarning]
    assert ["any more" in each for each in said] == [False, True]
    assert "generate must return a list of 3 texts, got " in said[0]
    assert gate.known == frozenset({"a"})
    assert trainer.global_step == 8


def test_metrics_of_a_module_are_left_whole() -> None:
    """Metrics that wrap others, and that hold a loss with its graph, are no obstacle and stay as they are."""

    class Measured(Traces):
        def __init__(self) -> None:
            super().__init__()
            self.base = MeanMetric()
            self.wrapper = MinMaxMetric(self.base)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.seen(loss)
            self.wrapper(loss.detach())
            return loss

    module = Measured()
    build_trainer(callbacks=[SpikeForensics()]).fit(module, ListLoader(spiky()))
    report = json.loads(Path("reports/update-000040-spike/report.json").read_text())
    assert report["attribution"]["sequences"][0]["identity"]["row"] == 3
    assert module.wrapper._base_metric is module.base


def test_statistics_go_on_where_the_trainer_does() -> None:
    guard, spikes = FiniteGuard(policy="flag"), SpikeForensics()
    trainer = build_trainer(callbacks=[guard, spikes])
    trainer.fit(module := Traces(), ListLoader(spiky()))
    guard.flagged = 7
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, ListLoader(spiky(60, None)))
    assert trainer.global_step == 120
    assert (guard.flagged, spikes.spikes) == (7, 1)


def test_replay_runs_in_the_modes_of_the_update(read_late: Any) -> None:
    """A late verdict may come when validation has put the module into eval mode."""
    read_late()
    modes: list[bool] = []

    class Validated(Traces):
        def sequence_losses(self, batch: Tensor) -> Tensor:
            modes.append(self.training)
            return super().sequence_losses(batch)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            assert not self.training

    trainer = build_trainer(callbacks=[spikes := SpikeForensics()], val_check_interval=40)
    trainer.fit(Validated(), ListLoader(spiky()), ListLoader(spiky(1, None)))
    assert spikes.spikes == 1
    assert len(modes) > 60
    assert all(modes)


def test_skipped_updates_are_journalled_as_such() -> None:
    class Bad(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"] * (NAN if batch_idx == 1 else 1.0)

    options: dict[str, Any] = {"limit_train_batches": 3, "limit_val_batches": 0}
    build_trainer(callbacks=[FiniteGuard(policy="skip"), RunJournal()], **options).fit(Bad())
    row = next(row for row in read_journal("journal.jsonl") if (row["kind"], row["update"]) == ("update", 2))
    assert (row["outcome"], row["loss"], row["grad_norm"]) == ("nonfinite_skip", "NaN", "NaN")
