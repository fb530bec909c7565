"""A checkpoint that lies in the root folder of a SLURM job is not resumed by itself."""

from pathlib import Path
from typing import Any

import pytest

from andrea_pl import DurableCheckpoint
from tests.support.toy import ListLoader, ToyU, build_trainer, window

SLURM = {
    "SLURM_NTASKS": "1",
    "SLURM_JOB_NAME": "pretraining",
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "localhost",
}


def updates(callbacks: list[Any], ckpt_path: str | None = None) -> list[int]:
    """Train two windows and return after which updates; a resume continues at the third."""
    seen: list[int] = []

    class Notes(ToyU):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(self.trainer.global_step)

    options: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 1 if ckpt_path is None else 2}
    trainer = build_trainer(callbacks=callbacks, **options)
    trainer.fit(Notes(), ListLoader([window([0, 1]), window([1])]), ckpt_path=ckpt_path)
    return seen


def test_an_hpc_checkpoint_is_not_resumed_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saving = DurableCheckpoint(dirpath=str(tmp_path / "kept"))
    assert updates([saving]) == [1, 2]
    Path("hpc_ckpt_1.ckpt").write_bytes(Path(str(saving.last_path)).read_bytes())
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert updates([DurableCheckpoint(dirpath=str(tmp_path / "other"))]) == [1, 2]
    assert caplog.text.count("hpc_ckpt_1.ckpt is not resumed, since nobody asked for it") == 1
    for asked in ("hpc", "hpc_ckpt_1.ckpt"):
        again = DurableCheckpoint(dirpath=str(tmp_path / asked.replace(".", "-")))
        assert updates([again], ckpt_path=asked) == [3, 4]
