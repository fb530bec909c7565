"""Running an update again leaves every kind of buffer as it was, and blames nobody for a fault of ours."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from andrea_callbacks import PreClipNorm, SpikeForensics
from andrea_callbacks.forensics.replay import ReplayUnavailable, undisturbed
from tests.support.projects import TextRows
from tests.support.toy import ListLoader, RowLogger, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]
KINDS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(32).to_sparse(),
    "sparse, not coalesced": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1], [0, 0, 1]]), torch.tensor([1.0, 2.0, 3.0]), (2, 2), check_invariants=False
    ),
    "compressed rows": lambda: torch.eye(4).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.linspace(-1, 1, 8), 0.1, 10, torch.qint8),
    "complex": lambda: torch.tensor([1 + 2j, 3 - 4j]),
    "meta": lambda: torch.empty(3, device="meta"),
    "no elements": lambda: torch.empty(0, 4),
    "boolean": lambda: torch.tensor([True, False]),
    "not a number": lambda: torch.tensor([float("nan"), 1.0]),
    "overlapping": lambda: torch.zeros(1).expand(4),
    "half": lambda: torch.ones(3, dtype=torch.bfloat16),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


class Project(pl.LightningModule):
    """A network with BatchNorm, and a buffer of some kind before it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.register_buffer("special", KINDS[kind]())
        self.layer, self.norm = nn.Linear(32, 8), nn.BatchNorm1d(8)

    def sequence_losses(self, batch: Tensor) -> Tensor:
        hidden = self.norm(self.layer(batch))
        return F.mse_loss(hidden, torch.ones_like(hidden), reduction="none").sum(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.sequence_losses(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Eager(SpikeForensics):
    """Takes every update from the tenth on for a spike."""

    def on_before_optimizer_step(self, *arguments: Any) -> None:
        for detector in self._detectors.values():
            detector.threshold, detector.ratio = -1e9, 0.0
        super().on_before_optimizer_step(*arguments)


def same(one: Tensor, other: Tensor) -> bool:
    """Say whether tensors are equal bit for bit, whatever their kind."""
    if one.is_meta:
        return other.is_meta
    if one.is_nested:
        return all(map(torch.equal, one.unbind(), other.unbind()))
    if one.is_quantized:
        return torch.equal(one.int_repr(), other.int_repr())
    if one.layout != torch.strided:
        return one.layout == other.layout and torch.equal(one.to_dense(), other.to_dense())
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "meta"])  # which no trainer can move
def test_buffers_of_every_kind(kind: str) -> None:
    """pytorch#69786: running_mean was 0.516 off behind a sparse buffer, num_batches_tracked 62 and not 60."""
    rows = [TextRows(8).rows for _ in range(20)]
    plain, watched = Project(kind), Project(kind)
    build_trainer().fit(plain, ListLoader(rows))
    eager = Eager(min_history=5, patience=1000, max_reports=3)
    build_trainer(callbacks=[eager]).fit(watched, ListLoader(rows))
    assert eager.spikes >= 3
    report = json.loads(next(Path("reports").glob("*/report.json")).read_text())
    assert "sequences" in report["attribution"], report["attribution"]
    for (name, left), (_, right) in zip(plain.named_buffers(), watched.named_buffers(), strict=True):
        assert same(left, right), name
    assert int(watched.norm.num_batches_tracked) == 20
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))


def fill(buffer: Tensor) -> None:
    if buffer.dtype == torch.bool:
        buffer.logical_not_()
    elif not buffer.is_nested and buffer.layout == torch.strided and 0 in buffer.stride():
        buffer.data = buffer + 1.0
    else:
        buffer.mul_(2)


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "quantized"])
@pytest.mark.guarantee("watching changes nothing")
def test_buffers_that_the_forward_pass_changes(kind: str) -> None:
    module = Project(kind)
    trainer = build_trainer()
    kept, before = module.special.clone(), module.norm.running_mean.clone()
    with undisturbed(trainer, module):
        fill(module.special)
        module.norm.running_mean.add_(1.0)
    assert same(module.special, kept)
    assert torch.equal(module.norm.running_mean, before)


def test_a_replaced_sparse_buffer_comes_back() -> None:
    module = Project("sparse")
    kept = module.special
    with undisturbed(build_trainer(), module):
        module.special = torch.zeros(2, 2).to_sparse()
        raise_nothing = module.norm(torch.randn(4, 8))
    assert raise_nothing.shape == (4, 8)
    assert module.special is kept


def test_everything_else_is_restored_where_one_thing_cannot_be() -> None:
    """What the user's code raises passes through, and what can be restored is."""
    module = Project("sparse")
    before = module.norm.running_mean.clone()
    state = torch.get_rng_state()

    def fail() -> None:
        with undisturbed(build_trainer(), module):
            module.norm.running_mean.add_(1.0)
            torch.rand(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(module.norm.running_mean, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_buffer_that_cannot_be_copied_is_named_before_anything_runs() -> None:
    class Stubborn(Tensor):
        def clone(self, *arguments: Any, **options: Any) -> Tensor:
            raise NotImplementedError("no copies")

        def detach(self) -> Tensor:
            return self

    module = Project("half")
    module.special = torch.ones(2).as_subclass(Stubborn)
    was_run = False
    with pytest.raises(ReplayUnavailable, match=r"the buffer special cannot be copied .*no copies"):  # noqa: SIM117
        with undisturbed(build_trainer(), module):
            was_run = True
    assert not was_run


class Manual(pl.LightningModule):
    """Manual optimization, and a replay that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(4)
        self.layer = nn.Linear(32, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.layer(batch).square().sum(1).mean()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def stepping(module: Any, batch: Tensor) -> Tensor:
    return module.training_step(batch, 0)["loss"]


def raw(module: Any, batch: Tensor) -> Tensor:
    loss = module.layer(batch).square().sum(1)
    loss.mean().backward(retain_graph=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    optimizer.step()
    return loss


def backward(module: Any, batch: Tensor) -> Tensor:
    loss = module.layer(batch).square().sum(1)
    loss.mean().backward(retain_graph=True)
    return loss


@pytest.mark.parametrize("replay", [stepping, raw, backward])
@pytest.mark.filterwarnings("ignore:update .* running the update again raised")
def test_a_replay_that_trains_changes_nothing(replay: Any) -> None:
    rows = [TextRows(8).rows for _ in range(20)]
    plain, watched = Manual(), Manual()
    build_trainer().fit(plain, ListLoader(rows))
    logger = RowLogger()
    eager = Eager(min_history=5, patience=1000, max_reports=3, replay=replay)
    trainer = build_trainer(callbacks=[eager, PreClipNorm()], logger=logger)
    trainer.fit(watched, ListLoader(rows))
    assert trainer.global_step == 20
    assert eager.spikes >= 3
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))
    assert len(logger.series("train/grad_norm")) == 20
    report = json.loads(next(Path("reports").glob("*/report.json")).read_text())
    if replay is backward:
        assert report["attribution"]["agreement"] == pytest.approx(1.0, abs=1e-5)
    else:
        assert "SGD.step() was called" in report["attribution"]["unavailable"]
