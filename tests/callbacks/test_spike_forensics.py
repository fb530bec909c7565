"""SpikeForensics: shares against plain loops, planted sequences, reports, limits, state, late devices."""

import json
from pathlib import Path
from typing import Any

import pytest

import spikes as benchmark
from andrea_callbacks import SpikeForensics
from tests.support.spikes import Events, Rows, replay, rows_with_spikes
from tests.support.toy import ListLoader, RowLogger, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended"),
]


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
def test_a_device_that_is_not_waited_for(wait: bool, read_late: Any) -> None:
    """The spike is known one update later, replayed on weights that are one update on, and still named."""
    read_late()
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


@pytest.mark.system
def test_planted_sequences_are_named() -> None:
    """A small version of benchmarks/spikes.py; a report that is made names what was planted."""
    planted = [benchmark.run_once(seed, benchmark.KINDS[seed % 3], 100) for seed in range(3)]
    clean = [benchmark.run_once(100_000, "", 100)]
    flagged = [each for each in planted if each.is_flagged]
    assert len(flagged) >= 2
    assert all(each.is_named for each in flagged)
    assert all(each.is_flagged for each in planted if each.ratio > 5)
    assert sum(each.flagged for each in clean) < 0.02 * sum(each.updates for each in clean)
