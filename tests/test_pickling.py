"""Every public callback, strategy and plugin can be pickled and copied, fresh and after a fit."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

import andrea_callbacks
import andrea_pl
from tests.support.projects import TextRows
from tests.support.toy import build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
    pytest.mark.filterwarnings("ignore:DurableCheckpoint without ExactResume"),
]
BASES = (pl.Callback, Strategy, CheckpointIO)
PUBLIC = {
    name: kind
    for package in (andrea_callbacks, andrea_pl)
    for name, kind in vars(package).items()
    if inspect.isclass(kind) and issubclass(kind, BASES) and name != "ScalarCallback"
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
}
EACH = [pytest.mark.parametrize("name", PUBLIC), pytest.mark.parametrize("way", WAYS)]


class Plain(pl.LightningModule):
    """Somebody's model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def sequence_losses(self, batch: Tensor) -> Tensor:
        return self.layer(batch).square().sum(1)

    def generate(self, prompts: list[str], most: int, generator: Any = None) -> list[str]:
        return ["the loss of the model fell" for _ in prompts]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.sequence_losses(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def options(kind: type, value: Any) -> dict[str, Any]:
    """Return the trainer's options that use a callback, strategy or plugin."""
    if issubclass(kind, Strategy):
        return {"strategy": value, "accelerator": "auto"}
    if issubclass(kind, CheckpointIO):
        return {"plugins": [value]}
    bar = issubclass(kind, pl.callbacks.ProgressBar)
    saves = issubclass(kind, pl.callbacks.Checkpoint)
    return {"callbacks": [value], "enable_progress_bar": bar, "enable_checkpointing": saves}


def fit(value: Any, updates: int = 12) -> None:
    torch.manual_seed(3)
    rows = TextRows(4 * updates).rows.clone()
    rows[-8:] *= 50.0  # a spike, and a report of it
    trainer = build_trainer(gradient_clip_val=1.0, **options(type(value), value))
    trainer.fit(Plain(), DataLoader(rows, batch_size=4))


def plain_state(value: Any) -> Any:
    return str(value.state_dict()) if isinstance(value, pl.Callback) else sorted(vars(value))


def test_the_list_is_whole() -> None:
    assert {"SpikeForensics", "ExactResume", "UpdateProgressBar", "DurableCheckpoint"} <= PUBLIC.keys()
    assert {"DurableCheckpointIO", "ClipSingleDeviceStrategy", "ClipDDPStrategy"} <= PUBLIC.keys()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PUBLIC)
def test_fresh(name: str, way: str) -> None:
    made = PUBLIC[name]()
    again = WAYS[way](made)
    assert type(again) is type(made)
    assert plain_state(again) == plain_state(made)


RUNNABLE = [name for name in PUBLIC if name not in ("ClipDDPStrategy", "ClipModelParallelStrategy")]


@pytest.mark.parametrize("name", RUNNABLE)  # the others need several processes
def test_after_a_fit(name: str) -> None:
    """neuralforecast's save, pytorch-tabular's save_model and ddp_spawn pickle what a fit has used."""
    kind = PUBLIC[name]
    given = {"min_history": 5, "history": 10} if name == "SpikeForensics" else {}
    made = kind(**given)
    fit(made)
    for way in WAYS.values():
        again = way(made)
        assert type(again) is type(made)
        if isinstance(made, pl.Callback):
            assert again.state_dict().keys() == made.state_dict().keys()
            assert b"Plain" not in pickle.dumps(made)  # Lightning hangs methods of the module on a callback
        fit(again, 6)


def test_a_module_with_its_trainer() -> None:
    """What pytorch-tabular's save_model does: a fitted module, callbacks and all."""
    kinds = [each for each in PUBLIC.values() if issubclass(each, pl.Callback)]
    callbacks = [each() for each in kinds if not issubclass(each, pl.callbacks.Checkpoint)]
    module = Plain()
    trainer = build_trainer(callbacks=callbacks, enable_progress_bar=True)
    trainer.fit(module, DataLoader(TextRows(16), batch_size=4))
    again = pickle.loads(pickle.dumps(trainer.callbacks))
    assert [type(each) for each in again] == [type(each) for each in trainer.callbacks]
    copied = copy.deepcopy(module)
    assert all(map(torch.equal, copied.parameters(), module.parameters()))


def test_weights_that_got_no_gradient_are_let_go() -> None:
    """PreClipNorm keeps such parameters until it has named them."""

    class Unused(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(300, 300)

    made = andrea_callbacks.PreClipNorm()
    build_trainer(callbacks=[made]).fit(Unused(), DataLoader(TextRows(8), batch_size=4))
    assert len(pickle.dumps(made)) < 20_000
