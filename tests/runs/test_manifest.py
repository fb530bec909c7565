"""Manifests and lock files that somebody edited: taken for what they are, never a traceback."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andrea_pl import DurableCheckpointIO, UserError
from andrea_pl.runs.checkpoint_io import read_checkpoint
from andrea_pl.runs.lock import LOCK_NAME, FolderLock, read_holder
from andrea_pl.runs.manifest import fault_of, manifest_path, newest_valid, sweep
from tests.support.checkpoints import DAMAGES, checkpoint, flip

ODD = [
    "",
    "{",
    "null",
    "5",
    "[]",
    "[[1]]",
    '"a"',
    "{}",
    "[" * 100_000,
    '{"a": 1e999}',
    "\x00",
    "NaN",
    "1e999",
]

FIELDS: list[dict[str, Any]] = [
    {"update": "a"},
    {"update": None},
    {"update": 1e999},
    {"update": float("nan")},
    {"update": []},
    {"size": {}},
    {"size": -1},
    {"size": 1e999},
    {"sha256": 5},
    {"sha256": None},
    {"resumable": None},
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "update-000001.ckpt"
    content = {"global_step": 1, "state_dict": {"a": torch.ones(2)}, "optimizer_states": []}
    DurableCheckpointIO().save_checkpoint(content, path)
    assert newest_valid(tmp_path).path == path
    return path


@pytest.mark.parametrize("content", [*ODD, '{"format": 1, "contents": 5}', '{"format": 1, "contents": [1]}'])
def test_manifests(saved: Path, content: str) -> None:
    manifest_path(saved).write_text(content)
    assert "has no manifest" in (fault_of(saved) or "")
    with pytest.raises(UserError, match="no checkpoint verifies"):
        newest_valid(saved.parent)
    sweep(saved.parent)


@pytest.mark.parametrize("changes", FIELDS, ids=str)
def test_fields_of_manifests(saved: Path, changes: dict[str, Any]) -> None:
    whole = json.loads(manifest_path(saved).read_text())
    whole["contents"][0] |= changes
    manifest_path(saved).write_text(json.dumps(whole))
    with pytest.raises(UserError, match="no checkpoint verifies"):
        newest_valid(saved.parent)


@pytest.mark.parametrize("content", [*ODD, '{"logs": 5, "loggers": 7, "job": [1], "process": {"a": 1}}'])
def test_locks(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_NAME).write_text(content)
    facts = read_holder(tmp_path)
    assert facts.get("logs") is None
    assert facts.get("loggers") is None
    lock = FolderLock(tmp_path)
    assert read_holder(tmp_path)["process"] == os.getpid()
    lock.release()


def test_facts_that_are_plain_stay(tmp_path: Path) -> None:
    given = {"logs": "runs/version_0", "loggers": [["TensorBoardLogger", "runs", "0"]], "job": "7"}
    lock = FolderLock(tmp_path, given)
    lock.release()
    assert given.items() <= read_holder(tmp_path).items()
    for broken in ([["a", "b"]], [1], "abc", [["a", "b", 3]]):
        (tmp_path / LOCK_NAME).write_text(json.dumps(given | {"loggers": broken}))
        assert "loggers" not in read_holder(tmp_path)


class TestNewestValid:
    def test_by_update(self, folder: Path) -> None:
        found = newest_valid(folder)
        assert (found.path.name, found.update, found.passed_over) == ("update-000030.ckpt", 30, [])
        assert read_checkpoint(found.path)["state_dict"]["w"][0] == 30.0

    @pytest.mark.parametrize("damage", DAMAGES)
    @pytest.mark.guarantee("checkpoints are verified")
    def test_passes_over_what_is_damaged(self, folder: Path, damage: str) -> None:
        """Truncated, flipped, replaced: the one before is taken, and the fault is named."""
        newest = folder / "update-000030.ckpt"
        DAMAGES[damage](newest)
        found = newest_valid(folder)
        assert found.path.name == "update-000020.ckpt"
        assert len(found.passed_over) == 1
        assert str(newest) in found.passed_over[0]

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_none_left_is_an_error(self, folder: Path, damage: str) -> None:
        files = sorted(folder.glob("*.ckpt"))
        for file in files:
            DAMAGES[damage](file)
        with pytest.raises(UserError, match="nothing is started afresh") as caught:
            newest_valid(folder)
        for file in files:
            assert str(file) in str(caught.value)

    def test_weights_alone_are_passed_over(self, folder: Path) -> None:
        """As `save_weights_only` writes them."""
        content = checkpoint(40)
        del content["optimizer_states"]
        DurableCheckpointIO().save_checkpoint(content, folder / "weights-40.ckpt")
        found = newest_valid(folder)
        assert found.update == 30
        assert "weights-40.ckpt holds weights alone" in found.passed_over[0]

    def test_nothing_there_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="there is no checkpoint"):
            newest_valid(tmp_path)
        with pytest.raises(UserError, match="no such folder"):
            newest_valid(tmp_path / "none")

    @given(bit=st.integers(min_value=0, max_value=10**6))
    @pytest.mark.guarantee("checkpoints are verified")
    def test_any_bit_flipped_is_found(self, tmp_path_factory: Any, bit: int) -> None:
        path = tmp_path_factory.mktemp("flipped") / "a.ckpt"
        DurableCheckpointIO().save_checkpoint(checkpoint(1, 10), path)
        assert fault_of(path) is None
        flip(path, bit % (8 * path.stat().st_size))
        assert "does not agree with its manifest" in str(fault_of(path))
        with pytest.raises(UserError, match=r"a\.ckpt: does not agree with its manifest"):
            read_checkpoint(path)
