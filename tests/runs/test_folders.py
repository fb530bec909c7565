"""What a refused command leaves of its own, and what it changes of a run that is going on: nothing."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from andrea_pl import DurableCheckpoint
from andrea_pl.errors import UserError
from andrea_pl.runs.folders import RunFolders
from andrea_pl.runs.lock import FolderLock
from tests.support.commands import andrea, run_python
from tests.support.configurations import log_folder, scalars
from tests.support.toy import ListLoader, ToyU, build_trainer, window

LOGGERS = [
    {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": "runs"}},
    {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs"}},
]


def tree(folder: str | Path = ".") -> dict[str, bytes | None]:
    """Return every file below a folder with its content, and every folder."""
    found = sorted(Path(folder).rglob("*"))
    kept = [each for each in found if "cache" not in each.parts and "__pycache__" not in each.parts]
    return {str(each): each.read_bytes() if each.is_file() else None for each in kept}


@pytest.mark.system
def test_a_refused_resume_changes_nothing(tiny: Path) -> None:
    """Settings that drifted, no checkpoint, options that do not fit, a run that another process is at.

    Two runs that start together are not refused: each has its own version folder.
    """
    config: dict[str, Any] = yaml.safe_load(tiny.read_text())
    config["trainer"]["logger"] = LOGGERS
    tiny.write_text(yaml.safe_dump(config))
    fit = ["fit", "--config", str(tiny)]
    folder = log_folder(andrea(*fit))
    shown = scalars(folder)
    assert [step for step, _ in shown["train/loss"]] == [1, 2, 3, 4, 5, 6]

    twice = {"class_path": "andrea_pl.DurableCheckpoint", "init_args": {"dirpath": "kept", "name": "a"}}
    other = {"class_path": "andrea_pl.DurableCheckpoint", "init_args": {"dirpath": "kept", "name": "b"}}
    config["trainer"]["callbacks"] = [twice, other]
    Path("twice.yaml").write_text(yaml.safe_dump(config))
    refused = [
        ([*fit, "--resume", "--trainer.max_steps=9"], "trainer.max_steps: checkpoint 6, here 9"),
        ([*fit, "--ckpt_path", "none.ckpt"], "none.ckpt: no such checkpoint"),
        (["fit", "--config", "twice.yaml"], "two DurableCheckpoint callbacks write into"),
    ]
    before = tree()
    for arguments, message in refused:
        result = andrea(*arguments)
        assert (result.returncode, message in result.stderr) == (1, True), result.stderr
        assert tree() == before, arguments

    lock = FolderLock(folder / "checkpoints", {"job": "4711"})
    before = tree()
    result = andrea(*fit, "--resume")
    assert result.returncode == 1
    assert f"is being written by another run (process {os.getpid()} on" in result.stderr
    assert tree() == before
    lock.release()
    assert scalars(folder) == shown

    together = run_python(TOGETHER, str(tiny))
    assert together.returncode == 0, together.stderr
    assert sorted(Path("runs/lightning_logs").iterdir()) == [
        folder.with_name(f"version_{n}") for n in range(3)
    ]
    for each in (folder.with_name("version_1"), folder.with_name("version_2")):
        assert len(list(each.glob("*tfevents*"))) == 1
        assert list((each / "checkpoints").glob("*-000006.ckpt"))


TOGETHER = """
import sys
from tests.support.terminals import start
two = [start(["fit", "--config", sys.argv[1]]) for _ in range(2)]
codes = [each.end() for each in two]
assert codes == [0, 0], [each.shown for each in two]
"""


def test_loggers_of_one_run_share_a_version() -> None:
    """Those of another get the next, before either has written anything; an explicit one is kept."""

    def loggers(**version: int) -> list[Any]:
        return [TensorBoardLogger("runs", **version), CSVLogger("runs", **version)]

    first, second, third = loggers(), loggers(), loggers(version=7)
    all_folders = [RunFolders() for _ in range(3)]
    for folders, each in zip(all_folders, (first, second, third), strict=True):
        folders.take(build_trainer(logger=each))
    assert [[each.version for each in pair] for pair in (first, second, third)] == [[0, 0], [1, 1], [7, 7]]
    for folders in reversed(all_folders):
        folders.give_back()
    assert tree() == {}


class Foreign(pl.LightningModule):
    """A module that knows nothing of this package."""

    def training_step(self, batch: Any) -> None: ...

    def configure_optimizers(self) -> None: ...


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_refused_fit_from_python(is_ours: bool) -> None:
    """The live run's event files and table stay; the file that the refused one opened goes."""

    def loggers() -> list[Any]:
        opened: list[Any] = [TensorBoardLogger("runs", version=0)]
        return [*opened, CSVLogger("runs", version=0)] if is_ours else opened

    options: dict[str, Any] = {"enable_checkpointing": True, "max_steps": 2, "log_every_n_steps": 1}
    batches = ListLoader([window([0, 1]), window([1])])
    build_trainer(logger=loggers(), callbacks=[DurableCheckpoint()], **options).fit(ToyU(), batches)
    lock = FolderLock(Path("runs/lightning_logs/version_0/checkpoints"))
    before = tree()
    assert any(name.endswith("metrics.csv") for name in before) == is_ours
    trainer = build_trainer(logger=loggers(), callbacks=[DurableCheckpoint()], **options)
    with pytest.raises(UserError, match="is being written by another run"):
        trainer.fit(ToyU() if is_ours else Foreign(), batches)
    assert tree() == before
    lock.release()
