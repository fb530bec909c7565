"""Processes that read ahead and die: named, whatever error that ended as."""

from pathlib import Path

import pytest

from andrea_pl.cli.commands import STANDALONE
from andrea_pl.cli.faults import dead_worker
from andrea_pl.cli.main import main
from tests.support.answers import write_tiny
from tests.support.commands import andrea

pytestmark = pytest.mark.system

KILLER = """
import multiprocessing, os, signal
import lightning.pytorch as pl

class Killer(pl.Callback):
    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_step == 2:
            for each in multiprocessing.active_children():
                os.kill(each.pid, signal.SIGKILL)
"""


def test_a_killed_worker_is_named() -> None:
    """The message talked of whatever the run just did, logging for one."""
    write_tiny()
    Path("killer.py").write_text(KILLER)
    options = ["--data.num_workers=1", "--trainer.max_steps=200", "--data.sequences_per_update=1"]
    killer = ["--trust_imports", "killer", "--trainer.callbacks+=killer.Killer"]
    result = andrea("fit", "--config", "tiny.yaml", *options, *killer, PYTHONPATH=str(Path.cwd()))
    assert result.returncode == 1, result.stderr
    said = result.stderr.splitlines()[-1]
    assert "DataLoader worker, pid" in said
    assert "short of memory: lower data.num_workers" in said
    assert "Traceback" not in result.stderr


def test_dead_workers_within_other_errors() -> None:
    killed = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    outer = ValueError("self.log('train/loss') was called with something else")
    outer.__context__ = killed
    assert "pid 7) was ended by the signal Killed; most often" in str(dead_worker(outer))
    gone = RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly")
    assert "pid 7, 8) ended by itself" in str(dead_worker(gone))
    bus = RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that …")
    assert "--shm-size" in str(dead_worker(bus))
    assert dead_worker(ValueError("other")) is None
    assert dead_worker(ConnectionResetError(104, "Connection reset by peer")) is None
    for fault in ("ConnectionResetError(104, 'Connection reset by peer')", "EOFError()"):
        raising = compile(f"raise {fault}", "/torch/utils/data/dataloader.py", "exec")
        with pytest.raises((OSError, EOFError)) as caught:
            exec(raising)
        assert "DataLoader worker, pid unknown) ended by itself" in str(dead_worker(caught.value))


@pytest.mark.parametrize("outer", [ValueError, TypeError, KeyError, RuntimeError, AttributeError])
def test_any_error_around_a_dead_worker_ends_in_one_line(
    outer: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a ValueError of TensorBoard's logger ("you tried to log 0.0, which is …")."""

    def generate(_: list[str]) -> None:
        try:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
        except RuntimeError as error:
            raise outer("you tried to log 0.0 which is currently not supported") from error

    monkeypatch.setitem(STANDALONE, "generate", generate)
    assert main(["generate"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert "DataLoader worker, pid 7) was ended by the signal Killed" in lines[0]


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(_: list[str]) -> None:
        raise KeyError("a fault of the program")

    monkeypatch.setitem(STANDALONE, "generate", generate)
    with pytest.raises(KeyError, match="a fault of the program"):
        main(["generate"])
