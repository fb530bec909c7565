"""Summary, bar and final report."""

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from andrea_callbacks import EpochSummary, RunReport, UpdateProgressBar
from andrea_pl import Window, WindowLoader
from toy import ListLoader, RowLogger, ToyU, build_trainer, fit, labels, window

A, B = [0], [1, 1, 1]


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


class Fails(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise RuntimeError("stop")


def test_what_is_said_of_an_exception_has_a_line_of_its_own(capfd: Any) -> None:
    with pytest.raises(RuntimeError, match="stop"):
        fit(ToyU(), [window(A)] * 3, callbacks=[UpdateProgressBar(), Fails()], enable_progress_bar=True)
    shown = capfd.readouterr()
    bar = shown.err if "Epoch 0" in shown.err else shown.out
    assert "Epoch 0" in bar
    assert bar.endswith("\n")


def test_bar_shows_the_last_update() -> None:
    bar = UpdateProgressBar()
    trainer = build_trainer(callbacks=[bar], enable_progress_bar=True)
    module = ToyU()
    trainer.fit(module, ListLoader([window(A, B)]))
    shown = bar.get_metrics(trainer, module)
    assert shown["loss"] == "0.693"
    assert shown["norm"] == "0.35"
    assert shown["lr"] == "1.0e+00"
    assert "skipped" not in shown


class Writer(ToyU):
    def generate(self, prompts: list[str], max_new_tokens: int, generator: Any = None) -> list[str]:
        assert generator is not None
        return [
            f"{prompt}:{max_new_tokens}:{torch.randint(100, (1,), generator=generator).item()}"
            for prompt in prompts
        ]


def test_report_shows_a_sample(caplog: pytest.LogCaptureFixture) -> None:
    texts: list[Any] = []

    class TextLogger(RowLogger):
        @property
        def experiment(self) -> Any:
            return self

        def add_text(self, *args: Any) -> None:
            texts.append(args)

    state = torch.get_rng_state()
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer = build_trainer(callbacks=[RunReport(["Once"], 5)], logger=TextLogger())
        trainer.fit(Writer(), ListLoader([window(A)]))
    assert torch.equal(torch.get_rng_state(), state)
    assert "1 updates done" in caplog.text
    assert "sample: OnceOnce:5:" in caplog.text
    assert texts[0][0] == "sample"
    assert texts[0][2] == 1


def test_report_without_a_tokenizer_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(Writer):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("no tokenizer is known")

    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer = build_trainer(callbacks=[RunReport()])
        trainer.fit(Silent(), ListLoader([window(A)]))
    assert "no sample: no tokenizer is known" in caplog.text
