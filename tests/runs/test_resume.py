"""Resume means equal, with tolerance 0: every cut, resumes of resumes, every hook that may save."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from andrea_pl import (
    DurableCheckpoint,
)
from andrea_pl.runs.signals import StoppedBySignal
from tests.support.projects import BUILDERS
from tests.support.runs import EPOCH, Draws, data, difference, module
from tests.support.toy import RowLogger, build_trainer

UPDATES = 15


class Told(pl.Callback):
    """Sends a signal when an update is under way, or validation is."""

    def __init__(self, update: int, in_validation: bool = False) -> None:
        self.update = update
        self.in_validation = in_validation

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 == self.update and not self.in_validation:
            signal.raise_signal(signal.SIGTERM)

    def on_validation_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.update and self.in_validation:
            signal.raise_signal(signal.SIGTERM)


def everything(folder: Path) -> list[pl.Callback]:
    """Return all callbacks of ours."""
    made = [build() for name, build in BUILDERS.items() if name not in ("RunJournal", "CoherenceGate")]
    gate = BUILDERS["CoherenceGate"](every=3)
    return [*made, gate, BUILDERS["RunJournal"](path=str(folder / "journal.jsonl")), Draws()]


class Run:
    """A fit in a folder, as a new process would make it: nothing of an earlier one is at hand."""

    def __init__(
        self,
        folder: Path,
        resume: Path | None = None,
        callbacks: list[pl.Callback] | None = None,
        workers: int = 0,
        every: int | None = None,
        schedule: str = "cosine",
        **options: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.options = options
        seed = 0 if resume is None else 99
        pl.seed_everything(seed, verbose=False)
        self.logger = RowLogger()
        self.saving = DurableCheckpoint(
            every=every, minutes=None, keep=0, dirpath=str(folder / "checkpoints")
        )
        usual = {"max_steps": UPDATES, "val_check_interval": 4, "check_val_every_n_epoch": None}
        self.trainer = build_trainer(
            callbacks=[*everything(folder), *(callbacks or []), self.saving],
            logger=self.logger,
            log_every_n_steps=1,
            enable_checkpointing=True,
            default_root_dir=str(folder),
            **(usual | options),
        )
        self.module = module(schedule)
        self.stopped: StoppedBySignal | None = None
        try:
            self.trainer.fit(self.module, datamodule=data(workers), ckpt_path=resume)
        except StoppedBySignal as stop:
            self.stopped = stop

    @property
    def saved(self) -> Path:
        assert self.saving.last_path is not None
        return Path(self.saving.last_path)

    @property
    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """Everything logged but seconds, as one row a step."""
        merged: dict[int, dict[str, float]] = {}
        for step, row in self.logger.rows:
            kept = {name: value for name, value in row.items() if not name.startswith("throughput/")}
            merged.setdefault(step, {}).update(kept)
        return sorted(merged.items())


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


VALIDATIONS: dict[str, dict[str, Any]] = {
    "across epochs": {},
    "within epochs": {"val_check_interval": 3, "check_val_every_n_epoch": 1},
    "at their end": {"val_check_interval": 1.0, "check_val_every_n_epoch": 1},
    "by epochs": {"max_steps": -1, "max_epochs": 2, "val_check_interval": 1.0, "check_val_every_n_epoch": 1},
}


@pytest.fixture(scope="module", params=VALIDATIONS)
def straight(request: Any, tmp_path_factory: Any) -> Run:
    """Return an undisturbed run that saves at every update."""
    return Run(tmp_path_factory.mktemp("straight"), every=1, **VALIDATIONS[request.param])


@pytest.mark.system
def test_saving_changes_nothing(straight: Run, tmp_path: Path) -> None:
    """The weights and the states at the end are those of a run that saves its end alone."""
    alone = Run(tmp_path, **straight.options)
    assert difference(load(alone.saved), load(straight.saved)) is None
    assert alone.rows == straight.rows


@pytest.mark.system
def test_every_cut(straight: Run, tmp_path: Path) -> None:
    """Weights, moments, schedule, bandit, loader, generators, callbacks, counters; and every row logged."""
    end = load(straight.saved)
    is_acceptance = straight.options.get("check_val_every_n_epoch") is None
    for cut in range(1, end["global_step"]) if is_acceptance else (3, 5, 6, 7):
        resumed = Run(
            tmp_path / str(cut),
            resume=straight.saved.with_name(f"update-{cut:06d}.ckpt"),
            **straight.options,
        )
        assert difference(load(resumed.saved), end) is None, cut
        after = [row for row in straight.rows if row[0] > cut]
        assert [row for row in resumed.rows if row[0] > cut] == after, cut


@pytest.mark.system
@pytest.mark.guarantee("a resume is exact")
def test_a_resume_of_a_resume(straight: Run, tmp_path: Path) -> None:
    """Stopped by a signal in every single update, validations and ends of epochs still to come."""
    end = load(straight.saved)
    run: Run | None = None
    rows: list[Any] = []
    for update in range(1, end["global_step"]):
        run = stopped(tmp_path / str(update), straight, update, None if run is None else run.saved)
        rows += run.logger.rows
    assert run is not None
    last = Run(tmp_path / "last", resume=run.saved, **straight.options)
    assert difference(load(last.saved), end) is None
    merged: dict[int, dict[str, float]] = {}
    for step, row in [*rows, *last.logger.rows]:
        kept = {name: value for name, value in row.items() if not name.startswith("throughput/")}
        assert not merged.setdefault(step, {}).keys() & kept.keys()  # nothing is logged twice
        merged[step].update(kept)
    assert sorted(merged.items()) == straight.rows


def stopped(
    folder: Path,
    like: Run,
    update: int,
    resume: Path | None = None,
    in_validation: bool = False,
    workers: int = 0,
) -> Run:
    """Return a run that SIGTERM stopped in an update."""
    told = Told(update, in_validation)
    run = Run(folder, resume=resume, callbacks=[told], workers=workers, **like.options)
    assert run.stopped is not None, update
    assert run.stopped.code == 143
    assert run.trainer.global_step == load(run.saved)["global_step"] == update
    return run


@pytest.fixture(scope="module")
def usual(tmp_path_factory: Any) -> Run:
    """Return an undisturbed run with validation across epochs."""
    return Run(tmp_path_factory.mktemp("usual"), every=1)


@pytest.mark.system
@pytest.mark.parametrize("update", [4, 12])
def test_a_signal_in_validation(usual: Run, tmp_path: Path, update: int) -> None:
    """Validation is broken off and run again as a whole; at update 12 an epoch ends with it."""
    run = stopped(tmp_path / "first", usual, update, in_validation=True)
    assert not any("val/loss" in row for step, row in run.logger.rows if step == update)
    resumed = Run(tmp_path / "second", resume=run.saved)
    assert difference(load(resumed.saved), load(usual.saved)) is None
    assert [row for row in resumed.rows if row[0] > update] == [row for row in usual.rows if row[0] > update]
    assert (
        dict(resumed.rows)[update].items()
        >= {
            name: value for name, value in dict(usual.rows)[update].items() if name.startswith("val/")
        }.items()
    )


@pytest.mark.system
def test_workers_that_read_ahead(usual: Run, tmp_path: Path) -> None:
    """What two workers had read ahead is read again; the weights are those without workers."""
    run = stopped(tmp_path / "first", usual, 5, workers=2)
    run = stopped(tmp_path / "second", usual, 10, run.saved, workers=2)
    last = Run(tmp_path / "last", resume=run.saved, workers=2)
    assert difference(load(last.saved), load(usual.saved)) is None


SAVERS: dict[str, Callable[[], list[pl.Callback]]] = {
    "each batch": lambda: [ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)],
    "each validation": lambda: [ModelCheckpoint(monitor="val/loss", save_top_k=-1)],
    "each epoch": lambda: [ModelCheckpoint(save_top_k=-1, save_on_train_epoch_end=True)],
}


@pytest.mark.system
@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.guarantee("a resume is exact")
def test_whoever_saves(usual: Run, tmp_path: Path, saver: str) -> None:
    """Lightning's own ModelCheckpoint, whichever hook it saves from, last updates of epochs included."""
    Run(tmp_path / "first", callbacks=SAVERS[saver]())
    files = sorted((tmp_path / "first").rglob("epoch=*.ckpt"))
    assert len(files) >= 2
    for file in files:
        cut = load(file)["global_step"]
        if cut in (4, 6, 11, 12):
            resumed = Run(tmp_path / file.stem, resume=file)
            ours, theirs = load(resumed.saved), load(usual.saved)
            for each in (ours, theirs):
                each["callbacks"] = {
                    name: state for name, state in each["callbacks"].items() if "Checkpoint" not in name
                }
            assert difference(ours, theirs) is None, file.name


class TestControls:
    """What must differ does."""

    def cut(self, usual: Run, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Run:
        checkpoint = load(usual.saved.with_name("update-000007.ckpt"))
        change(checkpoint)
        folder.mkdir(exist_ok=True)
        torch.save(checkpoint, folder / "cut.ckpt")
        return Run(folder, resume=folder / "cut.ckpt")

    def weights(self, run: Run) -> dict[str, Any]:
        return load(run.saved)["state_dict"]

    def test_nothing_changed(self, usual: Run, tmp_path: Path) -> None:
        same = self.cut(usual, tmp_path, lambda _: None)
        assert difference(self.weights(same), self.weights(usual)) is None

    def test_no_random_states(self, usual: Run, tmp_path: Path) -> None:
        other = self.cut(usual, tmp_path, lambda checkpoint: checkpoint.pop("andrea_resume"))
        assert difference(self.weights(other), self.weights(usual))

    @pytest.mark.parametrize("generator", ["python", "numpy", "torch"])
    def test_one_generator_less(self, usual: Run, tmp_path: Path, generator: str) -> None:
        def drop(checkpoint: dict[str, Any]) -> None:
            states = checkpoint["andrea_resume"]["random"]
            states[0][generator] = load(usual.saved)["andrea_resume"]["random"][0][generator]

        other = self.cut(usual, tmp_path, drop)
        assert difference(load(other.saved)["callbacks"]["Draws"], load(usual.saved)["callbacks"]["Draws"])

    def test_no_loader_state(self, usual: Run, tmp_path: Path) -> None:
        other = self.cut(
            usual,
            tmp_path,
            lambda checkpoint: checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader"),
        )
        assert difference(self.weights(other), self.weights(usual))

    def test_another_number_of_ranks_is_said(self, usual: Run, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match="written by 2 ranks, this run has 1"):
            self.cut(
                usual,
                tmp_path,
                lambda each: each["andrea_resume"].update(random=[*each["andrea_resume"]["random"]] * 2),
            )


@pytest.mark.system
def test_a_longer_run_goes_on_within_the_epoch(tmp_path: Path) -> None:
    """A run that `max_steps` ended within an epoch is that run when it is told to go further."""
    straight = Run(tmp_path / "straight", schedule="constant")
    for steps in (8, 9):  # validation follows update 8
        short = Run(tmp_path / f"short{steps}", max_steps=steps, schedule="constant")
        longer = Run(tmp_path / f"longer{steps}", resume=short.saved, schedule="constant")
        assert difference(load(longer.saved), load(straight.saved)) is None
        epochs = [row for row in longer.rows if "epoch/loss" in row[1]]
        assert [step for step, _ in epochs] == [12, 15]
        assert epochs[0][1]["epoch/updates"] == EPOCH
