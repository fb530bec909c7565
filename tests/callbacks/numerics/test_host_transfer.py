"""No host waits for a device outside the updates that are recorded in detail: every read is counted."""

import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from andrea_callbacks import (
    CoherenceGate,
    EpochSummary,
    FiniteGuard,
    MomentMonitor,
    PreClipNorm,
    RunJournal,
    SourceMonitor,
    SpikeForensics,
    TensorBoardLayout,
    Throughput,
    UpdateLog,
)
from andrea_callbacks.hooks.measuring import measured_norm
from andrea_pl import LanguageModule, TransformerConfig
from tests.support.projects import PROJECTS, loader_of
from tests.support.runs import text_windows
from tests.support.toy import ListLoader, RowLogger, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.IncoherenceWarning"),
]
ALLOWED = {
    "read",  # HostCopy: has arrived by then, or is waited for by one who must know
    "_squared_norms_on_cpu",  # the gradients are on the host
}
WAITING = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "cpu")


class Reads(TorchDispatchMode):
    """Count what makes the host wait, while callbacks are at work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        self.depth = 0
        for name in WAITING:
            monkeypatch.setattr(torch.Tensor, name, self.counted(name, getattr(torch.Tensor, name)))

    def counted(self, name: str, method: Any) -> Any:
        def counting(*arguments: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            if self.depth and frame.f_code.co_name not in ALLOWED:
                self.found.append(f"{name} in {frame.f_code.co_name}")
            self.depth, kept = 0, self.depth  # the operator below is that of this call
            try:
                return method(*arguments, **options)
            finally:
                self.depth = kept

        return counting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        copies = "_to_copy" in name and str((kwargs or {}).get("device", args[0].device)) != str(
            args[0].device
        )
        if self.depth and ("_local_scalar_dense" in name or copies):
            self.found.append(name)
        return func(*args, **(kwargs or {}))

    def watch(self, callback: Any) -> Any:
        for name in dir(callback):
            if name.startswith("on_") or name in ("take_report", "take_event"):
                setattr(callback, name, self.watched(getattr(callback, name)))
        return callback

    def watched(self, hook: Any) -> Any:
        def watching(*arguments: Any, **options: Any) -> Any:
            self.depth += 1
            try:
                with self:
                    return hook(*arguments, **options)
            finally:
                self.depth -= 1

        return watching


def watching_callbacks() -> list[Any]:
    every = 1000
    return [
        PreClipNorm(every=every),
        SpikeForensics(min_history=5),
        MomentMonitor(every=every),
        CoherenceGate(every=every),
        Throughput(every=every),
        RunJournal(every=every, seconds=1e9),
        UpdateLog(),
        EpochSummary(),
        SourceMonitor(),
        TensorBoardLayout(),
    ]


class Hasty(pl.Callback):
    """Asks for a number at every update: the control."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if float(measured_norm(trainer, optimizer).total) < 0:
            raise RuntimeError("a negative norm")


@pytest.mark.system
@pytest.mark.parametrize("deferred", [False, True])
def test_our_module(deferred: bool, monkeypatch: pytest.MonkeyPatch, read_late: Any) -> None:
    """All callbacks, FiniteGuard included: the module's own verdict is all that is read."""
    if deferred:
        read_late()
    reads = Reads(monkeypatch)
    shape = TransformerConfig(vocab_size=32, block_size=16, d_model=16, n_heads=2, n_layers=1)
    per_update: list[list[str]] = []

    class Module(LanguageModule):
        def on_train_batch_end(self, *_: Any) -> None:  # after the callbacks
            per_update.append(list(reads.found))
            reads.found.clear()

    for extra, expected in (([], []), ([reads.watch(Hasty())], ["__float__ in on_before_optimizer_step"])):
        per_update.clear()
        reads.found.clear()
        callbacks = [reads.watch(each) for each in [*watching_callbacks(), FiniteGuard(state_every=1000)]]
        trainer = build_trainer(callbacks=[*callbacks, *extra], logger=RowLogger())
        trainer.fit(Module(shape, schedule="constant"), ListLoader(text_windows(30)))
        assert per_update == [expected] * 30


@pytest.mark.parametrize("name", ["boring adam", "boring accumulating and clipping", "manual two optimizers"])
def test_foreign_projects(name: str, monkeypatch: pytest.MonkeyPatch, read_late: Any) -> None:
    """All but FiniteGuard, which says that it reads one row of numbers an update in such a module."""
    read_late()
    reads = Reads(monkeypatch)
    build, options = PROJECTS[name]
    module, per_update = build(), list[list[str]]()

    def mark(*_: Any) -> None:
        per_update.append(list(reads.found))
        reads.found.clear()

    module.on_train_batch_end = mark  # type: ignore[method-assign]
    callbacks = [reads.watch(each) for each in watching_callbacks()]
    trainer = build_trainer(callbacks=callbacks, limit_train_batches=20, limit_val_batches=0, **options())
    trainer.fit(module, loader_of(name))
    assert per_update[4:] == [[]] * 16
