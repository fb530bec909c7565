"""Memory stays where it is, over 1,000 updates with every callback."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.system
def test_memory_is_steady() -> None:
    """Under 1 kB of resident memory an update, and as many live tensors at the end as before."""
    script = Path(__file__).with_name("steady_memory.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(r"slope (-?[\d.]+) tensors (\d+) (\d+)", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < 1000.0
    assert found[2] == found[3]
