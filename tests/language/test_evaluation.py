"""What `trainer.validate()` and `trainer.test()` return and print, and what loggers get of it."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from andrea_pl import (
    DynamicPaddingCollator,
    LanguageModule,
    TextDataModule,
    TextSource,
    TokenizedDataset,
    TransformerConfig,
)
from andrea_pl.language.token_mean import TokenMean
from tests.support.runs import token_data
from tests.support.toy import ListLoader, Recorder, RowLogger, build_trainer

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


SHAPE = TransformerConfig(vocab_size=40, block_size=8, d_model=16, n_heads=2, n_layers=1)


class TestEvaluation:
    def test_validation_is_token_weighted(self) -> None:
        """torchtitan#4167: (2 over 1 token) and (90 over 9) is 9.2."""
        metric = TokenMean()
        metric.update(torch.tensor(2.0), 1)
        metric.update(torch.tensor(90.0), 9)
        assert float(metric.compute()["loss"]) == pytest.approx(9.2)
        assert metric.compute()["loss"].dtype == torch.float64
        assert "bits_per_byte" not in metric.compute()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sums_stay_float64_in_half_precision(self, dtype: torch.dtype) -> None:
        module = torch.nn.ModuleList([TokenMean()]).to(dtype)
        for _ in range(2000):
            module[0].update(torch.tensor(300.0), 100)
        assert float(module[0].compute()["loss"]) == 3.0
        module[0].reset()
        assert module[0].loss_sum.dtype == torch.float64

    def test_written_at_the_update_after_which_it_ran(self) -> None:
        logger = RowLogger()
        sources = token_data().preparation.sources[0].documents
        data = TextDataModule(
            [
                TextSource(name="t", kind="tokens", documents=sources),
                TextSource(name="v", kind="tokens", documents=sources[:5], split="val"),
            ],
            vocab_size=40,
            block_size=8,
            sequences_per_update=3,
            val_fraction=0.0,
        )
        module = LanguageModule(SHAPE, lr=1e-2)
        trainer = build_trainer(logger=logger, val_check_interval=2, max_epochs=1, num_sanity_val_steps=2)
        trainer.fit(module, datamodule=data)
        assert [step for step, _ in logger.series("val/loss")] == [2, 4]
        heads = [{name.split("/")[0] for name in row} for _, row in logger.rows]
        order = [next(each for each in ("train", "val", "epoch") if each in head) for head in heads]
        assert order == ["train", "train", "val", "train", "train", "val", "epoch"]
        network = module.network.eval()
        losses = [
            (
                F.cross_entropy(network(torch.tensor([d[:-1]]))[0], torch.tensor(d[1:]), reduction="sum"),
                len(d) - 1,
            )
            for d in sources[:5]
        ]
        expected = sum(float(loss.detach()) for loss, _ in losses) / sum(count for _, count in losses)
        assert logger.series("val/loss")[-1][1] == pytest.approx(expected, rel=1e-6)
        assert logger.series("val/perplexity")[-1][1] == pytest.approx(math.exp(expected), rel=1e-6)
        assert not logger.series("val/bits_per_byte")
        assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(expected, rel=1e-6)

    def test_bits_per_byte(self, tmp_path: Path) -> None:
        """Nats over ln 2 and over the bytes of all label tokens, first words included."""
        (tmp_path / "a.txt").write_text("the cat sat on the mat|the dog sat on the log|" * 20)
        source = TextSource(name="s", paths=[str(tmp_path / "a.txt")], document_separator="|", split="val")
        data = TextDataModule([source], vocab_size=270, block_size=64)
        shape = TransformerConfig(vocab_size=270, block_size=64, d_model=16, n_heads=2, n_layers=1)
        module = LanguageModule(shape)
        logger = RowLogger()
        with pytest.warns(UserWarning, match="stay unused"):
            build_trainer(logger=logger).validate(module, datamodule=data, verbose=False)
        texts = ["the cat sat on the mat", "the dog sat on the log"] * 20
        tokens = [data.tokenizer.encode_documents([text])[0] for text in texts]
        nll = sum(
            float(
                F.cross_entropy(
                    module(torch.tensor([t[:-1]]))[0], torch.tensor(t[1:]), reduction="sum"
                ).detach()
            )
            for t in tokens
        )
        expected = nll / math.log(2) / sum(len(text) for text in texts)
        assert logger.series("val/bits_per_byte")[0][1] == pytest.approx(expected, rel=1e-5)

    def test_overfit_batches_repeats_the_windows(self) -> None:
        recorder = Recorder()
        seen: list[list[int]] = []

        class Seen(pl.Callback):
            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                seen.append(sorted(n for part in batch for n in part["document_id"].tolist()))

        trainer = build_trainer(callbacks=[recorder, Seen()], overfit_batches=2, max_epochs=3)
        trainer.fit(LanguageModule(SHAPE), datamodule=token_data())
        assert seen == seen[:2] * 3
