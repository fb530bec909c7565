"""When checkpoints are saved and which are kept."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from andrea_pl import DurableCheckpoint, UserError
from andrea_pl.runs.manifest import newest_valid
from tests.support.toy import ListLoader, ToyU, build_trainer, window

SCORES = [5.0, 3.0, 4.0, float("nan"), 2.0, 2.0, 6.0]


class Scored(ToyU):
    """A module whose validations go as SCORES say."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", SCORES[self.seen % len(SCORES)], batch_size=1)
        self.seen += 1


def fit(
    folder: Path, updates: int = 14, callbacks: list[Any] | None = None, **options: Any
) -> DurableCheckpoint:
    """Train with a validation every two updates."""
    trainer_options = options.pop("trainer", {})
    saving = DurableCheckpoint(**({"minutes": None, "dirpath": str(folder)} | options))
    trainer = build_trainer(
        callbacks=[saving, *(callbacks or [])],
        enable_checkpointing=True,
        **({"val_check_interval": 2, "max_epochs": 1} | trainer_options),
    )
    trainer.fit(Scored(), ListLoader([window([0])] * updates), ListLoader([torch.tensor([0])]))
    return saving


def names(folder: Path) -> list[str]:
    return sorted(each.name.removesuffix(".ckpt") for each in folder.glob("*.ckpt"))


def test_the_best_by_the_least(tmp_path: Path) -> None:
    """Validations after 2, 4, …: NaN and a tie are no improvement; the last update is saved besides."""
    saving = fit(tmp_path, monitor="score", keep=1)
    assert names(tmp_path) == ["best-000010", "update-000014"]
    assert saving.best == {"best-000010.ckpt": 2.0}
    assert saving.best_model_path == f"{tmp_path}/best-000010.ckpt"


def test_the_best_by_the_largest_and_several(tmp_path: Path) -> None:
    fit(tmp_path, monitor="score", mode="max", keep=1, keep_best=2)
    assert names(tmp_path) == ["best-000002", "best-000014"]


def test_every_so_many_updates(tmp_path: Path) -> None:
    """An update that is saved as best is not saved again; the newest are kept."""
    fit(tmp_path, every=3, monitor="score", keep=2)
    assert names(tmp_path) == ["best-000010", "update-000012", "update-000014"]
    fit(tmp_path / "all", every=3, keep=0)
    assert names(tmp_path / "all") == [f"update-{update:06d}" for update in (3, 6, 9, 12, 14)]


def test_the_newest_are_kept_where_each_is_the_best(tmp_path: Path) -> None:
    """Or there would be nothing to fall back to."""
    fit(tmp_path, updates=4, every=2, monitor="score", keep=3)
    assert names(tmp_path) == ["best-000002", "best-000004"]
    fit(tmp_path / "short", updates=4, every=2, monitor="score", keep=1)
    assert names(tmp_path / "short") == ["best-000004"]


def test_rotation_goes_by_numbers(tmp_path: Path) -> None:
    """Past a million updates names are no longer in the order of letters."""
    saving = DurableCheckpoint(every=1, minutes=None, keep=2, dirpath=str(tmp_path))
    trainer = build_trainer(callbacks=[saving], enable_checkpointing=True)

    class Far(Scored):
        def on_train_start(self) -> None:
            super().on_train_start()
            for each in (999_997, 999_998):
                trainer.save_checkpoint(tmp_path / f"update-{each}.ckpt")
            trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed = 999_998

    trainer.fit_loop.epoch_loop.max_steps = -1
    trainer.fit(Far(), ListLoader([window([0])] * 4))
    assert names(tmp_path) == ["update-1000001", "update-1000002"]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
def test_another_run_in_the_same_folder(tmp_path: Path) -> None:
    """Nothing is lost, and nothing of it is taken for this run's."""
    fit(tmp_path, every=2, keep=0)
    fit(tmp_path, updates=5, every=2, keep=0)
    assert names(tmp_path) == ["update-000002", "update-000004", "update-000005"]
    assert names(tmp_path / "earlier-1") == [f"update-{update:06d}" for update in range(2, 15, 2)]
    assert newest_valid(tmp_path / "earlier-1").update == 14
    saving = DurableCheckpoint(minutes=None, dirpath=str(tmp_path))
    resumed = build_trainer(callbacks=[saving], enable_checkpointing=True, max_epochs=2)
    loader = ListLoader([window([0])] * 5)
    resumed.fit(Scored(), loader, ckpt_path=tmp_path / "update-000004.ckpt")
    assert names(tmp_path / "earlier-2") == ["update-000005"]


def test_a_resume_elsewhere_has_a_best_of_its_own(tmp_path: Path) -> None:
    """That of the other folder cannot be found in this one."""
    fit(tmp_path / "a", updates=10, monitor="score")
    saving = DurableCheckpoint(minutes=None, monitor="score", dirpath=str(tmp_path / "b"))
    trainer = build_trainer(callbacks=[saving], enable_checkpointing=True, max_epochs=2, val_check_interval=2)
    validation = ListLoader([torch.tensor([0])])
    path = tmp_path / "a" / "best-000010.ckpt"
    trainer.fit(Scored(), ListLoader([window([0])] * 10), validation, ckpt_path=path)
    assert saving.best == {"best-000020.ckpt": 2.0}
    assert Path(saving.best_model_path).exists()


def test_another_writer_is_spoken_of(tmp_path: Path) -> None:
    from lightning.pytorch.plugins import AsyncCheckpointIO

    with pytest.warns(UserWarning, match="written by AsyncCheckpointIO, as safely as it does"):
        fit(tmp_path, updates=2, trainer={"plugins": [AsyncCheckpointIO()]})


def test_a_metric_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no metric 'loss' to monitor; known are score"):
        fit(tmp_path, monitor="loss")


def test_early_stopping_leaves_its_end(tmp_path: Path) -> None:
    """The run stops after a validation; what it came to is saved, and resumes within the epoch."""
    fit(tmp_path, callbacks=[EarlyStopping("score", patience=1)], trainer={"check_val_every_n_epoch": 1})
    assert newest_valid(tmp_path).update == 6
    kept = torch.load(newest_valid(tmp_path).path, weights_only=True)
    assert kept["andrea_resume"]["place"] == "validated"


def test_nothing_is_written_by_fast_dev_run(tmp_path: Path) -> None:
    fit(tmp_path / "none", trainer={"fast_dev_run": True})
    assert not (tmp_path / "none").exists()


def test_the_same_callback_in_two_fits(tmp_path: Path) -> None:
    """The folder is given back after the first; the second starts with no best."""
    saving = DurableCheckpoint(every=1, monitor="score", dirpath=str(tmp_path / "a"))
    for _ in range(2):
        trainer = build_trainer(callbacks=[saving], enable_checkpointing=True, max_steps=2)
        trainer.fit(Scored(), ListLoader([window([0])] * 2), ListLoader([torch.tensor([0])]))
        assert saving.best == {"best-000002.ckpt": 5.0}


def test_signals_are_given_back(tmp_path: Path) -> None:
    """Also after an exception."""
    import signal

    class Fails(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise RuntimeError("stop")

    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    fit(tmp_path / "a")
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
    with pytest.raises(RuntimeError, match="stop"):
        fit(tmp_path / "b", callbacks=[Fails()])
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
    assert names(tmp_path / "b") == []


def test_a_foreign_project_accumulates(tmp_path: Path) -> None:
    """Under automatic optimization only batches at which the optimizer stepped are updates."""
    from lightning.pytorch.demos.boring_classes import BoringModel

    from andrea_callbacks import ExactResume

    saving = DurableCheckpoint(every=2, minutes=None, keep=0, dirpath=str(tmp_path))
    trainer = build_trainer(
        callbacks=[saving, ExactResume()],
        enable_checkpointing=True,
        accumulate_grad_batches=3,
        limit_train_batches=18,
        limit_val_batches=1,
    )
    trainer.fit(BoringModel())
    assert names(tmp_path) == [f"update-{update:06d}" for update in (2, 4, 6)]
