"""Tensors are found in whatever projects pass around, and NaN in a batch is named by key and row."""

import dataclasses
import json
import math
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import attrs
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from andrea_callbacks import FiniteGuard, NonFiniteError, NonFiniteWarning, RunJournal, read_journal
from andrea_callbacks.forensics.batch_faults import faults_in, named_tensors
from andrea_callbacks.forensics.sample_identity import field
from tests.support.toy import INF, NAN, ListLoader, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


@dataclass
class MolGraph:
    """As chemprop's BatchMolGraph: what it is made of is no field, and is gone afterwards."""

    graphs: InitVar[list[Tensor]]
    V: Tensor = dataclasses.field(init=False)
    size: ClassVar[Tensor] = torch.zeros(9)

    def __post_init__(self, graphs: list[Tensor]) -> None:
        self.V = torch.cat(graphs)


class Pair(NamedTuple):
    left: Tensor
    right: list[Tensor]


@attrs.define
class Record:
    x: Tensor
    name: str


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.module = nn.Linear(2, 2)
        self.itself = self

    @property
    def broken(self) -> Tensor:
        raise RuntimeError("read")


class Slotted:
    __slots__ = ("absent", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Rude:
    """Attributes that are looked up in a dict, and raise what that raises."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__["parts"] = parts

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["parts"][name]


class Lazy(Mapping[str, Any]):
    """A mapping that cannot read what it has."""

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("no such file")

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


class Graph:
    """As PyTorch Geometric's Data: keys and items, and no Mapping; asking for a key makes it."""

    def __init__(self, **parts: Any) -> None:
        self._store = parts

    def keys(self) -> list[str]:
        return list(self._store)

    def __getitem__(self, key: str) -> Any:
        return self._store.setdefault(key, {})


@dataclass
class Raising:
    x: Tensor

    @property
    def y(self) -> Tensor:
        raise RuntimeError("read")


def moved(tensor: Tensor) -> Iterator[Tensor]:
    raise AssertionError("an iterator was moved")
    yield tensor


ONE = torch.ones(2)
HOLDERS: dict[str, tuple[Any, list[str]]] = {
    "tensor": (ONE, [""]),
    "InitVar": (MolGraph([ONE, ONE]), ["V"]),
    "named tuple": (Pair(ONE, [ONE]), ["left", "right[0]"]),
    "attrs": (Record(ONE, "a"), ["x"]),
    "object": (Plain(ONE), ["x"]),
    "slots": (Slotted(ONE), ["x"]),
    "graph": (Graph(x=ONE, edge_index=torch.zeros(2, 3)), ["x", "edge_index"]),
    "property": (Raising(ONE), ["x"]),
    "mapping": (OrderedDict(a={"b": (ONE, None)}, c=3), ["a.b[0]"]),
    "user dict": (UserDict(a=ONE), ["a"]),
    "integers for keys": ({0: ONE}, ["[0]"]),
    "packed": (pack_sequence([ONE, torch.ones(1)]), ["data", "batch_sizes"]),
    "iterator": ([moved(ONE), ONE], ["[1]"]),
    "numbers": ({"w": [1.0, 2.0], "n": [1, 2]}, ["w"]),
    "numpy": ({"x": np.ones(3), "names": np.array(["a"])}, ["x"]),
    "nothing": (None, []),
    "class": (Plain, []),
    "module": (nn.Linear(2, 2), []),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_tensors_are_found_in(name: str) -> None:
    value, places = HOLDERS[name]
    assert [place for place, _ in named_tensors(value)] == places


def test_faults_are_named_by_key_and_row() -> None:
    x = torch.ones(5, 3)
    x[3, 1] = NAN
    y = [torch.tensor([1.0, INF, -INF])]
    batch = {"x": x, "y": y, "ids": torch.arange(3), "scale": torch.tensor(NAN)}
    found = [(each.key, each.value, each.rows, each.length) for each in faults_in(batch)]
    assert found == [("x", "NaN", (3,), 5), ("y[0]", "Inf", (1, 2), 3), ("scale", "NaN", (), 0)]


def test_masks_are_no_faults() -> None:
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -INF)
    assert faults_in({"mask": mask}) == []
    assert [each.value for each in faults_in({"logits": mask + 1.0})] == ["Inf"]


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.tensor([0.0, NAN, 1.0]).to_sparse(),
        lambda: torch.tensor([[0.0, 1.0], [NAN, 0.0]]).to_sparse_csc(),
        lambda: torch.tensor([0.0, NAN], dtype=torch.float16),
        lambda: torch.tensor([0j, complex(NAN, 0)]),
    ],
    ids=["sparse", "compressed", "half", "complex"],
)
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
def test_faults_in_kinds_of_tensors(build: Callable[[], Tensor]) -> None:
    assert [each.rows for each in faults_in([build()])] == [(1,)]


def test_kinds_that_cannot_be_looked_into_are_passed_over() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    assert faults_in([torch.empty(2, device="meta"), nested, quantized, torch.empty(0)]) == []


class Regression(pl.LightningModule):
    """Somebody's model of pairs, which may check its input itself."""

    def __init__(self, checks: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.checks = checks

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.checks and not torch.isfinite(x).all():
            raise ValueError("input is not finite")
        return nn.functional.mse_loss(self.layer(x)[:, 0], y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def pairs(bad: int = 22) -> DataLoader[Any]:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    x[bad, 2] = NAN
    return DataLoader(TensorDataset(x, torch.ones(32)), batch_size=4)


def name_rows(batch: Any) -> list[str]:
    return [f"house {number}" for number in range(len(batch[0]))]


def test_a_nan_in_the_batch_is_named_without_a_replay() -> None:
    """Row 22 of 32, in batches of 4: the third row of update 6."""
    guard = FiniteGuard(identify=name_rows)
    where = r"micro-batch 1 of 1, row 3 \(house 2\): NaN in the batch itself, under \[0\]"
    with pytest.raises(NonFiniteError, match=f"update 6: the loss .*; {where}"):
        build_trainer(callbacks=[guard]).fit(Regression(), pairs())
    report = json.loads(Path("reports/update-000006-nonfinite/report.json").read_text())
    assert report["batch"][0]["key"] == "[0]"
    assert report["batch"][0]["rows"] == [{"rank": 0, "micro_batch": 1, "row": 3, "name": "house 2"}]


def test_a_nan_in_the_batch_is_named_where_the_project_raises_first() -> None:
    journal = RunJournal()
    trainer = build_trainer(callbacks=[FiniteGuard(), journal])
    words = r"update 6: .*, row 3: NaN in the batch itself.*ValueError"
    with pytest.warns(NonFiniteWarning, match=words), pytest.raises(ValueError, match="not finite") as raised:
        trainer.fit(Regression(checks=True), pairs())
    assert raised.value.__notes__ == [
        "update 6: micro-batch 1 of 1, row 3: NaN in the batch itself, under [0]"
    ]
    kinds = [row["kind"] for row in read_journal("journal.jsonl")]
    assert kinds[-2:] == ["nonfinite", "exception"]


def test_nothing_is_said_of_a_sound_batch() -> None:
    class Fails(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise ValueError("something else")

    with pytest.raises(ValueError, match="something else") as raised:
        build_trainer(callbacks=[FiniteGuard()]).fit(Fails(), pairs(31))
    assert not hasattr(raised.value, "__notes__")


def test_graphs_and_records_as_batches() -> None:
    class Graphs(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(batch["x"]).mean()

    good, bad = (Graph(x=torch.full((3, 4), value), y="a") for value in (1.0, 1.0))
    bad["x"][1, 0] = INF
    with pytest.raises(NonFiniteError, match=r"update 2: .*row 2: Inf in the batch itself, under x"):
        build_trainer(callbacks=[FiniteGuard()]).fit(Graphs(), ListLoader([good, bad]))


class Targets(Regression):
    """Missing targets are NaN by design, as in chemprop."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        known = torch.isfinite(y)
        loss = nn.functional.mse_loss(self.layer(x)[known, 0], y[known])
        return loss * (math.inf if self.trainer.global_step == 2 else 1.0)


def test_a_nan_that_is_meant_is_not_blamed() -> None:
    """The batches before had NaN under the same key, and their updates were sound."""
    y = torch.tensor([1.0, NAN, 2.0, 3.0] * 8)
    loader = DataLoader(TensorDataset(torch.randn(32, 4), y), batch_size=4)
    with pytest.raises(NonFiniteError, match="update 3: the loss") as raised:
        build_trainer(callbacks=[FiniteGuard()]).fit(Targets(), loader)
    assert "in the batch itself" not in str(raised.value)


def test_a_nan_in_batches_one_after_the_other_is_named_in_both() -> None:
    guard = FiniteGuard(policy="skip", max_reports=2)
    x = torch.ones(16, 4)
    x[4:12, 1] = NAN
    loader = DataLoader(TensorDataset(x, torch.ones(16)), batch_size=4)
    with pytest.warns(NonFiniteWarning) as said:
        build_trainer(callbacks=[guard]).fit(Regression(), loader)
    named = [str(each.message) for each in said if "in the batch itself, under [0]" in str(each.message)]
    assert len(named) == guard.flagged == 2


def test_batches_that_raise_are_borne() -> None:
    """A batch whose attributes raise, and one that cannot be read, stop neither a fit nor the search."""

    class Odd(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(torch.ones(1, 4)).sum() * (NAN if batch_idx else 1.0)

    guard = FiniteGuard(policy="flag")
    build_trainer(callbacks=[guard, RunJournal()]).fit(Odd(), ListLoader([Rude(x=ONE)] * 3))
    assert guard.flagged == 2
    assert faults_in({"lazy": Lazy()}) == []
    assert field(Lazy(), "x") is None
    assert [each.key for each in faults_in(Rude(x=torch.tensor([NAN])))] == ["parts.x"]


def test_rows_of_another_tensor_are_no_sequences() -> None:
    """A batch of three documents, and NaN in the third place of a tensor of five."""
    weights = torch.ones(5)
    weights[2] = NAN
    batch = {
        "input_ids": torch.ones(3, 2, dtype=torch.int64),
        "document_id": torch.arange(3) + 7,
        "w": weights,
    }

    class Weighted(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer.weight.sum() * batch["w"].sum()

    with pytest.raises(
        NonFiniteError, match=r"micro-batch 1 of 1, row 3: NaN in the batch itself, under w"
    ) as raised:
        build_trainer(callbacks=[FiniteGuard()]).fit(Weighted(), ListLoader([batch]))
    assert "document" not in str(raised.value)
