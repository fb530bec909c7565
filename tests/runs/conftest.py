"""Fixtures of tests about runs."""

from pathlib import Path

import pytest

from andrea_pl import DurableCheckpointIO
from tests.support.checkpoints import checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with checkpoints of updates 10, 20, 30."""
    for update in (30, 10, 20):  # the order of writing decides nothing
        path = tmp_path / "checkpoints" / f"update-{update:06d}.ckpt"
        DurableCheckpointIO().save_checkpoint(checkpoint(update), path)
    return tmp_path / "checkpoints"
