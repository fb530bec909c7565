"""Ctrl-C while the command is being imported."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.system


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads what a process has loaded from /proc")
@pytest.mark.parametrize("start", [["-m", "andrea_pl"], ["andrea"]])
def test_interrupted_while_importing(start: list[str]) -> None:
    """Ctrl-C once torch is being loaded: 130 and one line, by the module and by the installed script."""
    Path("andrea").write_text("import sys\nfrom andrea_pl.cli.main import main\nsys.exit(main())\n")
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
