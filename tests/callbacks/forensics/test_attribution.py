"""Shares of sequences in a gradient, against plain loops, and with a user's own replay."""

import json
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from andrea_callbacks import SpikeForensics
from andrea_callbacks.forensics.attribution import Attribution, attribute
from andrea_callbacks.forensics.replay import loss_function
from andrea_callbacks.hooks.update_window import UpdateWindow
from andrea_pl import DynamicPaddingCollator, LanguageModule, TransformerConfig, Window
from tests.support.spikes import Events, Rows, replay, rows_with_spikes, text_items
from tests.support.toy import ListLoader, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended"),
]

SHAPE = TransformerConfig(vocab_size=40, block_size=16, d_model=16, n_heads=2, n_layers=2)


def text_window(count: int = 9, seed: int = 0) -> Window:
    collate, items = DynamicPaddingCollator(0), text_items(count, seed)
    return Window([collate(items[:4]), collate(items[4:8]), collate(items[8:])])


class Watch(pl.Callback):
    """Attribute every update, and keep what came out."""

    def __init__(self, when: int) -> None:
        self.when = when
        self.found: Attribution | None = None
        self.gradient: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.window = UpdateWindow(number=1, micro_batches=list(batch), states=[None] * len(batch))
        if batch_idx + 1 == self.when:
            from andrea_callbacks.numerics.rng_state import RandomState

            self.window.states[0] = RandomState(pl_module.device)
            self.module = [each.detach().clone() for each in pl_module.parameters()]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 != self.when:
            return
        parameters = list(pl_module.parameters())
        self.gradient = [each.grad.clone() for each in parameters]
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in self.gradient))
        losses_of = loss_function(pl_module, None)
        whole = self.gradient
        self.found = attribute(trainer, pl_module, self.window, losses_of, parameters, whole, norm)
        assert all(map(torch.equal, self.gradient, [each.grad for each in parameters]))


def flat(gradient: Any) -> Tensor:
    return torch.cat([each.double().flatten() for each in gradient])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_shares_agree_with_a_plain_loop(dropout: float) -> None:
    """Norm, share, cosine and what is left without it, of every sequence and source, against float64 sums."""
    torch.manual_seed(0)
    shape = TransformerConfig(**{**SHAPE.to_dict(), "dropout": dropout})
    module, watch = LanguageModule(shape, lr=1e-2, schedule="constant", max_norm=0.1), Watch(3)
    build_trainer(callbacks=[watch]).fit(
        module, ListLoader([text_window(seed=number) for number in range(3)])
    )
    found = watch.found
    assert found is not None
    assert found.agreement == pytest.approx(1.0, abs=1e-5)  # with dropout too: the same masks were drawn
    whole = flat(watch.gradient)
    assert found.norm == pytest.approx(float(whole.norm()), rel=1e-6)
    assert sum(part.share for part in found.sequences) == pytest.approx(1.0, abs=1e-5)
    assert sum(part.share for part in found.sources) == pytest.approx(1.0, abs=1e-5)
    assert [part.share for part in found.sequences] == sorted(
        (p.share for p in found.sequences), reverse=True
    )
    if dropout:
        return
    with torch.no_grad():
        for parameter, kept in zip(module.parameters(), watch.module, strict=True):
            parameter.copy_(kept)
    items = text_items(9, seed=2)
    tokens = sum(len(item["labels"]) for item in items)
    parts: dict[Any, Tensor] = {}
    for item in items:
        logits = module.network(item["input_ids"][None])[0]
        loss = F.cross_entropy(logits, item["labels"], reduction="sum") / tokens
        part = flat(torch.autograd.grad(loss, list(module.parameters())))
        parts[item["document_id"]] = part
        source = f"source {item['source_id']}"
        parts[source] = parts.get(source, 0) + part
    assert len(found.sequences) == 9
    for part in [*found.sequences, *found.sources]:
        right = parts[part.identity.get("document", part.identity.get("source"))]
        assert part.norm == pytest.approx(float(right.norm()), rel=1e-4)
        assert part.share == pytest.approx(float(right @ whole / (whole @ whole)), abs=1e-5)
        assert part.cosine == pytest.approx(float(right @ whole / (right.norm() * whole.norm())), abs=1e-5)
        assert part.without == pytest.approx(float((whole - right).norm()), rel=1e-4)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_users_replay(accumulate: int, capsys: Any, caplog: Any) -> None:
    spikes, events = SpikeForensics(replay=replay), Events()
    trainer = build_trainer(callbacks=[spikes, events], accumulate_grad_batches=accumulate)
    with caplog.at_level("INFO"):
        trainer.fit(Rows(), ListLoader(rows_with_spikes({40 * accumulate}, 60 * accumulate)))
    assert [(event.kind, event.update) for event in events.taken] == [("spike", 40)]
    report = json.loads(Path("reports/update-000040-spike/report.json").read_text())
    first = report["attribution"]["sequences"][0]
    assert first["identity"] == {"rank": 0, "micro_batch": accumulate, "row": 3}
    assert first["share"] > 0.9
    assert report["attribution"]["agreement"] == pytest.approx(1.0, abs=1e-5)
    assert report["weights"] == "before the update"
    assert first["without"] < report["norm"] / 5
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert f"% from row 3 of micro-batch {accumulate}; report: " in text
    assert "update 40: norm " in text


def unfaithful(module: Any, batch: Tensor) -> Tensor:
    """Not what the model is trained on."""
    return (module.layer(batch) - torch.tensor([50.0, -50.0, 3.0, 7.0])).square().sum(1)


def partly_nan(module: Any, batch: Tensor) -> Tensor:
    return module.row_losses(batch) * torch.tensor([1.0, 1.0, math.nan, 1.0])


def negative(module: Any, batch: Tensor) -> Tensor:
    return -module.layer(batch).sum(1)


@pytest.mark.parametrize("wrong", [unfaithful, negative, partly_nan])
def test_an_unfaithful_replay_names_nobody(wrong: Any, caplog: Any, tmp_path: Path) -> None:
    """The console named a wrong sequence, and the agreement of 0.27 stood in report.json alone."""
    events, logger = Events(), TensorBoardLogger(tmp_path / "logs")
    trainer = build_trainer(callbacks=[SpikeForensics(replay=wrong), events], logger=logger)
    with caplog.at_level("INFO"):
        trainer.fit(Rows(), ListLoader(rows_with_spikes({40})))
    folder = Path(trainer.log_dir) / "reports/update-000040-spike"
    report = json.loads((folder / "report.json").read_text())
    assert report["agreement"] == "NaN" or report["agreement"] < 0.95
    assert report["attribution"]["unavailable"].startswith("the replay is not the run's loss (cosine")
    picture = (folder / "picture.svg").read_text()
    line = next(record.getMessage() for record in caplog.records if "update 40: norm" in record.getMessage())
    for said in (line, events.taken[0].message, picture.replace("&#x27;", "'")):
        assert "the replay is not the run's loss" in said
        assert "% from" not in said
        assert "row 3" not in said
    assert events.taken[0].details["attribution"] == report["attribution"]


def test_a_faithful_replay_of_clipped_gradients_agrees() -> None:
    """The gradient at the step is clipped by then; its direction is that of the update."""

    class Clipping(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.row_losses(batch).mean())
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
            optimizer.step()

    trainer = build_trainer(callbacks=[SpikeForensics(replay=replay)])
    trainer.fit(Clipping(), ListLoader(rows_with_spikes({40})))
    report = json.loads(Path("reports/update-000040-spike/report.json").read_text())
    assert report["attribution"]["agreement"] == pytest.approx(1.0, abs=1e-5)
    assert report["attribution"]["sequences"][0]["identity"]["row"] == 3
    assert report["attribution"]["norm"] == pytest.approx(report["norm"], rel=1e-6)
    parts = sum(part["share"] for part in report["attribution"]["sequences"])
    assert parts == pytest.approx(1.0, abs=1e-4)
    assert (report["clip_threshold"], report["clipped_norm"]) == (0.5, pytest.approx(0.5, rel=1e-5))
