"""The report of a spike."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from andrea_callbacks import SpikeForensics
from andrea_callbacks.forensics.replay import NO_REPLAY
from andrea_pl import DynamicPaddingCollator, LanguageModule, TransformerConfig, Window
from tests.support.spikes import Rows, rows_with_spikes, text_items
from tests.support.toy import ListLoader, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended"),
]

SHAPE = TransformerConfig(vocab_size=40, block_size=16, d_model=16, n_heads=2, n_layers=2)


def test_without_a_replay_the_report_says_so() -> None:
    trainer = build_trainer(callbacks=[SpikeForensics()])
    trainer.fit(Rows(), ListLoader(rows_with_spikes({40})))
    report = json.loads(Path("reports/update-000040-spike/report.json").read_text())
    assert report["attribution"] == {"unavailable": NO_REPLAY}
    assert report["sequences"] == [{"rank": 0, "micro_batch": 1}]


@pytest.mark.system
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
