"""What reaches the disk, and in which order: recorded at the calls that wait for it."""

import ast
import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from andrea_callbacks.numerics import atomic_write as durable
from andrea_callbacks.numerics.atomic_write import append_durably, make_folder_durably
from andrea_pl import DurableCheckpoint
from tests.support.toy import ListLoader, ToyU, build_trainer, window

TEMPORARY, NEW = re.compile(r"\.andrea-([^/]*)-[a-z0-9_]{8}\.part$"), r"\1 (new)"


class Calls:
    """Calls that wait for a disk, name a file or remove one, as words with paths."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def note(self, word: str, *paths: Any) -> None:
        named = [Path(os.path.relpath(each)) for each in paths]
        if not any(each.parts[:1] == ("..",) for each in named):
            self.made.append(f"{word} {TEMPORARY.sub(NEW, str(named[-1]))}")

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what the context does below the working folder."""
        with pytest.MonkeyPatch.context() as patch:

            def wrap(name: str, paths: Callable[..., list[Any]], word: str) -> None:
                real = getattr(os, name)

                def call(*arguments: Any, **named: Any) -> Any:
                    result = real(*arguments, **named)
                    self.note(word, *paths(*arguments))
                    return result

                patch.setattr(os, name, call)

            wrap("fsync", lambda descriptor: [Path(f"/proc/self/fd/{descriptor}").readlink()], "sync")
            wrap("replace", lambda source, target: [source, target], "name")
            wrap("rename", lambda source, target: [source, target], "name")
            wrap("mkdir", lambda path, *_: [path], "make")
            for name in ("unlink", "remove"):
                wrap(name, lambda path: [path], "remove")
            yield


def of_a_run() -> list[str]:
    """Return the calls of a run that saves twice and keeps one."""
    calls = Calls()
    saving = DurableCheckpoint(every=1, keep=1)
    trainer = build_trainer(
        enable_checkpointing=True,
        logger=TensorBoardLogger("runs", name="toy"),
        callbacks=[saving],
        max_epochs=1,
        log_every_n_steps=1,
    )
    with calls.recorded():
        trainer.fit(ToyU(), ListLoader([window([0, 1]), window([1])]))
        append_durably(Path("notes/journal"), b"a\n")
        append_durably(Path("notes/journal"), b"b\n")
        make_folder_durably(Path("deep/er"))
    return [each for each in calls.made if "trial" not in each and "hparams" not in each]


FOLDER = "runs/toy/version_0/checkpoints"


def saved(update: int) -> list[str]:
    """Return what a save does: data, manifest, the names, each followed by the folder that has it."""
    file = f"{FOLDER}/update-{update:06d}.ckpt"
    return [
        f"sync {file} (new)",
        f"sync {file}.json (new)",
        f"name {file}.json",
        f"sync {FOLDER}",
        f"name {file}",
        f"sync {FOLDER}",
    ]


EXPECTED = [
    "make runs",
    "make runs/toy",
    "make runs/toy/version_0",
    f"make {FOLDER}",
    "sync runs/toy/version_0",
    "sync runs/toy/version_0",
    "sync runs/toy",
    "sync runs",
    "sync .",
    *saved(1),
    *saved(2),
    f"remove {FOLDER}/update-000001.ckpt",
    f"remove {FOLDER}/update-000001.ckpt.json",
    "make notes",
    "sync .",
    "sync notes/journal",
    "sync notes",
    "sync notes/journal",
    "make deep",
    "sync .",
    "make deep/er",
    "sync deep",
]


def test_the_order_in_which_the_disk_learns() -> None:
    """Data before its manifest, both before the name, the folder after each; an older file goes last."""
    first = of_a_run()
    assert [each for each in first if not each.startswith("make runs")] == [
        each for each in EXPECTED if not each.startswith("make runs")
    ]


def waits() -> list[tuple[str, int]]:
    """Return every call in durable.py that waits for the disk, by its function and its number in there."""
    tree = ast.parse(inspect.getsource(durable))
    found: list[tuple[str, int]] = []
    for function in (each for each in tree.body if isinstance(each, ast.FunctionDef)):
        found += [(function.name, number) for number, _ in enumerate(_waits_in(function))]
    return found


def _waits_in(function: ast.FunctionDef) -> list[ast.Expr]:
    """Return the statements of a function that do nothing else than wait."""
    statements = [each for each in ast.walk(function) if isinstance(each, ast.Expr)]
    return [each for each in statements if re.match(r"os\.fsync|synchronize_folder", ast.unparse(each))]


def test_durable_waits_at_six_places() -> None:
    assert len(waits()) == 6


@pytest.mark.parametrize(("name", "number"), waits())
def test_no_wait_can_be_left_out(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one of them the order is another."""
    tree = ast.parse(inspect.getsource(durable))
    function = next(each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name)
    _waits_in(function)[number].value = ast.Constant(value=None)
    changed: dict[str, Any] = {"__name__": "changed"}
    exec(compile(ast.fix_missing_locations(tree), "changed", "exec"), changed)
    original = getattr(durable, name)
    assert isinstance(original, FunctionType)
    monkeypatch.setattr(original, "__code__", changed[name].__code__)
    with pytest.raises(AssertionError):
        test_the_order_in_which_the_disk_learns()


def test_folders_are_named_in_their_parents_also_where_lightning_made_them() -> None:
    """A power cut must not take the folder with the checkpoint in it."""
    made = of_a_run()
    start = made.index(f"make {FOLDER}")
    first_save = made.index(saved(1)[0])
    between = made[start:first_save]
    assert {"sync runs/toy/version_0", "sync runs/toy", "sync runs", "sync ."} <= set(between)
    assert torch.load(f"{FOLDER}/update-000002.ckpt", weights_only=True)["global_step"] == 2
