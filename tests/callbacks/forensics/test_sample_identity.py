"""What rows of a batch are called in reports."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from andrea_callbacks import SpikeForensics
from andrea_callbacks.forensics.sample_identity import identity_of, spell
from tests.support.spikes import Rows, replay, rows_with_spikes
from tests.support.toy import ListLoader, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended"),
]


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
