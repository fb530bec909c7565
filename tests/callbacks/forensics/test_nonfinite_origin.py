"""Planted NaN and Inf are named by layer, parameter and sequence."""

import json
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from andrea_callbacks import FiniteGuard, NonFiniteError, NonFiniteWarning
from andrea_callbacks.forensics.nonfinite_origin import find_origin, tensors_in
from andrea_callbacks.hooks.update_window import UpdateWindow
from andrea_pl import DynamicPaddingCollator, LanguageModule, TransformerConfig, Window
from tests.support.projects import Foreign, foreign_batches
from tests.support.toy import INF, NAN, ListLoader, RowLogger, build_trainer

BAD_UPDATE, BAD_ROW, DOCUMENT = 4, 2, 777

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Precision 16-mixed is not supported"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
]

POISON = 31


SHAPE = TransformerConfig(vocab_size=32, block_size=16, d_model=16, n_heads=2, n_layers=2, dropout=0.1)


class Plant(nn.Module):
    """Identity that spoils the marked rows, in the forward pass or in one element of the backward pass."""

    def __init__(self, value: float, owner: Any, backward: bool = False) -> None:
        super().__init__()
        self.value, self.backward = value, backward
        self.owner = [owner]  # no submodule

    def forward(self, x: Tensor) -> Tensor:
        marked = self.owner[0].marked
        if marked is None:
            return x
        if not self.backward:
            return torch.where(marked[:, None], torch.full_like(x, self.value), x)
        if x.requires_grad:
            place = int(marked.nonzero()[0])
            x.register_hook(lambda gradient: self.spoil(gradient, place))
        return x

    def spoil(self, gradient: Tensor, place: int) -> Tensor:
        gradient = gradient.clone()
        gradient[place, 0] = torch.where(gradient[place, 0] != 0, self.value, gradient[place, 0])
        return gradient


class Spoiled(nn.Module):
    """A layer whose output is spoiled."""

    def __init__(self, layer: nn.Module, plant: Plant) -> None:
        super().__init__()
        self.layer, self.plant = layer, plant

    def forward(self, *arguments: Any) -> Tensor:
        return self.plant(self.layer(*arguments))


class Planted(LanguageModule):
    """A model that fails on sequences with the token POISON, at one place."""

    def __init__(self, place: str, value: float, **options: Any) -> None:
        super().__init__(SHAPE, lr=1e-3, schedule="constant", **options)
        self.marked: Tensor | None = None
        self.value = value if place == "loss" else None
        if place == "embedding":
            self.network.embedding = Spoiled(self.network.embedding, Plant(value, self))  # type: ignore[assignment]
        elif place == "attention":
            block: Any = self.network.blocks[1]
            block.attention = Spoiled(block.attention, Plant(value, self))
        elif place == "gradient":
            self.network.dropout = Plant(value, self, backward=True)  # type: ignore[assignment]

    def predict_labels(self, micro_batch: Any) -> Any:
        rows = (micro_batch["input_ids"] == POISON).any(1)
        flat = rows[:, None].expand_as(micro_batch["input_ids"]).flatten()[micro_batch["token_index"]]
        self.marked = flat if bool(flat.any()) else None
        logits, labels, places = super().predict_labels(micro_batch)
        if self.value is not None and self.marked is not None:
            spoiled = self.marked[:, None] & (torch.arange(32) == labels[:, None])
            logits = torch.where(spoiled, NAN if self.value != self.value else -INF, logits)
        return logits, labels, places


def text_window(number: int, poisoned: str | None = None) -> Window:
    """Return three micro-batches of four sequences; one sequence of the first or last is poisoned."""
    generator = torch.Generator().manual_seed(number)
    collate = DynamicPaddingCollator(0)
    made = Window()
    for micro_batch in range(3):
        items = []
        for row in range(4):
            tokens = torch.randint(
                1, 30, (int(torch.randint(4, 12, (), generator=generator)),), generator=generator
            )
            document = 100 * micro_batch + row
            if (
                poisoned is not None
                and (poisoned, micro_batch) in (("first", 0), ("last", 2))
                and row == BAD_ROW
            ):
                tokens[2], document = POISON, DOCUMENT
            items.append(
                {
                    "input_ids": tokens[:-1],
                    "labels": tokens[1:],
                    "source_id": 0,
                    "document_id": document,
                    "offset": 0,
                }
            )
        made.append(collate(items))
    return made


class Keep(pl.Callback):
    """Keep weights and optimizer state before and after every update."""

    def __init__(self, spoil_moment: int | None = None, value: float = NAN) -> None:
        self.seen: list[list[Tensor]] = []
        self.spoil_moment, self.value = spoil_moment, value

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        optimizer = trainer.optimizers[0]
        parameter = pl_module.network.blocks[0].attention.qkv.weight
        if self.spoil_moment == batch_idx + 1:
            optimizer.state[parameter]["exp_avg"][0, 0] = self.value
        if self.spoil_moment == batch_idx:
            optimizer.state[parameter]["exp_avg"][0, 0] = 0.0
        self.before = self.state(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append(self.state(trainer, pl_module))

    @staticmethod
    def state(trainer: Any, pl_module: Any) -> list[Tensor]:
        states = trainer.optimizers[0].state.values()
        moments = [value.clone() for state in states for value in state.values()]
        return [*(each.detach().clone() for each in pl_module.parameters()), *moments]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(one, two, strict=True))


EXPECTED = {
    "embedding": ("forward", "network.embedding.plant", None),
    "attention": ("forward", "network.blocks.1.attention.plant", None),
    "loss": ("loss", None, None),
    "gradient": ("backward", None, "network.embedding.weight"),
}


@pytest.mark.system
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("micro_batch", ["first", "last"])
@pytest.mark.parametrize("value", [NAN, INF], ids=["NaN", "Inf"])
@pytest.mark.parametrize("place", EXPECTED)
def test_planted_fault_is_found(place: str, value: float, micro_batch: str, policy: Any) -> None:
    torch.manual_seed(2)
    module, guard, keep = Planted(place, value, on_nonfinite=policy), FiniteGuard(state_every=5), Keep()
    last = BAD_UPDATE + (100 if micro_batch == "first" and value != value else 10)
    windows = [
        text_window(number, micro_batch if number == BAD_UPDATE else None) for number in range(1, last + 1)
    ]
    trainer = build_trainer(callbacks=[guard, keep], logger=(logger := RowLogger()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if policy == "raise":
            with pytest.raises(NonFiniteError, match=f"update {BAD_UPDATE}: "):
                trainer.fit(module, ListLoader(windows))
            assert same(Keep.state(trainer, module), keep.before)
        else:
            trainer.fit(module, ListLoader(windows))
            assert same(keep.seen[BAD_UPDATE - 2], keep.seen[BAD_UPDATE - 1])
            assert not same(keep.seen[BAD_UPDATE - 1], keep.seen[BAD_UPDATE])
            assert trainer.global_step == last
    messages = [str(each.message) for each in caught if each.category is NonFiniteWarning]
    assert len(messages) == guard.flagged == 1  # of the clean updates afterwards none
    phase, layer, parameter = EXPECTED[place]
    folder = Path(f"reports/update-{BAD_UPDATE:06d}-nonfinite")
    origin = json.loads((folder / "report.json").read_text())["origin"][0]
    assert (origin["phase"], origin["module"], origin["parameter"]) == (phase, layer, parameter)
    assert origin["micro_batch"] == {"first": 1, "last": 3}[micro_batch]
    assert origin["value"] == ("NaN" if value != value else "Inf")
    assert [each["document"] for each in origin["sequences"]] == [DOCUMENT]
    assert [each["row"] for each in origin["sequences"]] == [BAD_ROW + 1]
    assert f"sequence {BAD_ROW + 1} (document {DOCUMENT} of source 0)" in messages[0]
    assert str(layer or parameter or "the loss itself") in messages[0]
    tensor = next(iter(load_file(folder / "tensors.safetensors").values()))
    assert not torch.isfinite(tensor).all()
    assert not any(each._forward_hooks for each in module.modules())
    if policy == "skip":
        assert logger.series("train/nonfinite")[-1] == (last, 1.0)


@pytest.mark.system
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("value", [NAN, INF], ids=["NaN", "Inf"])
def test_planted_moment_is_found(value: float, policy: Any) -> None:
    torch.manual_seed(2)
    module = Planted("nowhere", value, on_nonfinite=policy)
    guard, keep = FiniteGuard(state_every=1), Keep(BAD_UPDATE, value)
    trainer = build_trainer(callbacks=[keep, guard])
    windows = [text_window(number) for number in range(1, 105)]
    name = "exp_avg of network.blocks.0.attention.qkv.weight"
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=f"update {BAD_UPDATE}: {name} is not finite"):
            trainer.fit(module, ListLoader(windows))
        assert same(Keep.state(trainer, module), keep.before)
    else:
        trainer.fit(module, ListLoader(windows))
        assert same(keep.seen[BAD_UPDATE - 1][:15], keep.seen[BAD_UPDATE - 2][:15])
        assert (module.updates_applied, module.updates_skipped) == (103, 1)
    assert guard.flagged == 1
    report = json.loads(Path(f"reports/update-{BAD_UPDATE:06d}-nonfinite/report.json").read_text())
    assert report["fault"] == name


def test_negative_infinity_in_masks_is_ignored() -> None:
    """Masks and masked scores hold -Inf; the NaN after them counts, and a dict or tuple is no wall."""

    class Mask(nn.Module):
        def forward(self, size: int) -> dict[str, Any]:
            return {"mask": (torch.full((size, size), -INF).triu(1), "a word")}

    class Scores(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, None]:
            return x @ x.T + mask, None

    class Bad(nn.Module):
        def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
            return {"out": [x, torch.where(x > 0.5, NAN, x)]}

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.mask, self.scores, self.bad, self.after = Mask(), Scores(), Bad(), nn.Linear(4, 4)

        def sequence_losses(self, x: Tensor) -> Tensor:
            scores, _ = self.scores(self.after(x), self.mask(4)["mask"][0])
            return self.after(self.bad(scores.softmax(-1))["out"][1]).sum(1)

    module, trainer = Module(), build_trainer()
    update = UpdateWindow(number=1, micro_batches=[torch.eye(4) * 9], states=[None])
    origin = find_origin(trainer, module, update, module.sequence_losses)
    assert origin is not None
    assert (origin.phase, origin.module, origin.negative) == ("forward", "bad", "scores")
    assert len(list(tensors_in({"a": (torch.ones(1), [torch.ones(2)]), "b": None}))) == 2


def test_a_replay_that_raises_hides_nothing_and_leaves_no_hook() -> None:
    module = Foreign("loss")

    def replay(module: Any, batch: Tensor) -> Tensor:
        module.layers(batch)
        raise KeyError("the replay's own fault")

    with pytest.raises(NonFiniteError, match=r"update 2: the loss .* not finite"):
        build_trainer(callbacks=[FiniteGuard(replay=replay)]).fit(module, ListLoader(foreign_batches({2})))
    report = json.loads(Path("reports/update-000002-nonfinite/report.json").read_text())
    assert report["origin"]["unavailable"].endswith('raised KeyError: "the replay\'s own fault"')
    assert not any(each._forward_hooks for each in module.modules())
    assert not any(each._backward_hooks for each in module.parameters())


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("place", ["attention", "gradient"])
def test_origin_of_a_verdict_that_comes_late(place: str, policy: Any, read_late: Any) -> None:
    """Where the device judges, the report comes during the next update; it is still the right window's."""
    read_late()
    torch.manual_seed(2)
    module, guard, keep = Planted(place, NAN, on_nonfinite=policy), FiniteGuard(), Keep()
    windows = [text_window(number, "last" if number == BAD_UPDATE else None) for number in range(1, 10)]
    trainer = build_trainer(callbacks=[guard, keep])
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=f"update {BAD_UPDATE}: "):
            trainer.fit(module, ListLoader(windows))
        assert same(Keep.state(trainer, module), keep.seen[BAD_UPDATE - 2])
    else:
        trainer.fit(module, ListLoader(windows))
        assert same(keep.seen[BAD_UPDATE - 1], keep.seen[BAD_UPDATE - 2])
        assert trainer.global_step == 9
    report = json.loads(Path(f"reports/update-{BAD_UPDATE:06d}-nonfinite/report.json").read_text())
    (origin,) = report["origin"]
    assert [each["document"] for each in origin["sequences"]] == [DOCUMENT]
    assert (origin["phase"], origin["module"], origin["parameter"]) == EXPECTED[place]
