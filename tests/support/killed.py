"""Trains in children that are killed, each going on from the newest checkpoint; run it to have a long one.

    python -m tests.support.killed --updates 3000 --every 20 --kill 200

It ends with the weights of a run that nobody kills, which it makes too. Every kill is followed by a look at
the folder: no file is torn, the newest loads, no more than what was saved last is lost.
"""

import argparse
import contextlib
import errno
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from andrea_pl import DurableCheckpoint
from andrea_pl.runs.checkpoint_io import read_checkpoint
from andrea_pl.runs.manifest import fault_of, has_checkpoints, newest_valid
from tests.support.runs import Draws, data, difference, module
from tests.support.toy import build_trainer


class Tells(pl.Callback):
    """Writes every update that is done, and every save that is, to a pipe."""

    def __init__(self, pipe: int, pace: float) -> None:
        self.pipe = pipe
        self.pace = pace
        self.saved: str | None = None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        saving = trainer.checkpoint_callback
        if saving.last_path != self.saved:
            self.saved = saving.last_path
            os.write(self.pipe, f"saved {int(Path(self.saved).stem[-6:])}\n".encode())
        time.sleep(self.pace)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        os.write(self.pipe, f"done {trainer.global_step}\n".encode())


def train(folder: Path, updates: int, every: int, validate: int, pipe: int, pace: float = 0.0) -> None:
    """Go on with the run in a folder, or start it."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(0, verbose=False)
    found = newest_valid(folder).path if has_checkpoints(folder) else None
    trainer = build_trainer(
        max_steps=updates,
        val_check_interval=validate,
        check_val_every_n_epoch=None,
        limit_val_batches=2,
        enable_checkpointing=True,
        default_root_dir=str(folder),
        callbacks=[
            Draws(),
            Tells(pipe, pace),
            DurableCheckpoint(every=every, minutes=None, monitor="val/loss", dirpath=str(folder)),
        ],
    )
    trainer.fit(module(), datamodule=data(), ckpt_path=found)


def forbid_crossing_folders() -> None:
    """Have every rename from one folder to another fail, as between file systems."""
    for name in ("rename", "replace"):
        real: Callable[..., None] = getattr(os, name)

        def guarded(source: Any, target: Any, *rest: Any, real: Any = real, **named: Any) -> None:
            if Path(source).absolute().parent != Path(target).absolute().parent:
                raise OSError(errno.EXDEV, "forced", str(source))
            real(source, target, *rest, **named)

        setattr(os, name, guarded)


def in_a_child(
    act: Callable[[int], int | None],
    until: Callable[[list[str]], bool],
    signum: int = signal.SIGKILL,
    group: bool = False,
) -> tuple[list[str], int | None]:
    """Run `act` in a fork, and signal it once when `until` says so of the lines that it wrote.

    With `group` all its processes are signalled, as by a terminal or by SLURM.

    Returns:
        The lines, and the exit code, None of a child that was killed.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setpgrp()
        code = 1
        try:
            code = act(writing) or 0
        except SystemExit as stop:
            code = int(str(stop.code))
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.__stderr__)
        finally:
            os._exit(code)
    os.close(writing)
    os.set_blocking(reading, False)
    lines: list[str] = []
    rest = b""
    ended: int | None = None
    is_told = False
    while True:
        with contextlib.suppress(BlockingIOError):
            rest += os.read(reading, 1 << 16)
        *whole, rest = rest.split(b"\n")
        lines += [each.decode() for each in whole]
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            ended = os.waitstatus_to_exitcode(status)
            break
        if not is_told and until(lines):
            is_told = True
            os.killpg(child, signum) if group else os.kill(child, signum)
            if signum == signal.SIGKILL:
                os.waitpid(child, 0)
                break
        time.sleep(0.0005)
    with contextlib.suppress(BlockingIOError):
        rest += os.read(reading, 1 << 16)
    lines += [each.decode() for each in rest.split(b"\n") if each]
    os.close(reading)
    return lines, ended


def after_the_first_update(wait: float, sent: list[float]) -> Callable[[list[str]], bool]:
    """Return an `until` that holds so many seconds after the first update was done, and notes when."""
    began: list[float] = []

    def until(lines: list[str]) -> bool:
        if not began and any(each.startswith("done") for each in lines):
            began.append(time.monotonic())
        if began and time.monotonic() - began[0] > wait:
            sent.append(time.monotonic())
        return bool(sent)

    return until


def last(lines: list[str], word: str) -> int:
    """Return the last number after a word, 0 without one."""
    numbers = [int(each.split()[1]) for each in lines if each.startswith(f"{word} ")]
    return numbers[-1] if numbers else 0


def look(folder: Path, lines: list[str], every: int, before: int) -> int:
    """Check what a kill left; return the update of the newest checkpoint."""
    torn = [fault for each in folder.glob("*.ckpt") if (fault := fault_of(each)) is not None]
    assert not torn, torn
    if not has_checkpoints(folder):
        assert last(lines, "saved") == before == 0
        return 0
    found = newest_valid(folder)
    assert read_checkpoint(found.path)["global_step"] == found.update
    assert found.update >= max(last(lines, "saved"), before)
    assert found.update > last(lines, "done") - 2 * every  # one interval, and the save that was under way
    return found.update


def disturbed(
    folder: Path, updates: int, every: int, validate: int, kill: Callable[[], Callable[[list[str]], bool]]
) -> int:
    """Train to the end through kills; return how many there were."""
    kills = newest = 0
    while True:
        lines, code = in_a_child(lambda pipe: train(folder, updates, every, validate, pipe), kill())
        if code is not None:
            assert code == 0
            assert not list(folder.glob(".andrea-*"))
            return kills
        kills += 1
        newest = look(folder, lines, every, newest)


def compare(folder: Path, updates: int, every: int, validate: int) -> None:
    """Assert that the run in a folder ended as one that nobody kills."""
    straight = folder.parent / f"{folder.name}-straight"
    straight.mkdir()
    _, code = in_a_child(lambda pipe: train(straight, updates, every, validate, pipe), lambda _: False)
    assert code == 0
    ours, theirs = (read_checkpoint(newest_valid(each).path) for each in (folder, straight))
    assert ours["global_step"] == updates
    assert difference(ours, theirs) is None


def main() -> None:
    """Make a long run."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("updates", 3000), ("every", 20), ("validate", 50), ("kill", 200), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    forbid_crossing_folders()

    def kill() -> Callable[[list[str]], bool]:
        after = options.kill + draw.randrange(-10, 10)
        return lambda lines: sum(each.startswith("done") for each in lines) >= after

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        folder = Path(place) / "run"
        folder.mkdir()
        kills = disturbed(folder, options.updates, options.every, options.validate, kill)
        compare(folder, options.updates, options.every, options.validate)
    print(f"{options.updates} updates through {kills} kills: bit for bit the undisturbed run")


if __name__ == "__main__":
    main()
