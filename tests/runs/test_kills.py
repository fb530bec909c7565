"""Checkpoints under SIGKILL, SIGTERM, SIGINT and on a full disk, in processes of their own."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from andrea_pl.runs.manifest import has_checkpoints, newest_valid
from tests.support import killed
from tests.support.commands import Result, run_python

pytestmark = pytest.mark.system

SCRIPT = """
import random, sys, time
from pathlib import Path
from tests.support import killed
killed.forbid_crossing_folders()
{body}
"""


def run(body: str, *arguments: str, **environment: str) -> Result:
    """Run a script that forks, and so has no threads when it does."""
    return run_python(SCRIPT.format(body=body), *arguments, **environment)


KILLS = """
folder, draw = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
swept = newest = 0
for number in range(40):
    parts = list(folder.glob(".andrea-*"))
    after, wait = draw.randrange(1, 6), draw.uniform(0.0, 0.05)
    began = []

    def until(lines):
        if not began and sum(each.startswith("done") for each in lines) >= after:
            began.append(time.monotonic())
            assert not set(parts) & set(folder.glob(".andrea-*")), "not swept"
        return bool(began) and time.monotonic() - began[0] > wait

    lines, code = killed.in_a_child(lambda pipe: killed.train(folder, 10**6, 1, 50, pipe), until)
    assert code is None, (code, lines[-3:])
    newest = killed.look(folder, lines, 1, newest)
    swept += len(list(folder.glob(".andrea-*")))
print(f"{newest} updates, {swept} saves under way when killed")
"""


def test_forty_kills_while_saving(tmp_path: Path) -> None:
    """Nothing torn, the newest always loads, at most one interval lost, temporaries swept; renames between
    folders fail, as with TMPDIR on another file system, where TMPDIR is when there is one."""
    folder = tmp_path / "run"
    folder.mkdir()
    result = run(KILLS, str(folder), "20240611", TMPDIR="/dev/shm")
    assert result.returncode == 0, result.stderr[-3000:]
    updates, under_way = (int(each.split()[0]) for each in result.stdout.splitlines()[-1].split(", "))
    assert updates > 40  # each start saves what it did before its last update, however slow the machine
    assert under_way > 0  # or the kills missed what they were for


def test_a_run_through_kills_ends_as_one_without(tmp_path: Path) -> None:
    """Killed some 20 updates after each start; 3,000 updates are made by tests/support/killed.py."""
    body = """
draw = random.Random(1)

def kill():
    after = 20 + draw.randrange(-4, 4)
    return lambda lines: sum(each.startswith("done") for each in lines) >= after

folder = Path(sys.argv[1]) / "run"
folder.mkdir()
assert killed.disturbed(folder, 60, 5, 12, kill) >= 2
killed.compare(folder, 60, 5, 12)
"""
    result = run(body, str(tmp_path), TMPDIR="/dev/shm")
    assert result.returncode == 0, result.stderr[-3000:]


SIGNALS = """
import signal, statistics
draw = random.Random(7)
folder = Path(sys.argv[1]) / "run"
folder.mkdir()
seconds, update = [], 0
for number in range(20):
    signum = (signal.SIGTERM, signal.SIGINT)[number % 2]
    sent = []
    until = killed.after_the_first_update(draw.uniform(0.0, 0.04), sent)
    train = lambda pipe: killed.train(folder, 150, 10**6, 9, pipe, pace=0.006)
    lines, code = killed.in_a_child(train, until, signum)
    seconds.append(time.monotonic() - sent[0])
    assert code == 128 + signum, (code, lines[-3:])
    assert killed.newest_valid(folder).update == killed.last(lines, "done") > update
    update = killed.last(lines, "done")
assert update < 150
lines, code = killed.in_a_child(lambda pipe: killed.train(folder, 150, 10**6, 9, pipe), lambda _: False)
assert code == 0, lines[-3:]
killed.compare(folder, 150, 10**6, 9)
print(f"{statistics.median(seconds):.3f} {max(seconds):.3f}")
"""


def test_signals_at_random_moments(tmp_path: Path) -> None:
    """Twenty, in updates and validations: the exit code is right, all is saved, and the end is exact."""
    result = run(SIGNALS, str(tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]
    median, longest = map(float, result.stdout.split())
    print(f"seconds from signal to end: median {median}, longest {longest}")
    assert longest < 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Return a folder on a file system of 8 MB, or one where files may have 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    is_mounted = mounted.returncode == 0
    yield folder, {} if is_mounted else {"LIMIT": str(4 << 20)}
    if is_mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk: tuple[Path, dict[str, str]]) -> None:
    """The previous checkpoint is byte-identical, path and bytes are named, the command fails."""
    disk, environment = small_disk
    body = """
import os, resource
import torch
import andrea_pl.cli.main
from tests.support.toy import ListLoader, ToyU, build_trainer, window
from andrea_pl import DurableCheckpoint

if "LIMIT" in os.environ:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["LIMIT"]),) * 2)

class Grows(ToyU):
    def on_train_batch_end(self, *_):
        self.register_buffer("weight", torch.ones(1_000_000 * self.trainer.global_step))

def fit(arguments):
    saving = DurableCheckpoint(every=1, dirpath=sys.argv[1])
    build_trainer(callbacks=[saving], enable_checkpointing=True).fit(Grows(), ListLoader([window([0])] * 4))

andrea_pl.cli.main.AndreaCLI = fit
sys.exit(andrea_pl.cli.main.main(["fit"]))
"""
    result = run(body, str(disk), **environment)
    assert result.returncode == 1, result.stderr[-3000:]
    found = newest_valid(disk)
    assert found.update >= 1
    assert not found.passed_over
    failed = found.update + 1
    line = next(each for each in result.stderr.splitlines() if each.startswith("andrea: error:"))
    assert f"{disk}/update-{failed:06d}.ckpt could not be written: " in line
    assert "bytes were, of a checkpoint whose tensors take " in line
    assert "free some space" in line
    assert not list(disk.glob(".andrea-*"))
    assert has_checkpoints(disk)


def test_the_looks_see_what_is_wrong(tmp_path: Path) -> None:
    """The control: a torn file, and one interval too many, are noticed."""
    body = """
def act(pipe):
    killed.train(Path(sys.argv[1]), 6, 2, 50, pipe)

print(*killed.in_a_child(act, lambda _: False)[0], sep="|")
"""
    folder = tmp_path / "run"
    folder.mkdir()
    result = run(body, str(folder))
    lines = result.stdout.strip().split("|")
    assert lines[-1] == "done 6", result.stderr[-2000:]
    assert killed.look(folder, lines, 2, 0) == 6
    with pytest.raises(AssertionError):
        killed.look(folder, [*lines, "done 11"], 2, 0)
    newest = newest_valid(folder).path
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(AssertionError):
        killed.look(folder, lines, 2, 0)
