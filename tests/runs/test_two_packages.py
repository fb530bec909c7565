"""Saving under Lightning's two names, and in processes that are given the callback by a pickle."""

import copy
import io
import pickle
import signal
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import Tensor

from andrea_callbacks import ExactResume
from andrea_callbacks.hooks.packages import is_kind, twin_of, with_twin
from andrea_pl import DurableCheckpoint, DurableCheckpointIO, UserError
from andrea_pl.runs.checkpoint_io import read_checkpoint
from andrea_pl.runs.manifest import fault_of, newest_valid
from andrea_pl.runs.signals import StoppedBySignal, requeue_signal
from tests.support.commands import run_python
from tests.support.runs import Windows

PACKAGES = [lightning.pytorch, pytorch_lightning]

both = pytest.mark.parametrize("package", PACKAGES, ids=lambda each: each.__name__)


def module(package: ModuleType) -> Any:
    """Return a module of a package, with dropout, so that random states matter."""

    class Project(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            rows = torch.arange(8.0).view(2, 4) * (batch_idx + 1) / 9
            loss = self.layer(torch.nn.functional.dropout(rows)).square().sum()
            self.log("score", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.layer.weight.sum(), batch_size=1)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    return Project()


def trainer_of(package: ModuleType, callbacks: list[Any], **options: Any) -> Any:
    usual = {"max_epochs": 1, "val_check_interval": 5, "num_sanity_val_steps": 0, "accelerator": "cpu"}
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "devices": 1}
    return package.Trainer(callbacks=callbacks, **(usual | silent | options))


def run(package: ModuleType, folder: Path, told: int | None = None, resume: Path | None = None) -> Any:
    """Train ten updates, or until a signal; return callback and module."""

    class Told(package.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == told:
                signal.raise_signal(signal.SIGTERM)

    package.seed_everything(5 if resume is None else 6, verbose=False)
    saving = DurableCheckpoint(monitor="val", minutes=None, dirpath=str(folder))
    trainer = trainer_of(package, [saving, ExactResume(), Told()])
    project = module(package)
    validation = [torch.tensor([0])]
    with pytest.raises(StoppedBySignal) if told is not None else nullcontext():
        trainer.fit(project, Windows(), validation, ckpt_path=resume)
    return saving, project, trainer


@both
class TestBothPackages:
    """Lightning's two names: the same files, the same bits."""

    def test_no_rival(self, tmp_path: Path, package: ModuleType) -> None:
        saving, _, trainer = run(package, tmp_path)
        assert trainer.checkpoint_callbacks == [saving]
        assert trainer.checkpoint_callback is saving
        assert type(trainer.callbacks[-1]).__name__ == "DurableCheckpoint"
        assert saving.best_model_path == str(tmp_path / "best-000005.ckpt")
        assert fault_of(tmp_path / "best-000005.ckpt") is None  # written by DurableCheckpointIO
        assert isinstance(trainer.strategy.checkpoint_io, DurableCheckpointIO)

    def test_a_signal_and_a_resume(self, tmp_path: Path, package: ModuleType) -> None:
        """Equal to the bit to the run that nobody stopped, and that one under both names."""
        straight = run(package, tmp_path / "straight")[1]
        stopped = run(package, tmp_path / "cut", told=3)[0]
        assert newest_valid(tmp_path / "cut").update == 4
        resumed = run(package, tmp_path / "cut", resume=Path(stopped.last_path))[1]
        first = run(lightning.pytorch, tmp_path / "first")[1]
        for other in (resumed, first):
            for ours, theirs in zip(straight.parameters(), other.parameters(), strict=True):
                assert torch.equal(ours, theirs)

    def test_the_io_as_a_plugin(self, tmp_path: Path, package: ModuleType) -> None:
        from importlib import import_module

        saving = import_module(f"{package.__name__}.callbacks").ModelCheckpoint(tmp_path, "{step}")
        trainer = trainer_of(package, [saving], plugins=[DurableCheckpointIO()])
        trainer.fit(module(package), Windows())
        assert fault_of(tmp_path / "step=10.ckpt") is None

    @pytest.mark.filterwarnings("ignore:The `srun` command is available")
    def test_slurm(self, monkeypatch: Any, package: ModuleType) -> None:
        """The signal by which a requeue is asked for is the environment's, whoever's class that is."""
        fabric = "lightning.fabric" if package is lightning.pytorch else "lightning_fabric"
        from importlib import import_module

        slurm = import_module(f"{fabric}.plugins.environments.slurm").SLURMEnvironment

        class Connector:
            cluster_environment = slurm(auto_requeue=True, requeue_signal=signal.SIGUSR2)

        trainer: Any = type("Trainer", (), {"_accelerator_connector": Connector})
        assert requeue_signal(trainer) == signal.SIGUSR2
        Connector.cluster_environment = slurm(auto_requeue=False)
        assert requeue_signal(trainer) is None

    @pytest.mark.parametrize("way", ["pickle", "deepcopy", "torch.save"])
    def test_copies(self, tmp_path: Path, package: ModuleType, way: str) -> None:
        """Fresh, within a fit that holds lock and signals, and after it; a copy holds neither."""
        copies: list[Any] = []

        class Copies(package.Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                copies.append(copied(trainer.checkpoint_callback, way))

        saving = DurableCheckpoint(monitor="val", minutes=None, dirpath=str(tmp_path))
        fresh = copied(saving, way)
        assert (fresh.monitor, fresh.best) == ("val", {})
        trainer_of(package, [saving, ExactResume(), Copies()]).fit(
            module(package), Windows(), [torch.zeros(1)]
        )
        assert len(copies) == 10
        after = copied(saving, way)
        assert after.best_model_path == saving.best_model_path == f"{tmp_path}/best-000005.ckpt"
        for each in (fresh, copies[3], after):
            assert each._folder is each._signals is None
            assert isinstance(each, (DurableCheckpoint, package.callbacks.Checkpoint))
            other = trainer_of(package, [each, ExactResume()])
            assert other.checkpoint_callbacks == [each]
        assert isinstance(copied(DurableCheckpointIO(), way), DurableCheckpointIO)
        assert isinstance(copied(ExactResume(), way), ExactResume)


def copied(value: Any, way: str) -> Any:
    if way == "pickle":
        return pickle.loads(pickle.dumps(value))
    if way == "deepcopy":
        return copy.deepcopy(value)
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


SPAWNED = """
import sys
from pathlib import Path
import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from andrea_callbacks import ExactResume
from andrea_pl import DurableCheckpoint, DurableCheckpointIO

class Project(BoringModel):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer.weight.sum(), sync_dist=True)

if __name__ == "__main__":
    strategy, folder, plugins = sys.argv[1:4]
    is_spawned = strategy == "ddp_spawn"
    saving = DurableCheckpoint(monitor=None if is_spawned else "val", minutes=None, dirpath=folder)
    trainer = pl.Trainer(
        callbacks=[saving, ExactResume()], strategy=strategy, devices=int(sys.argv[4]), accelerator="cpu",
        max_steps=2, val_check_interval=2, limit_val_batches=1, num_sanity_val_steps=0, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        plugins=[DurableCheckpointIO()] if plugins == "io" else None,
    )
    module = Project()
    trainer.fit(module)
    saved = f"{folder}/{'update' if is_spawned else 'best'}-000002.ckpt"
    assert saving.best_model_path == ("" if is_spawned else saved), saving.best_model_path
    kept = torch.load(saved, weights_only=True)["state_dict"]["layer.weight"]
    assert torch.equal(kept, module.layer.weight), "the weights of the worker"
    print("done")
"""


@pytest.mark.system
class TestWorkers:
    """Lightning's launchers of `ddp_fork` and `ddp_spawn` set `best_model_path` after training."""

    @pytest.mark.parametrize("plugins", ["none", "io"])
    def test_forked(self, tmp_path: Path, plugins: str) -> None:
        result = run_python(SPAWNED, "ddp_fork", str(tmp_path), plugins, "2")
        assert "done" in result.stdout, result.stderr[-2000:]

    def test_spawned(self, tmp_path: Path) -> None:
        """The worker is given the callback by a pickle."""
        result = run_python(
            SPAWNED.replace("Project()", "BoringModel()"), "ddp_spawn", str(tmp_path), "none", "1"
        )
        assert "done" in result.stdout, result.stderr[-2000:]


def test_evaluation_after_a_fit_keeps_the_best(tmp_path: Path) -> None:
    """`best_model_path` is still known to a second evaluation by `ckpt_path="best"`."""
    saving, project, trainer = run(lightning.pytorch, tmp_path)
    for _ in range(2):
        trainer.validate(project, [torch.tensor([0])], ckpt_path="best", verbose=False)
    assert read_checkpoint(saving.best_model_path)["global_step"] == 5


class TestTwins:
    def test_values(self) -> None:
        theirs = pytorch_lightning.loggers.CSVLogger(".")
        assert is_kind(theirs, lightning.pytorch.loggers.CSVLogger)
        assert not is_kind(theirs, lightning.pytorch.loggers.TensorBoardLogger)
        assert is_kind(lightning.pytorch.loggers.CSVLogger("."), lightning.pytorch.loggers.CSVLogger)
        assert twin_of(dict) is None

    def test_a_subclass_of_the_users(self) -> None:
        """Its name, its options and its hooks stay."""

        class Mine(DurableCheckpoint):
            def __init__(self, words: str) -> None:
                super().__init__(every=3)
                self.words = words

        made = Mine("hello")
        assert (type(made).__name__, type(made).__qualname__) == (Mine.__name__, Mine.__qualname__)
        assert isinstance(made, (Mine, pytorch_lightning.callbacks.Checkpoint))
        assert (made.words, made.every) == ("hello", 3)
        assert copy.deepcopy(made).words == "hello"
        assert with_twin(type(made)) is type(made)

    def test_made_before_the_other_package(self, tmp_path: Path) -> None:
        """It is refused in one line, by that package's trainer."""
        saving = DurableCheckpoint(dirpath=str(tmp_path))
        saving.__class__ = DurableCheckpoint  # as it would be without that package
        trainer = trainer_of(pytorch_lightning, [saving])
        words = "made before pytorch_lightning was imported, .*; import pytorch_lightning first"
        with pytest.raises(UserError, match=words):
            trainer.fit(module(pytorch_lightning), Windows())
