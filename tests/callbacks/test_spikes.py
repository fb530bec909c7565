"""SpikeForensics: shares against plain loops, planted sequences, reports, limits, state, late devices."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

import spikes as benchmark
from andrea_callbacks import RunEvent, SpikeForensics
from andrea_callbacks import spikes as module_of_spikes
from andrea_callbacks.attribution import Attribution, attribute
from andrea_callbacks.identity import identity_of, spell
from andrea_callbacks.replay import NO_REPLAY, loss_function
from andrea_callbacks.window import UpdateWindow
from andrea_pl import DynamicPaddingCollator, LanguageModule, TransformerConfig, Window
from projects import TextRows
from toy import ListLoader, RowLogger, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended"),
]
SHAPE = TransformerConfig(vocab_size=40, block_size=16, d_model=16, n_heads=2, n_layers=2)


def text_items(count: int, seed: int = 0, sources: int = 2) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    items = []
    for number in range(count):
        tokens = torch.randint(
            1, 40, (int(torch.randint(3, 16, (), generator=generator)),), generator=generator
        )
        place = {"source_id": number % sources, "document_id": 50 + number, "offset": 0}
        items.append({"input_ids": tokens[:-1], "labels": tokens[1:], **place})
    return items


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
            from andrea_callbacks.random_state import RandomState

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


class Rows(pl.LightningModule):
    """Somebody else's model: automatic optimization, a mean over rows, plain tensors as batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(32, 4)

    def row_losses(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self.layer(batch), torch.zeros(len(batch), 4), reduction="none").sum(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.row_losses(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def rows_with_spikes(updates: set[int], count: int = 60) -> list[Tensor]:
    rows = TextRows(4 * count).rows.view(count, 4, 32).clone()
    for update in updates:
        rows[update - 1, 2] *= 30.0
    return list(rows)


class Events(pl.Callback):
    """Keep events."""

    def __init__(self) -> None:
        self.taken: list[RunEvent] = []

    def take_event(self, trainer: Any, event: RunEvent) -> None:
        self.taken.append(event)


def replay(module: Any, batch: Tensor) -> Tensor:
    """The user's own: rows apart, up to a factor."""
    return module.row_losses(batch)


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


def test_without_a_replay_the_report_says_so() -> None:
    trainer = build_trainer(callbacks=[SpikeForensics()])
    trainer.fit(Rows(), ListLoader(rows_with_spikes({40})))
    report = json.loads(Path("reports/update-000040-spike/report.json").read_text())
    assert report["attribution"] == {"unavailable": NO_REPLAY}
    assert report["sequences"] == [{"rank": 0, "micro_batch": 1}]


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


def name_rows(batch: Any) -> list[str]:
    return [f"house {number}" for number in range(len(batch))]


def test_rows_have_the_projects_own_names(caplog: Any) -> None:
    trainer = build_trainer(callbacks=[SpikeForensics(replay=replay, identify=name_rows)])
    with caplog.at_level("INFO"):
        trainer.fit(Rows(), ListLoader(rows_with_spikes({40})))
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "% from house 2 (row 3 of micro-batch 1); report: " in text


def test_names_without_a_replay() -> None:
    trainer = build_trainer(callbacks=[SpikeForensics(identify=name_rows)])
    trainer.fit(Rows(), ListLoader(rows_with_spikes({40})))
    report = json.loads(Path("reports/update-000040-spike/report.json").read_text())
    assert [each["name"] for each in report["sequences"]] == [f"house {number}" for number in range(4)]


@pytest.mark.parametrize("bad", [lambda batch: batch.missing, lambda batch: None, lambda batch: ["one"]])
def test_names_that_cannot_be_had_stop_nothing(bad: Any, caplog: Any) -> None:
    trainer = build_trainer(callbacks=[SpikeForensics(replay=replay, identify=bad)])
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("INFO"):
        warnings.simplefilter("always")
        trainer.fit(Rows(), ListLoader(rows_with_spikes({40})))
    said = [str(each.message) for each in caught if "identify=" in str(each.message)]
    assert all("identify gets a micro-batch and must return a name for each row" in each for each in said)
    text = "\n".join(each.getMessage() for each in caplog.records)
    assert "% from row 3 of micro-batch 1; report: " in text


def test_text_is_spoken_of_as_sequences() -> None:
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    assert spell(identity_of(build_trainer(), batch, 1, 1)) == "sequence 2 of micro-batch 1"
    assert spell(identity_of(build_trainer(), (torch.ones(2),), 1, 1)) == "row 2 of micro-batch 1"


def test_at_most_so_many_reports() -> None:
    spikes = SpikeForensics(replay=replay, max_reports=2, per_updates=30)
    trainer = build_trainer(callbacks=[spikes], logger=(logger := RowLogger()))
    trainer.fit(Rows(), ListLoader(rows_with_spikes({40, 45, 50, 75}, 90)))
    assert spikes.spikes == 4
    assert sorted(path.name for path in Path("reports").iterdir()) == [
        "update-000040-spike",
        "update-000045-spike",
        "update-000075-spike",
    ]
    assert logger.series("train/spikes")[-1] == (90, 4.0)


def test_new_level_is_learnt() -> None:
    events = Events()
    trainer = build_trainer(callbacks=[SpikeForensics(max_reports=0, patience=5), events])
    trainer.fit(Rows(), ListLoader(rows_with_spikes(set(range(40, 100)), 100)))
    assert [event.update for event in events.taken if event.kind == "spike"] == [40, 41, 42, 43, 44]
    assert {event.update for event in events.taken if event.kind == "level"} == {44}


def test_spikes_in_a_row_stop_the_run() -> None:
    """One alone does not; the third in a row does, after its update, and the event says so."""
    events = Events()
    trainer = build_trainer(callbacks=[SpikeForensics(max_reports=0, stop_after=3), events])
    trainer.fit(Rows(), ListLoader(rows_with_spikes({40, 50, 51, 60, 61, 62, 63}, 100)))
    assert trainer.global_step == 62
    stops = {event.update: event.details["stops"] for event in events.taken}
    assert stops == {40: False, 50: False, 51: False, 60: False, 61: False, 62: True}


def test_statistics_go_on_after_a_resume(tmp_path: Path) -> None:
    """A spike soon after a resume is found, by what was learnt before."""
    first = build_trainer(callbacks=[SpikeForensics()])
    first.fit(Rows(), ListLoader(rows_with_spikes(set(), 40)))
    first.save_checkpoint(tmp_path / "a.ckpt")
    spikes = SpikeForensics()
    second = build_trainer(callbacks=[spikes], max_epochs=2)
    second.fit(Rows(), ListLoader(rows_with_spikes({5}, 40)), ckpt_path=tmp_path / "a.ckpt")
    assert spikes.spikes == 1
    assert Path("reports/update-000045-spike").exists()


@pytest.mark.parametrize("wait", [False, True])
def test_a_device_that_is_not_waited_for(wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spike is known one update later, replayed on weights that are one update on, and still named."""
    monkeypatch.setattr(module_of_spikes, "_is_read_at_once", lambda device: False)
    for spike in (40, 60):  # within, and at the very end
        spikes = SpikeForensics(replay=replay, wait=wait, folder=f"reports-{spike}")
        build_trainer(callbacks=[spikes]).fit(Rows(), ListLoader(rows_with_spikes({spike})))
        report = json.loads(Path(f"reports-{spike}/update-{spike:06d}-spike/report.json").read_text())
        assert report["attribution"]["sequences"][0]["identity"]["row"] == 3
        assert report["attribution"]["sequences"][0]["share"] > 0.9
        assert report["weights"].startswith("before" if wait else "after")
        if not wait:
            assert report["attribution"]["agreement"] is None
            assert report["attribution"]["norm"] == pytest.approx(report["norm"])


def test_report_is_complete(tmp_path: Path) -> None:
    """JSON, picture, decoded sequences, a text in TensorBoard; documents, sources and places by name."""

    class Data(pl.LightningDataModule):
        source_names = ("prose", "lists")

        class tokenizer:
            @staticmethod
            def decode(ids: Any) -> str:
                return " ".join(f"w{each}" for each in ids)

        def describe(self, document_id: int) -> str:
            return f"file.txt:{document_id}"

        def train_dataloader(self) -> Any:
            collate, windows = DynamicPaddingCollator(0), []
            for number in range(95):
                items = text_items(4)  # learnt by heart
                if number == 89:
                    items[1]["labels"] = torch.randint(1, 40, items[1]["labels"].shape)
                    items[1]["input_ids"] = torch.full_like(items[1]["labels"], 39)
                windows.append(Window([collate(items)]))
            return ListLoader(windows)

    torch.manual_seed(0)
    module = LanguageModule(SHAPE, lr=1e-2, schedule="constant", betas=(0.9, 0.9))
    logger = TensorBoardLogger(tmp_path)
    spikes = SpikeForensics()
    build_trainer(callbacks=[spikes], logger=logger).fit(module, datamodule=Data())
    folder = Path(logger.log_dir) / "reports/update-000090-spike"
    report = json.loads((folder / "report.json").read_text())
    first = report["attribution"]["sequences"][0]["identity"]
    assert first["source"] == "lists"
    assert first["document"] == 51
    assert first["place"] == "file.txt:51"
    assert {part["identity"]["source"] for part in report["attribution"]["sources"]} == {"prose", "lists"}
    assert sum(report["mixture"].values()) == 1.0
    assert (
        (folder / "sequences.txt").read_text().split("\n")[0].endswith("document 51 of lists (file.txt:51)")
    )
    assert "w39 w39" in (folder / "sequences.txt").read_text()
    assert (folder / "picture.svg").read_text().startswith("<svg")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0})
    events.Reload()
    text = events.Tensors("spike/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| document 51 of lists |" in text


def test_a_report_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    trainer = build_trainer(callbacks=[SpikeForensics(folder=str(blocked))])
    with pytest.warns(UserWarning, match="the report .*file/update-000040-spike could not be written"):
        trainer.fit(Rows(), ListLoader(rows_with_spikes({40})))
    assert trainer.global_step == 60


@pytest.mark.system
def test_planted_sequences_are_named() -> None:
    """A small version of benchmarks/spikes.py; a report that is made names what was planted."""
    planted = [benchmark.run_once(seed, benchmark.KINDS[seed % 3]) for seed in range(3)]
    clean = [benchmark.run_once(100_000, "")]
    flagged = [each for each in planted if each.is_flagged]
    assert len(flagged) >= 2
    assert all(each.is_named for each in flagged)
    assert all(each.is_flagged for each in planted if each.ratio > 5)
    assert sum(each.flagged for each in clean) < 0.02 * sum(each.updates for each in clean)
