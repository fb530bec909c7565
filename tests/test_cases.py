"""Public reports about resume, checkpoints and the command that we must get right; each has its value here.

Those about ranks are in tests/training/test_ranks.py, those about flags in
tests/cli/test_resumed_run.py.
"""

import importlib.metadata
import re
import signal
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from packaging.requirements import Requirement
from packaging.version import Version
from torch.utils.data import DataLoader, Dataset

from andrea_pl import DurableCheckpoint, WindowLoader
from andrea_pl.runs.manifest import newest_valid
from andrea_pl.runs.signals import StoppedBySignal
from tests.support.commands import ROOT
from tests.support.toy import ListLoader, Recorder, ToyU, build_trainer, window

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRED = {each.name: each for each in map(Requirement, PROJECT["dependencies"])}
FLOORS = {"torch": "2.10", "lightning": "2.6.6", "jsonargparse": "4.52"}


class Items(Dataset[torch.Tensor]):
    """Twelve items, each its own number."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


class Seen(ToyU):
    """Learns whether an item is odd, and keeps which it was trained on."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
        self.items: list[int] = []

    def loss_sum(self, micro_batch: Any) -> torch.Tensor:
        self.items += micro_batch.flatten().tolist()
        return super().loss_sum(micro_batch % 2)


def fit(folder: Path, resume: Path | None = None, tell: int | None = None, **options: Any) -> Seen:
    """Train on twelve items by four, of one epoch; be told by a signal to stop in an update."""
    module = Seen()
    saving = DurableCheckpoint(every=1, keep=0, dirpath=str(folder))

    class Told(Recorder):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step + 1 == tell:
                signal.raise_signal(signal.SIGTERM)

    callbacks = [Told(), saving, *options.pop("callbacks", [])]
    trainer = build_trainer(callbacks=callbacks, enable_checkpointing=True, **options)
    loader = WindowLoader(DataLoader(Items(), batch_size=2), accumulate=2)
    if tell is None:
        trainer.fit(module, loader, ckpt_path=resume)
        return module
    with pytest.raises(StoppedBySignal) as stop:
        trainer.fit(module, loader, ckpt_path=resume)
    assert stop.value.code == 143
    return module


def test_mid_epoch_resume_repeats_no_data(tmp_path: Path) -> None:
    """Lightning#19764, #18780: 12 items by 4, saved at update 1: items 4..11 once each."""
    straight = fit(tmp_path / "a")
    assert straight.items == list(range(12))
    resumed = fit(tmp_path / "b", resume=tmp_path / "a" / "update-000001.ckpt")
    assert resumed.items == list(range(4, 12))
    assert torch.equal(resumed.b, straight.b)


def test_a_second_resume_stays_aligned(tmp_path: Path) -> None:
    """torchdata#1520, #1437: saved and resumed at updates 1 and 2: every item once."""
    straight = fit(tmp_path / "straight")
    first = fit(tmp_path / "a", tell=1)
    second = fit(tmp_path / "b", resume=newest_valid(tmp_path / "a").path, tell=2)
    third = fit(tmp_path / "c", resume=newest_valid(tmp_path / "b").path)
    assert [*first.items, *second.items, *third.items] == list(range(12))
    assert torch.equal(third.b, straight.b)


def test_sigterm_leaves_a_checkpoint_that_resumes_exactly(tmp_path: Path) -> None:
    """Lightning#20806."""
    straight = fit(tmp_path / "straight")
    fit(tmp_path / "stopped", tell=2)
    found = newest_valid(tmp_path / "stopped")
    assert found.update == 2
    resumed = fit(tmp_path / "resumed", resume=found.path)
    assert torch.equal(resumed.b, straight.b)


def test_the_saved_weights_are_the_live_ones(tmp_path: Path) -> None:
    """Lightning#20947, #21842: of every update, by our callback and by Lightning's."""
    recorder = Recorder()
    theirs = ModelCheckpoint(tmp_path / "theirs", "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(tmp_path / "ours", callbacks=[recorder, theirs])
    for update, weights in enumerate(recorder.weights, start=1):
        for path in (f"ours/update-{update:06d}.ckpt", f"theirs/step={update}.ckpt"):
            kept = torch.load(tmp_path / path, weights_only=True)["state_dict"]["b"]
            assert torch.equal(kept, weights), path


def test_saving_by_time_works(tmp_path: Path) -> None:
    """Lightning#21699: `train_time_interval` is ignored under manual optimization; `minutes` is not."""
    theirs = ModelCheckpoint(
        tmp_path / "theirs", train_time_interval=timedelta(microseconds=1), save_top_k=-1
    )
    ours = DurableCheckpoint(minutes=1e-9, keep=0, dirpath=str(tmp_path / "ours"))
    trainer = build_trainer(callbacks=[ours, theirs], enable_checkpointing=True)
    trainer.fit(ToyU(), ListLoader([window([0])] * 4))
    assert len(list((tmp_path / "ours").glob("*.ckpt"))) == 4
    assert not list((tmp_path / "theirs").glob("*.ckpt"))


class TestDependencies:
    """Lightning#21757, #21691: 2.6.2 and 2.6.3 were malicious; 2.6.5 runs what a checkpoint says."""

    @pytest.mark.parametrize("version", ["2.6.0", "2.6.2", "2.6.3", "2.6.5", "2.7.0"])
    def test_bad_releases_are_refused(self, version: str) -> None:
        assert not REQUIRED["lightning"].specifier.contains(version)

    @pytest.mark.parametrize("name", FLOORS)
    def test_floors_are_declared_and_met(self, name: str) -> None:
        """Torch for CVE-2026-24747, lightning for CVE-2026-58659, jsonargparse for its import allowlist."""
        floor = Version(FLOORS[name])
        specifier = REQUIRED[name].specifier
        assert specifier.contains(str(floor))
        assert not specifier.contains(f"{floor.major}.{floor.minor - 1}.99")
        assert Version(importlib.metadata.version(name)) >= floor

    def test_pytorch_lightning_is_not_imported(self) -> None:
        """The other name of the package has its own uploads; where it is loaded it is recognised."""
        assert Version(lightning.__version__) >= Version("2.6.6")
        sources = [*ROOT.glob("andrea_pl/**/*.py")]
        sources += ROOT.glob("callbacks/**/*.py")
        assert len(sources) > 50
        imports = r"^\s*(import|from)\s+{0}\b|import_module\(.{0}".format(
            "(pytorch_lightning|lightning_fabric)"
        )
        imported = re.compile(imports, re.MULTILINE)
        found = [each.name for each in sources if imported.search(each.read_text(encoding="utf-8"))]
        assert not found
