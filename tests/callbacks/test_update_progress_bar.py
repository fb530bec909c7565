"""UpdateProgressBar: the figures of the last update, and room for other output."""

from typing import Any

import lightning.pytorch as pl
import pytest

from andrea_callbacks import UpdateProgressBar
from tests.support.toy import A, B, ListLoader, ToyU, build_trainer, fit, window


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
