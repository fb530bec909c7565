"""EpochSummary: the figures of an epoch, without bad updates, also when it is resumed halfway."""

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from andrea_callbacks import EpochSummary
from andrea_pl import Window, WindowLoader
from tests.support.toy import A, B, ListLoader, RowLogger, ToyU, build_trainer, fit, labels, window


def test_five_figures(caplog: pytest.LogCaptureFixture) -> None:
    """The first seed's figures: token-mean loss, tokens, updates, last pre-clip norm, last used rate."""
    summary = EpochSummary()
    logger = RowLogger()
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        _, recorder = fit(ToyU(), [window(A, B), window(B, B)], callbacks=[summary], logger=logger)
    losses = [float(report["loss"]) for report in recorder.reports]
    assert summary.last == {
        "loss": pytest.approx((losses[0] * 4 + losses[1] * 6) / 10),
        "tokens": 10,
        "updates": 2,
        "last_grad_norm": pytest.approx(float(recorder.reports[1]["grad_norm"])),
        "last_used_lr": 1.0,
    }
    assert "over 10 tokens in 2 updates" in caplog.text
    assert logger.series("epoch/tokens") == [(2, 10)]


def test_bad_updates_have_no_part() -> None:
    summary = EpochSummary()
    batches = [window(A, B), Window([(torch.tensor(A), float("nan"))]), window([-100])]
    with pytest.warns(UserWarning, match="not finite"):
        fit(ToyU(on_nonfinite="skip"), batches, callbacks=[summary])
    assert summary.last["updates"] == 1
    assert summary.last["loss"] == pytest.approx(0.693147, abs=1e-6)


def test_summary_continues_within_an_epoch(tmp_path: Any) -> None:
    batches = labels(A, A, B, B)
    straight = EpochSummary()
    fit(ToyU(), WindowLoader(ListLoader(batches), 1), callbacks=[straight])
    saving = ModelCheckpoint(tmp_path, filename="half", every_n_train_steps=2, save_top_k=-1)
    first = build_trainer(
        callbacks=[EpochSummary(), saving], enable_checkpointing=True, limit_train_batches=3
    )
    first.fit(ToyU(), WindowLoader(ListLoader(batches), 1))
    resumed = EpochSummary()
    second = build_trainer(callbacks=[resumed], max_epochs=1)
    second.fit(ToyU(), WindowLoader(ListLoader(batches), 1), ckpt_path=tmp_path / "half.ckpt")
    assert resumed.last == pytest.approx(straight.last)
