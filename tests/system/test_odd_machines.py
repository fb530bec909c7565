"""Machines without home, name, UTF-8, srun or memory: it works, or one line says what to do."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from andrea_pl import TextDataModule, TextSource, cli
from andrea_pl.data import documents
from andrea_pl.faults import dead_worker
from andrea_pl.optim import ExtensionError, build_extension
from andrea_pl.paths import as_text
from andrea_pl.starting import LOGGER, slurm_fault, start_command
from answers import ask, write_tiny
from commands import andrea, run_python

pytestmark = pytest.mark.system


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads what a process has loaded from /proc")
@pytest.mark.parametrize("start", [["-m", "andrea_pl"], ["andrea"]])
def test_interrupted_while_importing(start: list[str]) -> None:
    """Ctrl-C once torch is being loaded: 130 and one line, by the module and by the installed script."""
    Path("andrea").write_text("import sys\nfrom andrea_pl.cli import main\nsys.exit(main())\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, *start, "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130
    assert (stdout, stderr) == ("", "andrea: interrupted while starting\n")


NO_USER = """
import os, pwd
def nobody(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = nobody
for name in ("HOME", "XDG_CACHE_HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "TORCH_EXTENSIONS_DIR"):
    os.environ.pop(name, None)
"""


def test_a_user_without_home_and_name() -> None:
    """Trains where `cache_dir` is given; without, one line names it. Libraries may ask for a name."""
    write_tiny()
    script = NO_USER + (
        "import getpass, sys\nfrom andrea_pl.cli import main\nsys.argv = ['andrea']\n"
        "print(main(['fit', '--config', 'tiny.yaml', '--data.cache_dir=null']))\n"
        "print(main(['fit', '--config', 'tiny.yaml']), getpass.getuser())\n"
    )
    result = run_python(script)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == "1"
    assert result.stdout.splitlines()[-1] == f"0 uid-{os.getuid()}"
    assert "no home folder is known here to keep prepared text in; set data.cache_dir" in result.stderr
    assert "Traceback" not in result.stderr


def test_no_place_for_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ExtensionError, match="no home folder is known; set HOME, or have the environment"):
        build_extension("cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "~/x")
    with pytest.raises(ExtensionError, match="no home folder is known"):
        build_extension("cpu")


def test_text_under_a_locale_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt `naïve` under LANG=C: its bytes are escapes, and the output cannot hold what they mean."""
    assert as_text("na\udcc3\udcafve") == "naïve"
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    logger = logging.getLogger(LOGGER)
    monkeypatch.setattr(logger, "filters", list(logger.filters))
    start_command()
    print("naïve \udcff")
    sys.stdout.flush()
    assert written.getvalue() == b"na\\xefve \\udcff\n"


def test_text_that_is_no_utf8_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_text("naïve") == "naïve"
    assert as_text("\udcff") == "\udcff"
    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("latin-1", "surrogateescape"))
    assert as_text("naÃ¯ve") == "naïve"
    assert as_text("naïve") == "naïve"  # of a file, where it was read as what it is


def test_slurm_tasks_without_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SLURM_NTASKS=2` was a RuntimeError of Lightning's, or a run that waited for its other half."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    assert slurm_fault() is None
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert slurm_fault() is None
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert "no srun started them; write srun andrea" in str(slurm_fault())
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    assert "no srun started them" in str(slurm_fault())
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert slurm_fault() is None
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    assert "--ntasks-per-node" in str(slurm_fault())
    monkeypatch.setenv("SLURM_NTASKS", "two")
    assert "no number of tasks" in str(slurm_fault())


def test_slurm_tasks_without_srun_by_the_command() -> None:
    write_tiny()
    fit = ["fit", "--config", "tiny.yaml"]
    for more in ({}, {"SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}):
        answers, _ = ask(fit, SLURM_NTASKS="2", SLURM_JOB_ID="4711", SLURM_NODELIST="localhost", **more)
        assert answers[0].code == 1, answers
        assert len(answers[0].errors) == 1, answers
        assert "srun" in answers[0].errors[0]
    assert not Path("lightning_logs").exists()


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

    monkeypatch.setitem(cli.STANDALONE, "generate", generate)
    assert cli.main(["generate"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert "DataLoader worker, pid 7) was ended by the signal Killed" in lines[0]


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(_: list[str]) -> None:
        raise KeyError("a fault of the program")

    monkeypatch.setitem(cli.STANDALONE, "generate", generate)
    with pytest.raises(KeyError, match="a fault of the program"):
        cli.main(["generate"])


def test_a_start_lists_each_source_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing to prepare, where it was 9 times."""
    Path("text.txt").write_text("\n".join(f"line {n} and {n * n}" for n in range(20)))
    looked_up: list[str] = []
    find = documents.find_files

    def counted(source: str, *rest: str) -> list[Path]:
        looked_up.append(source)
        return find(source, *rest)

    monkeypatch.setattr(documents, "find_files", counted)
    counts = []
    for _ in range(2):
        sources = [
            TextSource(name=name, paths=["text.txt"], document_separator="\n") for name in ("one", "two")
        ]
        data = TextDataModule(sources, vocab_size=280, cache_dir="cache", val_fraction=0.0)
        looked_up.clear()
        data.prepare_data()
        data.setup()
        counts.append({name: looked_up.count(name) for name in ("one", "two")})
    assert counts[1] == {"one": 1, "two": 1}


LISTINGS = """
import json, sys
from andrea_pl.cli import main
from andrea_pl.data import documents
looked_up = []
find = documents.find_files
documents.find_files = lambda source, *rest: looked_up.append(source) or find(source, *rest)
sys.argv = ["andrea"]
for _ in range(2):
    looked_up.clear()
    assert main(["fit", "--config", "tiny.yaml"]) == 0
print(json.dumps(looked_up))
"""


def test_the_command_lists_each_source_once() -> None:
    write_tiny()
    result = run_python(LISTINGS)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == ["lines"]
