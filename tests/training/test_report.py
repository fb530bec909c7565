"""The axis of curves: which figures an update reports, and at which step."""

import math
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from andrea_pl import (
    NonFiniteError,
    Window,
    WindowLoader,
)
from tests.support.toy import INF, NAN, A, B, RowLogger, ToyU, fit, halving, micro_batches, window


class TestAxis:
    """cases.md, Axis, schedule, logging."""

    @pytest.mark.guarantee("figures of update k are at step k")
    def test_rows_at_every_update(self) -> None:
        """Lightning#17958, #835, #4304, #1923: rows at 1, 2, 3 once each, whatever log_every_n_steps is."""
        for every in (1, 50):
            logger = RowLogger()
            fit(ToyU(), WindowLoader(micro_batches(10), 4), logger=logger, log_every_n_steps=every)
            rows = [step for step, row in logger.rows if "train/loss" in row]
            assert rows == [1, 2, 3]
            for name in ("tokens", "grad_norm", "grad_norm_clipped", "clip_coefficient", "lr", "skipped"):
                assert [step for step, _ in logger.series(f"train/{name}")] == [1, 2, 3]

    @pytest.mark.guarantee("figures of update k are at step k")
    def test_rate_of_the_update(self) -> None:
        """Lightning#19275, litgpt#926: (1, 1.0), (2, 0.5), (3, 0.3333)."""
        logger = RowLogger()
        fit(ToyU(scheduler=halving), WindowLoader(micro_batches(10), 4), logger=logger)
        assert logger.series("train/lr") == [(1, 1.0), (2, 0.5), (3, pytest.approx(0.3333, abs=1e-4))]

    @pytest.mark.parametrize("loggers", [False, None, []])
    def test_without_loggers(self, loggers: Any) -> None:
        """Lightning#7206: none at all."""
        trainer, _ = fit(ToyU(), [window(A)], logger=loggers)
        assert trainer.global_step == 1

    def test_several_loggers(self) -> None:
        """Lightning#7206: several get the same rows."""
        loggers = [RowLogger("one"), RowLogger("two")]
        fit(ToyU(), [window(A), window(B)], logger=loggers)
        assert loggers[0].rows == loggers[1].rows
        assert [step for step, _ in loggers[0].series("train/loss")] == [1, 2]

    @pytest.mark.guarantee("the schedule moves only with the weights")
    def test_scheduler_counts_updates(self) -> None:
        """Lightning#1476, #6379: `last_epoch` equals the updates that changed weights."""
        module = ToyU(scheduler=halving)
        trainer, _ = fit(module, WindowLoader(micro_batches(10), 4))
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == module.updates_applied == 3

    @pytest.mark.guarantee("the schedule moves only with the weights")
    def test_skipped_step_holds_the_schedule(self) -> None:
        """Lightning#16228, pytorch#44511: first window Inf: `last_epoch` 0, skipped 1, no warning."""
        module = ToyU(scheduler=halving, on_nonfinite="skip")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer, recorder = fit(module, [Window([(torch.tensor(A), INF)])])
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 0
        assert recorder.reports[0]["skipped"] == 1
        assert not any("lr_scheduler" in str(each.message) for each in caught)

    def test_global_step_and_checkpoint(self, tmp_path: Any) -> None:
        """Lightning#16143, #17281: `global_step` 3, and a checkpoint with every_n_train_steps=1."""
        saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
        trainer, _ = fit(
            ToyU(), WindowLoader(micro_batches(10), 4), callbacks=[saving], enable_checkpointing=True
        )
        assert trainer.global_step == 3
        assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
            f"epoch=0-step={step}.ckpt" for step in (1, 2, 3)
        ]

    def test_bad_update_is_shown(self) -> None:
        """trl#6702: loss NaN and a counter of 1, at the update."""
        logger = RowLogger()
        with pytest.warns(UserWarning, match="not finite"):
            fit(
                ToyU(on_nonfinite="skip"),
                [window(A), Window([(torch.tensor(A), NAN)]), window(B)],
                logger=logger,
            )
        losses = logger.series("train/loss")
        assert [step for step, value in losses if math.isnan(value)] == [2]
        assert logger.series("train/skipped") == [(1, 0), (2, 1), (3, 1)]

    def test_bad_update_is_shown_when_it_raises(self) -> None:
        """trl#6702: also where the run stops there."""
        logger = RowLogger()
        with pytest.warns(UserWarning, match="not finite"), pytest.raises(NonFiniteError):
            fit(ToyU(), [window(A), Window([(torch.tensor(A), NAN)])], logger=logger)
        assert [step for step, _ in logger.series("train/loss")] == [1, 2]
        assert math.isnan(logger.series("train/loss")[1][1])
        assert logger.series("train/skipped")[-1] == (2, 1)
