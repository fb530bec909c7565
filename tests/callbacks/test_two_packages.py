"""Under `lightning.pytorch` and `pytorch_lightning` every callback gives the same scalars, files and bits.

The two are the same code under two names, and two sets of classes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import pytorch_lightning.loggers
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from andrea_callbacks import (
    EpochSummary,
    ExactResume,
    FiniteGuard,
    MomentMonitor,
    NonFiniteError,
    RunReport,
    SpikeForensics,
    UpdateProgressBar,
    read_journal,
)
from andrea_callbacks.hooks.packages import is_kind
from andrea_pl import ClipDDPStrategy, ClipSingleDeviceStrategy
from tests.support.projects import BUILDERS, TextRows

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended"),
]
PACKAGES: dict[str, ModuleType] = {
    "lightning.pytorch": lightning.pytorch,
    "pytorch_lightning": pytorch_lightning,
}
EACH = pytest.mark.parametrize("package", PACKAGES)
BAD_UPDATE = 31


def losses(module: Any, batch: Tensor) -> Tensor:
    return (module.network(batch) - 1.0).square().sum(1) * batch.abs().mean(1)  # BatchNorm hides a large row


def project(package: ModuleType, kind: str = "automatic") -> Any:
    """Return a module of a package: dropout and BatchNorm, automatic or manual optimization, with a clip."""

    class Project(package.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.network = nn.Sequential(
                nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4)
            )
            self.automatic_optimization = kind == "automatic"

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = losses(self, batch).mean()
            if kind == "automatic":
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            return loss

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val/loss", losses(self, batch).mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Project()


def rows(bad: float | None = 40.0) -> DataLoader[Tensor]:
    """Return 40 batches, one with a spike or a NaN in its third row."""
    data = TextRows(160).rows.clone()
    if bad is not None:
        data[4 * (BAD_UPDATE - 1) + 2] *= bad
    return DataLoader(data, batch_size=4)


def callbacks() -> list[Any]:
    """Return one of each callback that is public, the bar included."""
    options: dict[str, Any] = {"SpikeForensics": {"replay": losses}, "FiniteGuard": {"replay": losses}}
    made = [build(**options.get(name, {})) for name, build in BUILDERS.items()]
    return [*made, ExactResume(), RunReport(), UpdateProgressBar()]


def train(
    name: str, folder: Path, kind: str = "automatic", added: list[Any] | None = None, **options: Any
) -> tuple[Any, Any]:
    package = PACKAGES[name]
    module = project(package, kind)
    torch.manual_seed(7)
    logger = package.loggers.TensorBoardLogger(folder, name="runs", version=0)
    clip = {"gradient_clip_val": 0.5} if kind == "automatic" else {}
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "enable_model_summary": False,
        "val_check_interval": 20,
    }
    trainer = package.Trainer(
        callbacks=callbacks() if added is None else added,
        logger=logger,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        **(defaults | clip | options),
    )
    trainer.fit(module, rows(), DataLoader(TextRows(8), batch_size=4))
    return trainer, module


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return all curves but those of the clock."""
    events = EventAccumulator(str(folder / "runs/version_0"))
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if not name.startswith("throughput/")]
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in names}


@pytest.mark.system
@pytest.mark.parametrize("kind", ["automatic", "manual"])
def test_all_callbacks_give_the_same(kind: str, tmp_path: Path) -> None:
    """Nine scalars were missing under pytorch_lightning, in silence, and TensorBoardLayout did nothing."""
    found: dict[str, Any] = {}
    for name in PACKAGES:
        trainer, module = train(name, tmp_path / name, kind)
        _, untouched = train(name, tmp_path / f"{name}-plain", kind, added=[])
        assert all(map(torch.equal, module.state_dict().values(), untouched.state_dict().values()))
        curves, log = scalars(tmp_path / name), Path(trainer.log_dir)
        journal = read_journal(log / "journal.jsonl")
        report = json.loads((log / f"reports/update-{BAD_UPDATE:06d}-spike/report.json").read_text())
        found[name] = {
            "scalars": curves,
            "kinds": [(row["kind"], row["update"]) for row in journal],
            "attribution": report["attribution"],
            "clip": (report["clip_threshold"], report.get("clipped_norm")),
            "files": sorted(
                str(each.relative_to(log)) for each in log.rglob("*") if "tfevents" not in each.name
            ),
            "weights": [each.tolist() for each in module.state_dict().values()],
            "layout": "custom_scalars__config__" in EventTensors(log),
        }
    ours, theirs = found.values()
    assert ours.keys() == theirs.keys()
    for what in ours:
        assert repr(ours[what]) == repr(theirs[what]), what
    expected = {
        "train/clip_threshold",
        "train/clip_coefficient",
        "train/grad_norm_clipped",
        "train/clip_fraction",
    }
    expected |= {
        "train/clip_coefficient_mean",
        "moments/spike_first_fraction",
        "moments/spike_lr_factor",
        "final/val_loss",
    }
    expected |= {
        "moments/spike_first_updates_left",
        "moments/spike_lr_updates_left",
        "train/spikes",
        "val/loss",
    }
    assert expected <= ours["scalars"].keys()
    assert ours["layout"]


class EventTensors:
    """Names of tensors in a log folder; custom scalars are one."""

    def __init__(self, folder: Path) -> None:
        events = EventAccumulator(str(folder))
        events.Reload()
        self.names = events.Tags()["tensors"]

    def __contains__(self, name: str) -> bool:
        return name in self.names


@EACH
def test_one_progress_bar(package: str, tmp_path: Path) -> None:
    """There were two under pytorch_lightning."""
    trainer, _ = train(package, tmp_path, added=[UpdateProgressBar()], limit_train_batches=20)
    bars = [each for each in trainer.callbacks if is_kind(each, lightning.pytorch.callbacks.ProgressBar)]
    assert [type(each).__name__ for each in bars] == ["UpdateProgressBar"]
    assert trainer.progress_bar_callback is bars[0]


@EACH
def test_a_nan_is_caught_and_found(package: str, tmp_path: Path) -> None:
    module = project(PACKAGES[package])
    trainer = PACKAGES[package].Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[FiniteGuard(replay=losses)],
        default_root_dir=tmp_path,
    )
    where = r"row 3: NaN in the batch itself.*NaN first in the output of network\.0"
    with pytest.raises(NonFiniteError, match=rf"update {BAD_UPDATE}: the loss .*{where}"):
        trainer.fit(module, rows(float("nan")))


@pytest.mark.system
@EACH
def test_a_resume_is_exact(package: str, tmp_path: Path) -> None:
    """All callbacks' states, and the random states, through a checkpoint of either package."""

    def run(folder: str, **options: Any) -> tuple[Any, Any]:
        added = [MomentMonitor(), SpikeForensics(replay=losses), EpochSummary(), ExactResume()]
        return train(package, tmp_path / folder, added=added, enable_progress_bar=False, **options)

    straight, right = run("straight", max_epochs=2)
    first, _ = run("first")
    first.save_checkpoint(tmp_path / "cut.ckpt")
    torch.load(tmp_path / "cut.ckpt", weights_only=True)
    module, own = project(PACKAGES[package]), PACKAGES[package]
    again = own.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        gradient_clip_val=0.5,
        num_sanity_val_steps=0,
        val_check_interval=20,
        default_root_dir=tmp_path,
        callbacks=[MomentMonitor(), SpikeForensics(replay=losses), EpochSummary(), ExactResume()],
    )
    torch.manual_seed(99)
    again.fit(module, rows(), DataLoader(TextRows(8), batch_size=4), ckpt_path=tmp_path / "cut.ckpt")
    assert again.global_step == straight.global_step
    assert all(map(torch.equal, module.state_dict().values(), right.state_dict().values()))


@pytest.mark.parametrize("build", [ClipSingleDeviceStrategy, ClipDDPStrategy])
def test_a_clip_strategy_says_which_trainer_it_needs(build: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"needs a Trainer of lightning\.pytorch, not of pytorch_lightning"):
        pytorch_lightning.Trainer(strategy=build())
