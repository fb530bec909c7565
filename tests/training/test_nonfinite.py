"""NaN and Inf: where they end an update, a run, or nothing."""

import copy
import math
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from andrea_pl import (
    NonFiniteError,
    Window,
)
from tests.support.toy import (
    INF,
    NAN,
    A,
    B,
    ListLoader,
    Recorder,
    RowLogger,
    ToyU,
    build_trainer,
    fit,
    halving,
    scaler_plugin,
    window,
)


class TestNonFinite:
    """cases.md, NaN and Inf."""

    def test_names_update_and_micro_batch(self) -> None:
        """Lightning#12344: NaN in the second micro-batch of window 1."""
        batch = Window([torch.tensor(A), (torch.tensor(B), NAN)])
        with pytest.warns(UserWarning, match="update 1"), pytest.raises(NonFiniteError) as caught:
            fit(ToyU(), [batch])
        assert "update 1" in str(caught.value)
        assert "micro-batch 2 of 2 (nan)" in str(caught.value)
        assert "gradient of b" in str(caught.value)

    def test_infinite_loss(self) -> None:
        """pytorch#83537: a loss times Inf is flagged as Inf."""
        with (
            pytest.warns(UserWarning, match=r"micro-batch 1 of 1 \(inf\)"),
            pytest.raises(NonFiniteError, match="inf"),
        ):
            fit(ToyU(), [Window([(torch.tensor(A), INF)])])

    @pytest.mark.guarantee("a NaN never reaches a weight")
    def test_raise_leaves_everything(self, tmp_path: Any) -> None:
        """pocket-tts#262: weights, moments and schedule as before, and no checkpoint of a poisoned state."""
        module = ToyU(build=lambda p: torch.optim.AdamW(p, lr=0.1), scheduler=halving)
        recorder = Recorder()
        saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
        trainer = build_trainer(callbacks=[recorder, saving], enable_checkpointing=True)
        state: dict[str, Any] = {}

        class Keep(pl.Callback):
            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                state["optimizer"] = copy.deepcopy(trainer.optimizers[0].state_dict())

        trainer.callbacks.append(Keep())
        with pytest.warns(UserWarning, match="not finite"), pytest.raises(NonFiniteError):
            trainer.fit(module, ListLoader([window(A, B), Window([(torch.tensor(A), NAN)])]))
        assert torch.equal(module.b.detach(), recorder.weights[0])
        after = trainer.optimizers[0].state_dict()["state"][0]
        before = state["optimizer"]["state"][0]
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1
        assert [path.name for path in (tmp_path / "saved").iterdir()] == ["epoch=0-step=1.ckpt"]

    @pytest.mark.guarantee("a NaN never reaches a weight")
    def test_skip_leaves_optimizer_state(self) -> None:
        """flaxchat#6: a skipped window leaves optimizer state and later weights bitwise unchanged."""
        bad = Window([(torch.tensor(A), NAN)])
        results = []
        for batches in ([window(A, B), window(B)], [window(A, B), bad, window(B)]):
            module = ToyU(
                build=lambda p: torch.optim.AdamW(p, lr=0.1), scheduler=halving, on_nonfinite="skip"
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer, _ = fit(module, batches)
            results.append((module.b.detach(), trainer.optimizers[0].state_dict()["state"][0]))
        assert torch.equal(results[0][0], results[1][0])
        assert all(torch.equal(results[0][1][key], results[1][1][key]) for key in results[0][1])

    @pytest.mark.guarantee("a NaN never reaches a weight")
    def test_too_many_skips_in_a_row(self) -> None:
        bad = Window([(torch.tensor(A), NAN)])
        module = ToyU(on_nonfinite="skip", max_consecutive_skips=2)
        with (
            pytest.warns(UserWarning, match="not finite"),
            pytest.raises(NonFiniteError, match="`max_consecutive_skips`=2"),
        ):
            fit(module, [bad, bad, window(A), bad, bad, bad])
        assert module.updates_skipped == 5

    def test_clean_updates_after_a_bad_one(self) -> None:
        """OLMo-core, ZClip, llm.c: the next 100 clean updates are neither skipped nor flagged."""
        logger = RowLogger()
        batches = [Window([(torch.tensor(A), NAN)]), *[window(A, B)] * 100]
        with pytest.warns(UserWarning, match="update 1"):
            _, recorder = fit(ToyU(on_nonfinite="skip"), batches, logger=logger)
        assert [report["outcome"] for report in recorder.reports[1:]] == ["applied"] * 100
        assert {value for _, value in logger.series("train/nonfinite")} == {1.0}
        assert math.isfinite(logger.series("train/clip_fraction")[-1][1])

    def test_overflow_under_a_scaler(self) -> None:
        """design.md: finite loss and Inf gradient under a scaler are normal, counted, and lower the scale."""

        class Overflowing(ToyU):
            def loss_sum(self, micro_batch: Any) -> Tensor:
                loss = super().loss_sum(micro_batch)
                if self.trainer.precision_plugin.scaler.get_scale() > 256:
                    loss = loss + (self.b * float("inf")).nan_to_num(0.0, 0.0, 0.0).sum()
                    loss.register_hook(lambda gradient: gradient * INF)
                return loss

        logger = RowLogger()
        module = Overflowing(scheduler=halving)
        trainer, recorder = fit(module, [window(A, B)] * 4, plugins=[scaler_plugin(1024.0)], logger=logger)
        outcomes = [report["outcome"] for report in recorder.reports]
        assert outcomes == ["scaler_skip", "scaler_skip", "applied", "applied"]
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2
        assert [value for _, value in logger.series("train/loss_scale")] == [512, 256, 256, 256]
        assert torch.equal(recorder.weights[1], torch.zeros(2))

    def test_falling_scale(self) -> None:
        """fairseq#4555: the scale is logged, warned about while it falls, and its end raises."""

        class Overflowing(ToyU):
            def loss_sum(self, micro_batch: Any) -> Tensor:
                loss = super().loss_sum(micro_batch)
                loss.register_hook(lambda gradient: gradient * INF)
                return loss

        module = Overflowing(min_loss_scale=16.0)
        with (
            pytest.warns(UserWarning, match="update 7: the gradient of b is not finite"),
            pytest.warns(UserWarning, match="keeps falling"),
            pytest.raises(NonFiniteError, match="the loss scale is down to 16"),
        ):
            fit(module, [window(A, B)] * 20, plugins=[scaler_plugin(1024.0)])

    def test_empty_window_under_a_scaler(self) -> None:
        module = ToyU()
        _, recorder = fit(module, [window([-100]), window(A, B)], plugins=[scaler_plugin(1024.0)])
        assert [report["outcome"] for report in recorder.reports] == ["empty", "applied"]
