"""What ends a run, by the command: signals at random moments, SLURM, exit codes, one run a folder."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from andrea_pl.runs.manifest import newest_valid
from tests.support.commands import andrea, run_python, run_python_from_scratch
from tests.support.configurations import TINY, log_folder, scalars
from tests.support.runs import difference

pytestmark = pytest.mark.system

SCRIPT = """
import io, os, random, signal, statistics, sys, time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
import andrea_pl.cli.app
import andrea_pl.cli.main
from tests.support import killed
from andrea_pl.runs.manifest import newest_valid
from tests.support.killed import in_a_child

def andrea(arguments, pipe=None, pace=0.0):
    "Be the command in this process, telling a pipe of every update."
    if pipe is not None:
        def tell(self, trainer, *_):
            os.write(pipe, f"done {{trainer.global_step}}\\n".encode())
            time.sleep(pace)
        andrea_pl.cli.app.StopReason.on_train_batch_end = tell
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(said):
        code = andrea_pl.cli.main.main(arguments)
    if pipe is not None:
        lines = [f"said {{each}}" for each in said.getvalue().splitlines()[-99:]]
        os.write(pipe, "\\n".join([*lines, ""]).encode())
    return code

def fit(*options, pipe=None, pace=0.0):
    return andrea(["fit", "--config", sys.argv[1], *options], pipe, pace)

def never(lines):
    return False

{body}
"""


def run(body: str, *arguments: str, **environment: str) -> str:
    """Run a script that forks commands, and return what it prints."""
    result = run_python(SCRIPT.format(body=body), *arguments, **environment)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.fixture
def steady(tiny: Path) -> Path:
    """Return a configuration with dropout, several epochs and validations within them."""
    config: dict[str, Any] = yaml.safe_load(tiny.read_text())
    config["trainer"] |= {
        "max_steps": 60,
        "val_check_interval": 20,
        "limit_val_batches": 1,
        "callbacks": [{"class_path": "andrea_callbacks.RunJournal"}, "andrea_callbacks.SpikeForensics"],
    }
    config["model"]["network"]["dropout"] = 0.1
    config["data"]["num_workers"] = 0
    tiny.write_text(yaml.safe_dump(config))
    return tiny


def test_signals_and_resume_by_the_command(steady: Path) -> None:
    """Told three times, the run says so, goes on in its folder, and ends as one that nobody stops."""
    body = """
draw = random.Random(7)
seconds = []
for number in range(3):
    signum = (signal.SIGTERM, signal.SIGINT)[number % 2]
    sent = []
    until = killed.after_the_first_update(draw.uniform(0.0, 0.04), sent)
    resume = ["--resume"] if number else []
    lines, code = in_a_child(lambda pipe: fit(*resume, pipe=pipe, pace=0.01), until, signum)
    seconds.append(time.monotonic() - sent[0])
    assert code == 128 + signum, (code, lines[-5:])
    update = killed.last(lines, "done")
    words = f"said andrea: {signum.name} after update {update}; saved in "
    told = [each for each in lines if each.startswith(words)]
    assert told and "--resume goes on" in told[0], lines[-5:]
    assert newest_valid("lightning_logs/version_0/checkpoints").update == update
assert update < 60, update
lines, code = in_a_child(lambda pipe: fit("--resume", pipe=pipe), never)
assert code == 0, lines[-5:]
print(f"{statistics.median(seconds):.3f} {max(seconds):.3f}")
"""
    assert float(run(body, str(steady)).split()[1]) < 10
    assert not Path("lightning_logs/version_1").exists()
    stopped = Path("lightning_logs/version_0")
    straight = log_folder(andrea("fit", "--config", str(steady)))
    ends = [
        torch.load(newest_valid(folder / "checkpoints").path, weights_only=True)
        for folder in (stopped, straight)
    ]
    assert difference(*ends) is None
    ours, theirs = (
        {tag: rows for tag, rows in scalars(folder).items() if not tag.startswith("throughput/")}
        for folder in (stopped, straight)
    )
    assert ours == theirs  # every step once, in one folder


def test_signals_to_all_processes_of_a_run(steady: Path) -> None:
    """Workers leave them to the run, which finishes, saves and ends them."""
    body = """
for number, signum in enumerate((signal.SIGTERM, signal.SIGINT)):
    options = ["--data.num_workers=2", *["--resume"] * number]
    lines, code = in_a_child(
        lambda pipe: fit(*options, pipe=pipe, pace=0.01), lambda lines: len(lines) > 5, signum, group=True
    )
    assert code == 128 + signum, (code, lines[-5:])
    assert newest_valid("lightning_logs/version_0/checkpoints").update == killed.last(lines, "done")
"""
    run(body, str(steady))


def test_a_process_ends_with_a_loader_in_its_hands(steady: Path) -> None:
    """As a notebook or a script does that only looks at a window."""
    script = """
import yaml, sys
from andrea_pl import TextDataModule, TextSource
options = yaml.safe_load(open(sys.argv[1]))["data"]
options["sources"] = [TextSource(**each) for each in options["sources"]]
data = TextDataModule(**(options | {"num_workers": 2}))
data.prepare_data()
data.setup()
windows = iter(data.train_dataloader())
print(len(next(windows)))
"""
    assert run_python_from_scratch(script, str(steady), timeout=60).returncode == 0


def test_a_second_signal_ends_at_once(steady: Path) -> None:
    body = """
def act(pipe):
    import andrea_pl.runs.checkpoint_callback
    def save(self, *_):
        os.write(pipe, b"done 99\\n")
        time.sleep(60)
    andrea_pl.runs.checkpoint_callback.DurableCheckpoint._save = save
    andrea_pl.cli.app.StopReason.on_train_batch_start = lambda *_: signal.raise_signal(signal.SIGINT)
    return fit()

began = time.monotonic()
lines, code = in_a_child(act, lambda lines: "done 99" in lines, signal.SIGTERM)
assert code == 143, code
assert time.monotonic() - began < 30
"""
    run(body, str(steady))


def test_interrupted_before_the_first_update(steady: Path) -> None:
    """130, and nothing to go on with."""
    body = """
import andrea_pl.data.store.run_text

def act(pipe):
    andrea_pl.data.store.run_text.prepare = lambda *_, **__: signal.raise_signal(signal.SIGINT)
    return fit(pipe=pipe)

lines, code = in_a_child(act, never)
assert code == 130, (code, lines)
assert any("nothing to save" in each for each in lines), lines
"""
    run(body, str(steady))


SLURM = {
    "SLURM_NTASKS": "1",
    "SLURM_JOB_NAME": "pretraining",
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "localhost",
}


@pytest.mark.parametrize("place", ["logger", "no logger", "own folder"])
def test_slurm_requeues(steady: Path, place: str) -> None:
    """SIGUSR1: the update is finished and saved, the job requeued; when it comes again it goes on."""
    Path("bin").mkdir()
    control = Path("bin/scontrol")
    control.write_text('#!/bin/sh\necho "$@" >> requeued\n')
    control.chmod(0o755)
    config: dict[str, Any] = yaml.safe_load(steady.read_text())
    if place == "no logger":
        config["trainer"]["logger"] = False
    elif place == "own folder":
        options = {"dirpath": "kept", "minutes": 5}
        saving = {"class_path": "andrea_pl.DurableCheckpoint", "init_args": options}
        config["trainer"]["callbacks"].append(saving)
    steady.write_text(yaml.safe_dump(config))
    body = """
lines, code = in_a_child(
    lambda pipe: fit(pipe=pipe, pace=0.01), lambda lines: len(lines) > 3, signal.SIGUSR1
)
assert code == 128 + signal.SIGUSR1, (code, lines[-5:])
print(killed.last(lines, "done"))
"""
    path = f"{Path('bin').absolute()}{os.pathsep}{os.environ['PATH']}"
    update = int(run(body, str(steady), PATH=path, **SLURM))
    assert Path("requeued").read_text() == "requeue 4711\n"
    if place == "logger":
        other = andrea("fit", "--config", str(steady), "--trainer.max_steps", "2")
        assert log_folder(other).name == "version_4712"
    again = andrea("fit", "--config", str(steady), **SLURM, SLURM_RESTART_COUNT="1", PATH=path)
    assert again.returncode == 0, again.stderr
    assert f"resuming after update {update}" in again.stderr
    if place != "no logger":
        steps = [step for step, _ in scalars(Path("lightning_logs/version_4711"))["train/loss"]]
        assert steps == list(range(1, 61))


def test_what_stops_a_run_decides_the_exit_code(tiny: Path) -> None:
    """3 for a loss that is not finite, 4 where a callback stops the run."""
    infinite = andrea("fit", "--config", str(tiny), "--model.lr", "1e38")
    assert infinite.returncode == 3
    assert "not finite; model.on_nonfinite is" in infinite.stderr
    assert "Traceback" not in infinite.stderr
    config = yaml.safe_load(TINY.format(path="text.jsonl"))
    gate = {"every": 1, "start": 0, "patience": 1, "threshold": 99, "action": "stop"}
    config["trainer"]["callbacks"] = [
        {"class_path": "andrea_callbacks.CoherenceGate", "init_args": gate},
        {"class_path": "andrea_callbacks.RunJournal"},
    ]
    tiny.write_text(yaml.safe_dump(config))
    incoherent = andrea("fit", "--config", str(tiny))
    assert incoherent.returncode == 4
    assert "andrea: stopped by coherence: update 1: " in incoherent.stderr
    saved = newest_valid(log_folder(incoherent) / "checkpoints")
    assert saved.update == 1


def test_one_run_a_folder(steady: Path) -> None:
    """A second one is refused while the first is at it, and names it; a killed one is taken over."""
    body = """
def refused(lines):
    if len(lines) < 2:
        return False
    second, code = in_a_child(lambda pipe: fit("--trainer.logger=false", pipe=pipe), never)
    assert code == 1, code
    assert any("being written by another run (process " in each for each in second), second
    return True

lines, code = in_a_child(lambda pipe: fit("--trainer.logger=false", pipe=pipe, pace=0.05), refused)
assert code is None
short = ["--trainer.logger=false", "--trainer.max_steps=2"]
third, code = in_a_child(lambda pipe: fit(*short, pipe=pipe), never)
assert code == 0, third[-5:]
"""
    run(body, str(steady))
    assert json.loads(Path("checkpoints/.lock").read_text())["process"]
