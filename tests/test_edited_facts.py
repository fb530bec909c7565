"""Manifests and lock files that somebody edited: taken for what they are, never a traceback."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from andrea_pl import UserError
from andrea_pl.checkpoint import DurableCheckpointIO, fault_of, manifest_path, newest_valid, sweep
from andrea_pl.lock import LOCK_NAME, FolderLock, read_holder

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
