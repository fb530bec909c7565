"""What `trainer.validate()` and `trainer.test()` return and print, and what loggers get of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from andrea_pl import DynamicPaddingCollator, LanguageModule, TokenizedDataset, TransformerConfig
from toy import ListLoader, RowLogger, build_trainer

SHAPE = TransformerConfig(vocab_size=40, block_size=8, d_model=16, n_heads=2, n_layers=1)
LONG, SHORT = [[1, 2, 3, 4, 5], [6, 7, 8]], [[9, 10]]


def loader(documents: list[list[int]]) -> ListLoader:
    dataset = TokenizedDataset(documents, 8)
    return ListLoader([DynamicPaddingCollator(0)([dataset[n] for n in range(len(dataset))])])


def expected_loss(module: LanguageModule, documents: list[list[int]]) -> float:
    """Return the loss per label token by a plain loop."""
    total, count = 0.0, 0
    with torch.no_grad():
        for each in documents:
            logits = module.network.eval()(torch.tensor([each[:-1]]))[0]
            total += float(F.cross_entropy(logits, torch.tensor(each[1:]), reduction="sum"))
            count += len(each) - 1
    return total / count


@pytest.mark.parametrize(("call", "stage"), [("validate", "val"), ("test", "test")])
def test_figures_are_returned_and_printed(call: str, stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 26: `[{}]`; loggers have the same values, once, and nothing else."""
    module, logger = LanguageModule(SHAPE), RowLogger()
    trainer = build_trainer(logger=logger)
    (row,) = getattr(trainer, call)(module, loader(LONG))
    assert set(row) == {f"{stage}/loss", f"{stage}/perplexity"}
    assert row[f"{stage}/loss"] == pytest.approx(expected_loss(module, LONG), rel=1e-6)
    assert logger.rows == [(0, row)]
    assert float(trainer.callback_metrics[f"{stage}/loss"]) == pytest.approx(row[f"{stage}/loss"], rel=1e-6)
    assert f"{stage}/perplexity" in capsys.readouterr().out
    (again,) = getattr(trainer, call)(module, loader(LONG), verbose=False)
    assert again == row
    assert f"{stage}/loss" not in capsys.readouterr().out


def test_two_loaders_are_one_text() -> None:
    """Lightning returns a row for each; the figures are of all labels together, as monitors have them."""
    module = LanguageModule(SHAPE)
    rows = build_trainer().validate(module, [loader(LONG), loader(SHORT)], verbose=False)
    assert len(rows) == 2
    for row in rows:
        assert row["val/loss"] == pytest.approx(expected_loss(module, LONG + SHORT), rel=1e-6)
    predicted: Any = build_trainer().predict(module, [loader(LONG), loader(SHORT)])
    assert [len(batches[0]) for batches in predicted] == [2, 1]


@pytest.mark.filterwarnings("ignore:Total length of")
def test_no_loader_no_figures() -> None:
    assert build_trainer().validate(LanguageModule(SHAPE), [], verbose=False) == []


def test_in_a_fit_nothing_is_written_twice(tmp_path: Path) -> None:
    """Sanity checks write nothing; validation is at its update; callbacks that monitor find the loss."""
    module, logger = LanguageModule(SHAPE, lr=0.0, schedule="constant"), RowLogger()
    saving = ModelCheckpoint(tmp_path, monitor="val/loss")
    stopping = EarlyStopping("val/loss", patience=2)
    trainer = build_trainer(
        logger=[logger, CSVLogger(tmp_path)],
        callbacks=[saving, stopping],
        enable_checkpointing=True,
        max_epochs=9,
        num_sanity_val_steps=1,
    )
    trainer.fit(module, loader(LONG), loader(LONG))
    assert trainer.global_step == 3  # the loss stands still
    series = logger.series("val/loss")
    assert [step for step, _ in series] == [1, 2, 3]
    assert sum("val/loss" in row for _, row in logger.rows) == 3
    assert saving.best_model_score is not None
    assert float(saving.best_model_score) == pytest.approx(series[0][1], rel=1e-6)
    assert not logger.series("epoch")
    assert not any("epoch" in row for _, row in logger.rows)
    written = (Path(trainer.loggers[1].log_dir) / "metrics.csv").read_text().splitlines()
    column = written[0].split(",").index("val/loss")
    assert sum(bool(line.split(",")[column]) for line in written[1:]) == 3
    (row,) = trainer.validate(module, loader(LONG), verbose=False)
    assert row["val/loss"] == series[-1][1]
    assert logger.series("val/loss")[-1] == (3, row["val/loss"])


def test_a_subclass_that_logs_too() -> None:
    class Mine(LanguageModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx, dataloader_idx)
            self.log("mine", 2.0, batch_size=1)

    logger = RowLogger()
    (row,) = build_trainer(logger=logger).validate(Mine(SHAPE), loader(LONG), verbose=False)
    assert row["mine"] == 2.0
    assert "val/loss" in row
    assert len(logger.series("val/loss")) == len(logger.series("mine")) == 1
