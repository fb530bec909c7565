"""Output that nobody reads, closed terminals and ignored signals: by the command, through pipes and a pty."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from andrea_pl.runs.manifest import newest_valid
from tests.support.commands import run_python

pytestmark = pytest.mark.system

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from andrea_pl.runs.manifest import newest_valid
from tests.support.terminals import start

fit = ["fit", "--config", sys.argv[1]]

def saved():
    return newest_valid("checkpoints").update

{body}
"""


def run(body: str, *arguments: str, **environment: str) -> str:
    """Run a script that forks commands, and return what it prints."""
    result = run_python(SCRIPT.format(body=body), *arguments, **environment)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.fixture
def shown(tiny: Path) -> Path:
    """Return a configuration with a bar, which writes all the time; a run takes 40 updates."""
    config: dict[str, Any] = yaml.safe_load(tiny.read_text())
    config["trainer"] |= {
        "max_steps": 40,
        "val_check_interval": 15,
        "limit_val_batches": 1,
        "enable_progress_bar": True,
        "logger": False,
    }
    config["data"]["num_workers"] = 0
    tiny.write_text(yaml.safe_dump(config))
    return tiny


def test_a_pipe_whose_reader_is_gone(shown: Path) -> None:
    """The run ends as any other, 0 or 143, all is saved; signals that were ignored stay so."""
    body = """
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

def ignore():
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)

run = start(fit, before=ignore)
run.wait_for(5)
run.close()
for each in ENDING * 2:
    run.wait_for(run.done + 1)
    run.send(each)
assert run.end() == 0
assert saved() == 40

Path("checkpoints").rename("ended")
run = start(fit)
run.wait_for(5)
assert b"Epoch" in run.shown, run.shown
run.close()
run.wait_for(9)
run.send(signal.SIGTERM)
assert run.end() == 143
assert 9 <= saved() < 40

# somebody asks for a text and reads none of it
path = str(newest_valid("ended").path)
asked = start(["generate", "--ckpt_path", path, "--max_new_tokens", "8"])
asked.close()
assert asked.end() == 0
"""
    run(body, str(shown))


def test_a_terminal_that_is_closed(shown: Path) -> None:
    """129, with the update saved; under nohup the run goes on to its end; Ctrl-C typed there is 130."""
    body = """
fit += ["--data.num_workers=2"]
run = start(fit, terminal=True, before=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
run.wait_for(3)
run.send(signal.SIGINT)
run.wait_for(6)
run.close()
run.send(signal.SIGHUP)  # as a kernel and a shell send it, both
assert run.end() == 129
update = saved()
assert 6 <= update < 40

fit += ["--resume"]
run = start(fit, terminal=True)
run.wait_for(update + 5)
os.write(run.screen, b"\x03")
assert run.end() == 130
assert b"SIGINT: finishing and saving this update" in run.shown, run.shown
assert update + 5 <= saved() < 40

run = start(fit, terminal=True, before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
run.wait_for(saved() + 3)
run.close()
assert run.end() == 0
assert saved() == 40
"""
    run(body, str(shown))


def test_signals_outside_of_training(shown: Path) -> None:
    """In preparation, with nobody to read it: 130, 129; 143 without a traceback where it can be read."""
    body = """
import andrea_pl.data.store.run_text

def be_preparing():
    def prepare(*_, **__):
        print("preparing", flush=True)
        os.write(told, b"x")
        time.sleep(60)
    andrea_pl.data.store.run_text.prepare = prepare

for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    waiting, told = os.pipe()
    run = start(fit, before=be_preparing)
    os.close(told)
    if signum != signal.SIGTERM:
        run.close()
    assert os.read(waiting, 1), run.end()
    run.send(signum)
    assert run.end() == 128 + signum, (signum, run.shown)
assert b"outside of training" in run.shown, run.shown
assert b"Traceback" not in run.shown, run.shown
assert not Path("checkpoints").exists()
"""
    run(body, str(shown))


def test_ctrl_c_before_a_tee(shown: Path) -> None:
    """By a shell, as people type it: the signal ends `tee` too. Saved, 130."""
    config: dict[str, Any] = yaml.safe_load(shown.read_text())
    config["trainer"]["max_steps"] = 100_000
    shown.write_text(yaml.safe_dump(config))
    line = f"{sys.executable} -m andrea_pl fit --config {shown} 2>&1 | tee log; echo ${{PIPESTATUS[0]}} >code"
    shell = ["bash", "-c", f"trap : INT; {line}"]
    with subprocess.Popen(
        shell, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        deadline = time.monotonic() + 200
        while not (Path("log").exists() and b"tokens/s" in Path("log").read_bytes()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(100)
    assert Path("code").read_text() == "130\n"
    assert newest_valid("checkpoints").update > 0
