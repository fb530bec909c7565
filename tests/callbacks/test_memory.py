"""Memory stays where it is, over 1,000 updates with every callback."""

import re

import pytest

from tests.support.commands import ROOT, run_python


@pytest.mark.system
def test_memory_is_steady() -> None:
    """Under 1 kB of resident memory an update, and as many live tensors at the end as before."""
    done = run_python((ROOT / "tests/support/steady_memory.py").read_text())
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(r"slope (-?[\d.]+) tensors (\d+) (\d+)", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < 1000.0
    assert found[2] == found[3]
