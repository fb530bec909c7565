"""The report of an update: a frozen record, and a mapping of what is known."""

import copy
import dataclasses
import pickle
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from andrea_callbacks import EpochSummary, PreClipNorm, RunJournal, UpdateLog, UpdateReport, publish_report
from andrea_callbacks.hooks.reports import FIELDS, spell_nonfinite
from tests.support.toy import ListLoader, RowLogger, ToyU, build_trainer, window


def test_it_is_a_mapping_of_what_is_known() -> None:
    report = UpdateReport(update=3, loss=torch.tensor(2.0), tokens=5, lr=0.1)
    assert isinstance(report, Mapping)
    assert set(report) == {"update", "outcome", "loss", "tokens", "lr"}
    assert report["tokens"] == report.tokens == 5
    assert "grad_norm" not in report
    assert report.get("grad_norm") is None
    with pytest.raises(KeyError, match="grad_norm"):
        report["grad_norm"]
    assert dict(report) | {"more": 1} == {**report, "more": 1}


def test_it_is_frozen() -> None:
    report = UpdateReport(update=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.outcome = "empty"  # type: ignore[misc]


def test_plain_mappings_become_reports() -> None:
    """What a module of another project reports under other names is kept."""
    plain = {"update": 2, "outcome": "applied", "loss": 1.5, "tokens": 7, "grad_norm": 0.5, "mine": "x"}
    report = UpdateReport.of(plain)
    assert dict(report) == plain
    assert report.extra == {"mine": "x"}
    assert UpdateReport.of(report) is report


def test_copies() -> None:
    report = UpdateReport(update=2, loss=1.5, source_losses=[1.0, None], extra={"mine": 1})
    for copied in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert dict(copied) == dict(report)


def test_every_field_is_documented() -> None:
    documented = UpdateReport.__doc__ or ""
    assert all(f"        {name}: " in documented for name in FIELDS)


class Plain(pl.LightningModule):
    """Reports its own updates as a plain dict, as modules of other projects may."""

    update_report: dict[str, Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.weight.square().sum()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.update_report = {"update": self.trainer.global_step, "outcome": "applied", "loss": loss.detach()}
        self.update_report |= {
            "tokens": 4,
            "grad_norm": torch.tensor(3.0),
            "lr": 0.1,
            "skipped": 0,
            "mine": 1,
        }
        publish_report(self.trainer, self.update_report)


def test_foreign_modules_report_mappings(tmp_path: Any) -> None:
    logger, summary = RowLogger(), EpochSummary()
    callbacks = [UpdateLog(), PreClipNorm(), summary, RunJournal(path=str(tmp_path / "journal.jsonl"))]
    build_trainer(callbacks=callbacks, logger=logger).fit(Plain(), ListLoader([torch.zeros(1)] * 3))
    assert [value for _, value in logger.series("train/grad_norm")] == [3.0] * 3
    assert [value for _, value in logger.series("train/tokens")] == [4.0] * 3
    assert summary.last["updates"] == 3
    assert '"mine": 1' in (tmp_path / "journal.jsonl").read_text()


def test_foreign_callbacks_take_mappings() -> None:
    """A callback that was written for a dict reads the same keys."""
    seen: list[dict[str, Any]] = []

    class Own(pl.Callback):
        def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
            seen.append(dict(report))
            assert report["tokens"] == report.get("tokens") > 0
            assert "loss_scale" not in report

    module = ToyU()
    build_trainer(callbacks=[Own()]).fit(module, ListLoader([window([0], [1, 1])] * 2))
    assert [each["update"] for each in seen] == [1, 2]
    assert isinstance(module.update_report, UpdateReport)
    assert {"loss", "grad_norm", "grad_norm_clipped", "clip_coefficient", "lr", "skipped"} <= seen[0].keys()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("the loss", "the loss is not finite"),
        ("the loss and the gradient of w", "the loss and the gradient of w are not finite"),
        ("the gradient of a and b", "the gradient of a and b is not finite"),
    ],
)
def test_spelling(fault: str, said: str) -> None:
    assert spell_nonfinite(fault) == said
