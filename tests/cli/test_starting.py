"""Machines without home, name, UTF-8, srun or memory: it works, or one line says what to do."""

import io
import logging
import os
import sys
import warnings
from pathlib import Path

import pytest

from andrea_pl.cli.paths import as_text
from andrea_pl.cli.starting import LOGGER, slurm_fault, start_command
from andrea_pl.optim import ExtensionError, build_extension
from tests.support.answers import ask, write_tiny
from tests.support.commands import run_python

pytestmark = pytest.mark.system


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
        "import getpass, sys\nfrom andrea_pl.cli.main import main\nsys.argv = ['andrea']\n"
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
