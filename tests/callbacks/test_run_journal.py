"""RunJournal: every update once, events, durable lines, torn lines, resumes."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from andrea_callbacks import FiniteGuard, NonFiniteError, RunJournal, read_journal
from andrea_callbacks.forensics.report import to_json
from andrea_callbacks.numerics.atomic_write import append_durably
from tests.support.commands import run_python
from tests.support.toy import NAN, ToyU, build_trainer, fit, window

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended"),
]


def test_reports_of_a_module_that_has_them() -> None:
    bad = type(window([0]))([(torch.tensor([0]), NAN)])
    fit(ToyU(on_nonfinite="skip"), [window([0], [1, 1, 1]), bad, window([1])], callbacks=[RunJournal()])
    rows = read_journal("journal.jsonl")
    assert [row["kind"] for row in rows] == ["start", "nonfinite", "update", "update", "update", "end"] or [
        row["kind"] for row in rows
    ] == ["start", "update", "update", "nonfinite", "update", "end"]
    updates = [row for row in rows if row["kind"] == "update"]
    assert [row["outcome"] for row in updates] == ["applied", "nonfinite_skip", "applied"]
    assert updates[0]["grad_norm"] == pytest.approx(0.353553, rel=1e-5)
    assert updates[0]["tokens"] == 4
    assert updates[1]["loss"] == "NaN"
    assert rows[0]["torch"] == torch.__version__
    assert rows[0]["resumed"] is False


def test_validation_checkpoints_and_exceptions(tmp_path: Path) -> None:
    class Bad(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)["loss"]
            return loss * (NAN if self.trainer.global_step == 6 else 1.0)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", self.step(batch))

    trainer = build_trainer(
        callbacks=[RunJournal(every=2), FiniteGuard()],
        logger=CSVLogger(tmp_path),
        enable_checkpointing=True,
        limit_train_batches=4,
        limit_val_batches=1,
        max_epochs=3,
    )
    with pytest.raises(NonFiniteError):
        trainer.fit(Bad())
    rows = read_journal(Path(trainer.log_dir or "") / "journal.jsonl")
    kinds = [row["kind"] for row in rows]
    assert kinds.count("update") == 7
    assert kinds.count("validation") == 1
    assert kinds.count("checkpoint") >= 1
    assert kinds[-1] == "exception"
    assert "NonFiniteError: update 7" in rows[-1]["message"]
    validation = next(row for row in rows if row["kind"] == "validation")
    assert validation["update"] == 4
    assert validation["metrics"]["val/loss"] > 0


def test_resume_appends(tmp_path: Path) -> None:
    journal = str(tmp_path / "j.jsonl")
    options: dict[str, Any] = {"limit_train_batches": 4, "limit_val_batches": 0}
    trainer = build_trainer(callbacks=[RunJournal(path=journal)], **options)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    first = (tmp_path / "j.jsonl").read_bytes()
    again = build_trainer(callbacks=[RunJournal(path=journal)], max_epochs=2, **options)
    again.fit(BoringModel(), ckpt_path=tmp_path / "a.ckpt")
    assert (tmp_path / "j.jsonl").read_bytes().startswith(first)
    rows = read_journal(journal)
    assert [row["update"] for row in rows if row["kind"] == "update"] == list(range(1, 9))
    assert [row["resumed"] for row in rows if row["kind"] == "start"] == [False, True]


def boring(callbacks: list[Any], **options: Any) -> Any:
    trainer = build_trainer(callbacks=callbacks, limit_train_batches=4, limit_val_batches=0, **options)
    trainer.fit(BoringModel())
    return trainer


def updates_in(path: str) -> list[int]:
    return [row["update"] for row in read_journal(path) if row["kind"] == "update"]


def test_unrelated_runs_do_not_share_a_file(tmp_path: Path) -> None:
    """Without a logger all runs have the same folder; a resume goes on with the file of its own run."""
    boring([RunJournal()])
    second = boring([RunJournal(), RunJournal(name="more")])
    second.save_checkpoint(tmp_path / "a.ckpt")
    boring([RunJournal()])
    files = sorted(each.name for each in Path().glob("journal*.jsonl"))
    assert files == ["journal-more.jsonl", "journal.2.jsonl", "journal.3.jsonl", "journal.jsonl"]
    assert all(updates_in(each) == [1, 2, 3, 4] for each in files)
    resumed = build_trainer(
        callbacks=[RunJournal()], max_epochs=2, limit_train_batches=4, limit_val_batches=0
    )
    resumed.fit(BoringModel(), ckpt_path=tmp_path / "a.ckpt")
    assert updates_in("journal.2.jsonl") == list(range(1, 9))
    assert updates_in("journal.jsonl") == updates_in("journal.3.jsonl") == [1, 2, 3, 4]


def test_the_same_callback_again_and_the_same_trainer_going_on() -> None:
    journal = RunJournal()
    trainer = boring([journal])
    trainer.fit_loop.max_epochs = 2
    trainer.fit(BoringModel())
    boring([journal])
    assert updates_in("journal.jsonl") == list(range(1, 9))
    assert updates_in("journal.2.jsonl") == [1, 2, 3, 4]


@given(
    st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=6), st.integers(0, 200)
)
def test_any_cut_loses_one_line_at_most(payloads: list[bytes], cut: int) -> None:
    """Cut anywhere, as a kill does; what is appended afterwards is whole, and so is what came before."""
    file = Path("cut.jsonl")
    file.unlink(missing_ok=True)
    lines = [to_json({"n": number, "text": payload.hex()}) for number, payload in enumerate(payloads)]
    whole = "".join(line + "\n" for line in lines).encode()
    file.write_bytes(whole[:cut])
    append_durably(file, b'{"n": "last"}\n')
    kept = whole[:cut].count(b"\n")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = read_journal(file)
    assert rows[:kept] == [json.loads(line) for line in lines[:kept]]
    assert rows[-1] == {"n": "last"}
    assert len(rows) - kept in (1, 2)  # a line that lacked its end alone is whole after all


def test_torn_line_is_spoken_of() -> None:
    Path("torn.jsonl").write_text('{"a": 1}\n{"b": 2')
    with pytest.warns(UserWarning, match=r"torn.jsonl, line 2: torn, left out"):
        assert read_journal("torn.jsonl") == [{"a": 1}]


KILLED = """
import os, signal, threading, time, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning.pytorch as pl
from andrea_callbacks import RunJournal

def kill():
    file = Path("journal.jsonl")
    while not file.exists() or file.stat().st_size < 20_000:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill, daemon=True).start()
trainer = pl.Trainer(max_steps=50_000, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    callbacks=[RunJournal(every=3)])
trainer.fit(BoringModel())
"""


@pytest.mark.system
def test_readable_after_a_kill() -> None:
    assert run_python(KILLED).returncode == -signal.SIGKILL
    rows = read_journal(Path("journal.jsonl"))
    updates = [row["update"] for row in rows if row["kind"] == "update"]
    assert updates == list(range(1, len(updates) + 1))
    assert len(updates) > 50


def test_a_journal_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    journal = RunJournal(path=str(tmp_path / "file" / "j.jsonl"))
    trainer = build_trainer(callbacks=[journal], limit_train_batches=2, limit_val_batches=0)
    with pytest.warns(UserWarning, match="RunJournal: .*j.jsonl could not be written"):
        trainer.fit(BoringModel())
    assert trainer.global_step == 2


def test_json_that_every_reader_takes() -> None:
    row = {
        "a": NAN,
        "b": [float("inf"), -float("inf")],
        "c": torch.tensor([1.0, NAN]),
        "d": {1: None},
        "e": "é",
    }
    assert json.loads(to_json(row)) == {
        "a": "NaN",
        "b": ["Infinity", "-Infinity"],
        "c": [1.0, "NaN"],
        "d": {"1": None},
        "e": "é",
    }
