"""FiniteGuard: planted faults are named by layer, parameter and sequence, and never reach the weights."""

import json
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn

from andrea_callbacks import FiniteGuard, NonFiniteError, PreClipNorm, SpikeForensics
from andrea_pl import Window
from tests.support.projects import BoringAdam, Foreign, TextRows, foreign_batches, scaler_plugin
from tests.support.toy import INF, NAN, ListLoader, RowLogger, ToyU, build_trainer, fit, window

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Precision 16-mixed is not supported"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
]


REPLAY = pytest.mark.parametrize(
    "replay", [None, lambda module, batch: module.losses(batch)], ids=["", "replay"]
)


@REPLAY
@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_skip_under_automatic_optimization(kind: str, accumulate: int, replay: Any) -> None:
    """The bad update might never have been: weights, moments and schedule are those of a run without it."""
    bad = 3 if accumulate == 1 else 10  # the second micro-batch of update 3
    module, guard = Foreign(kind), FiniteGuard(policy="skip", replay=replay)
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0}
    torch.manual_seed(1)
    trainer = build_trainer(callbacks=[guard, PreClipNorm()], **options)
    trainer.fit(module, ListLoader(foreign_batches({bad})))
    assert guard.flagged == 1
    assert trainer.global_step == 112 // accumulate
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.last_epoch == trainer.global_step - 1
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 / trainer.global_step)
    steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert steps == {trainer.global_step - 1}
    origin = json.loads(Path("reports/update-000003-nonfinite/report.json").read_text())["origin"]
    if replay is None:
        assert "no replay= was given" in origin["unavailable"]
        return
    assert origin[0]["micro_batch"] == (1 if accumulate == 1 else 2)
    assert [each["row"] for each in origin[0]["sequences"]] == [2]
    assert origin[0]["phase"] == ("loss" if kind == "loss" else "backward")
    assert origin[0]["parameter"] == (None if kind == "loss" else "layers.3.bias")


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_raise_under_automatic_optimization(kind: str) -> None:
    module, guard = Foreign(kind), FiniteGuard(replay=lambda module, batch: module.losses(batch))
    before: list[list[Tensor]] = []

    class Before(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            before.append([each.detach().clone() for each in pl_module.parameters()])

    trainer = build_trainer(callbacks=[Before(), guard])
    with pytest.raises(NonFiniteError, match=r"update 3: .* as before it; micro-batch 1 of 1, row 2: "):
        trainer.fit(module, ListLoader(foreign_batches({3})))
    assert all(map(torch.equal, before[2], [each.detach() for each in module.parameters()]))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 / 3)


@pytest.mark.parametrize("fused", [False, True])
def test_skip_three_times_under_a_scaler(fused: bool) -> None:
    """A NaN loss is passed over, a scaler's own overflow is none of the guard's business."""

    class Bad(BoringAdam):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)["loss"]
            return loss * NAN if batch_idx in (2, 3, 4) else loss * (1e36 if batch_idx == 8 else 1.0)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=fused)

    module, guard = Bad(), FiniteGuard(policy="skip")
    trainer = build_trainer(
        callbacks=[guard], plugins=[scaler_plugin()], limit_train_batches=12, limit_val_batches=0
    )
    trainer.fit(module, torch.utils.data.DataLoader(TextRows(), batch_size=2))
    assert guard.flagged == 3
    assert all(torch.isfinite(each).all() for each in module.parameters())
    steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert steps == {8}  # twelve less three of the guard's and one of the scaler's


def test_too_many_in_a_row() -> None:
    for policy in ("skip", "flag"):
        guard = FiniteGuard(policy=policy, max_consecutive=2)  # type: ignore[arg-type]
        with pytest.raises(NonFiniteError, match=r"update 5: .* is not finite, 3 in a row"):
            build_trainer(callbacks=[guard]).fit(Foreign("loss"), ListLoader(foreign_batches({3, 4, 5, 6})))
    guard = FiniteGuard(policy="skip", max_consecutive=2)
    build_trainer(callbacks=[guard]).fit(Foreign("loss"), ListLoader(foreign_batches({3, 4, 6, 7})))
    assert guard.flagged == 4


def test_first_update_skipped_warns_of_no_scheduler() -> None:
    module, guard = Foreign("loss"), FiniteGuard(policy="skip")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = build_trainer(callbacks=[guard])
        trainer.fit(module, ListLoader(foreign_batches({1}, 2)))
    assert not [each for each in caught if "lr_scheduler.step" in str(each.message)]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1


def test_poisoned_weight_is_found_in_a_foreign_project() -> None:
    class Spoil(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                with torch.no_grad():
                    pl_module.unused[1] = NAN

    class WithUnused(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(3))

        def step(self, batch: Any) -> Tensor:
            return super().step(batch) + 0.0 * self.unused[0]

    trainer = build_trainer(callbacks=[Spoil(), FiniteGuard(state_every=4)], limit_val_batches=0)
    with pytest.raises(NonFiniteError, match="update 8: unused is not finite"):
        trainer.fit(WithUnused())


def test_micro_batch_of_a_bad_loss_is_named_without_a_replay() -> None:
    guard = FiniteGuard()
    trainer = build_trainer(callbacks=[guard], accumulate_grad_batches=4)
    with pytest.raises(NonFiniteError, match="update 3: the loss of micro-batch 2 of 4 is not finite"):
        trainer.fit(Foreign("loss"), ListLoader(foreign_batches({10})))


def test_module_without_sequences_has_its_micro_batch_named() -> None:
    """`loss_sum` tells micro-batches apart, and no sequences."""
    guard = FiniteGuard()
    bad = Window([torch.tensor([0]), (torch.tensor([1, 1]), NAN)])
    with pytest.raises(NonFiniteError, match="micro-batch 2 of 2"):
        fit(ToyU(), [window([0]), bad], callbacks=[guard])
    origin = json.loads(Path("reports/update-000002-nonfinite/report.json").read_text())["origin"][0]
    assert (origin["micro_batch"], origin["sequences"], origin["phase"]) == (2, [], "loss")


def test_a_bad_update_leaves_the_statistics_alone() -> None:
    """After a NaN the next 100 clean updates are neither skipped nor flagged, and a later spike still is."""
    windows: list[Any] = [window([0, 1, 1], [1, 0]) for _ in range(130)]
    windows[20] = Window([(torch.tensor([0]), NAN)])
    windows[125] = Window([(torch.tensor([0] * 3), 40.0)])
    guard, spikes = FiniteGuard(), SpikeForensics()
    build = lambda parameters: torch.optim.SGD(parameters, lr=1e-4)  # noqa: E731
    module = ToyU(on_nonfinite="skip", build=build)
    trainer, _ = fit(module, windows, callbacks=[guard, spikes, PreClipNorm()], logger=RowLogger())
    assert guard.flagged == 1
    assert module.updates_skipped == 1
    assert spikes.spikes == 1
    assert Path("reports/update-000126-spike/report.json").exists()
    assert trainer.global_step == 130


@pytest.mark.parametrize("gradient", [[1.0, INF, 2.0, 3.0], [1e20] * 4])
def test_norms_beyond_float32_are_told_from_infinity(gradient: list[float]) -> None:
    """pytorch#46849, #53843, under automatic optimization: Inf is flagged, 1e20 four times is 2e20."""

    class Given(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.w.sum()
            self.w.register_hook(lambda _: torch.tensor(gradient))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module, logger = Given(), RowLogger()
    trainer = build_trainer(callbacks=[PreClipNorm(), FiniteGuard()], logger=logger)
    if INF in gradient:
        with pytest.raises(NonFiniteError, match="update 1: the gradient of w is not finite"):
            trainer.fit(module, ListLoader([torch.zeros(1)]))
        assert torch.equal(module.w.detach(), torch.zeros(4))
    else:
        trainer.fit(module, ListLoader([torch.zeros(1)]))
        assert logger.series("train/grad_norm") == [(1, pytest.approx(2e20, rel=1e-6))]
