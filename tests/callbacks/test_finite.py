"""FiniteGuard: planted faults are named by layer, parameter and sequence, and never reach the weights."""

import json
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from safetensors.torch import load_file
from torch import Tensor, nn

from andrea_callbacks import FiniteGuard, NonFiniteError, NonFiniteWarning, PreClipNorm, SpikeForensics
from andrea_callbacks.origin import find_origin, tensors_in
from andrea_callbacks.window import UpdateWindow
from andrea_pl import DynamicPaddingCollator, LanguageModule, TransformerConfig, Window
from andrea_pl import update as module_of_updates
from projects import BoringAdam, TextRows, scaler_plugin
from toy import ListLoader, RowLogger, ToyU, build_trainer, fit, window

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Precision 16-mixed is not supported"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
]
NAN, INF = float("nan"), float("inf")
POISON = 31
SHAPE = TransformerConfig(vocab_size=32, block_size=16, d_model=16, n_heads=2, n_layers=2, dropout=0.1)
BAD_UPDATE, BAD_ROW, DOCUMENT = 4, 2, 777


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

    def _predict_labels(self, micro_batch: Any) -> Any:
        rows = (micro_batch["input_ids"] == POISON).any(1)
        flat = rows[:, None].expand_as(micro_batch["input_ids"]).flatten()[micro_batch["token_index"]]
        self.marked = flat if bool(flat.any()) else None
        logits, labels, places = super()._predict_labels(micro_batch)
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


class Foreign(pl.LightningModule):
    """Automatic optimization, dropout, a scheduler; a batch with a 9 in it has a bad loss or gradient."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.kind = kind
        self.layers = nn.Sequential(nn.Linear(32, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))

    def losses(self, batch: Tensor) -> Tensor:
        out = self.layers(batch)[:, 0].square()
        bad = (batch == 9).any(1)
        if bool(bad.any()) and self.kind == "loss":
            return torch.where(bad, NAN, out)
        if bool(bad.any()):
            out.register_hook(lambda gradient: torch.where(bad & (gradient != 0), INF, gradient))
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.losses(batch).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda index: 1 / (1 + index))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def foreign_batches(bad: set[int], count: int = 112) -> list[Tensor]:
    rows = torch.randn(count, 4, 32, generator=torch.Generator().manual_seed(8))
    for number in bad:
        rows[number - 1, 1, 3] = 9.0
    return list(rows)


REPLAY = pytest.mark.parametrize(
    "replay", [None, lambda module, batch: module.losses(batch)], ids=["", "replay"]
)


@REPLAY
@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_skip_under_automatic_optimization(kind: str, accumulate: int, replay: Any) -> None:
    """The bad update might never have been: weights, moments and schedule are those of a run without it."""
    bad = 3 if accumulate == 1 else 10  # the second micro-batch of update 3
    module, guard = Foreign(kind), FiniteGuard(policy="skip", replay=replay)
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0}
    torch.manual_seed(1)
    trainer = build_trainer(callbacks=[guard, PreClipNorm()], **options)
    trainer.fit(module, ListLoader(foreign_batches({bad})))
    assert guard.flagged == 1
    assert trainer.global_step == 112 // accumulate
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.last_epoch == trainer.global_step - 1
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 / trainer.global_step)
    steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert steps == {trainer.global_step - 1}
    origin = json.loads(Path("reports/update-000003-nonfinite/report.json").read_text())["origin"]
    if replay is None:
        assert "no replay= was given" in origin["unavailable"]
        return
    assert origin[0]["micro_batch"] == (1 if accumulate == 1 else 2)
    assert [each["row"] for each in origin[0]["sequences"]] == [2]
    assert origin[0]["phase"] == ("loss" if kind == "loss" else "backward")
    assert origin[0]["parameter"] == (None if kind == "loss" else "layers.3.bias")


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_raise_under_automatic_optimization(kind: str) -> None:
    module, guard = Foreign(kind), FiniteGuard(replay=lambda module, batch: module.losses(batch))
    before: list[list[Tensor]] = []

    class Before(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            before.append([each.detach().clone() for each in pl_module.parameters()])

    trainer = build_trainer(callbacks=[Before(), guard])
    with pytest.raises(NonFiniteError, match=r"update 3: .* as before it; micro-batch 1 of 1, row 2: "):
        trainer.fit(module, ListLoader(foreign_batches({3})))
    assert all(map(torch.equal, before[2], [each.detach() for each in module.parameters()]))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 / 3)


@pytest.mark.parametrize("fused", [False, True])
def test_skip_three_times_under_a_scaler(fused: bool) -> None:
    """A NaN loss is passed over, a scaler's own overflow is none of the guard's business."""

    class Bad(BoringAdam):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)["loss"]
            return loss * NAN if batch_idx in (2, 3, 4) else loss * (1e36 if batch_idx == 8 else 1.0)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=fused)

    module, guard = Bad(), FiniteGuard(policy="skip")
    trainer = build_trainer(
        callbacks=[guard], plugins=[scaler_plugin()], limit_train_batches=12, limit_val_batches=0
    )
    trainer.fit(module, torch.utils.data.DataLoader(TextRows(), batch_size=2))
    assert guard.flagged == 3
    assert all(torch.isfinite(each).all() for each in module.parameters())
    steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert steps == {8}  # twelve less three of the guard's and one of the scaler's


def test_too_many_in_a_row() -> None:
    for policy in ("skip", "flag"):
        guard = FiniteGuard(policy=policy, max_consecutive=2)  # type: ignore[arg-type]
        with pytest.raises(NonFiniteError, match=r"update 5: .* is not finite, 3 in a row"):
            build_trainer(callbacks=[guard]).fit(Foreign("loss"), ListLoader(foreign_batches({3, 4, 5, 6})))
    guard = FiniteGuard(policy="skip", max_consecutive=2)
    build_trainer(callbacks=[guard]).fit(Foreign("loss"), ListLoader(foreign_batches({3, 4, 6, 7})))
    assert guard.flagged == 4


def test_first_update_skipped_warns_of_no_scheduler() -> None:
    module, guard = Foreign("loss"), FiniteGuard(policy="skip")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = build_trainer(callbacks=[guard])
        trainer.fit(module, ListLoader(foreign_batches({1}, 2)))
    assert not [each for each in caught if "lr_scheduler.step" in str(each.message)]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1


def test_poisoned_weight_is_found_in_a_foreign_project() -> None:
    class Spoil(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                with torch.no_grad():
                    pl_module.unused[1] = NAN

    class WithUnused(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(3))

        def step(self, batch: Any) -> Tensor:
            return super().step(batch) + 0.0 * self.unused[0]

    trainer = build_trainer(callbacks=[Spoil(), FiniteGuard(state_every=4)], limit_val_batches=0)
    with pytest.raises(NonFiniteError, match="update 8: unused is not finite"):
        trainer.fit(WithUnused())


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


def test_micro_batch_of_a_bad_loss_is_named_without_a_replay() -> None:
    guard = FiniteGuard()
    trainer = build_trainer(callbacks=[guard], accumulate_grad_batches=4)
    with pytest.raises(NonFiniteError, match="update 3: the loss of micro-batch 2 of 4 is not finite"):
        trainer.fit(Foreign("loss"), ListLoader(foreign_batches({10})))


def test_module_without_sequences_has_its_micro_batch_named() -> None:
    """`loss_sum` tells micro-batches apart, and no sequences."""
    guard = FiniteGuard()
    bad = Window([torch.tensor([0]), (torch.tensor([1, 1]), NAN)])
    with pytest.raises(NonFiniteError, match="micro-batch 2 of 2"):
        fit(ToyU(), [window([0]), bad], callbacks=[guard])
    origin = json.loads(Path("reports/update-000002-nonfinite/report.json").read_text())["origin"][0]
    assert (origin["micro_batch"], origin["sequences"], origin["phase"]) == (2, [], "loss")


def test_a_bad_update_leaves_the_statistics_alone() -> None:
    """After a NaN the next 100 clean updates are neither skipped nor flagged, and a later spike still is."""
    windows: list[Any] = [window([0, 1, 1], [1, 0]) for _ in range(130)]
    windows[20] = Window([(torch.tensor([0]), NAN)])
    windows[125] = Window([(torch.tensor([0] * 3), 40.0)])
    guard, spikes = FiniteGuard(), SpikeForensics()
    build = lambda parameters: torch.optim.SGD(parameters, lr=1e-4)  # noqa: E731
    module = ToyU(on_nonfinite="skip", build=build)
    trainer, _ = fit(module, windows, callbacks=[guard, spikes, PreClipNorm()], logger=RowLogger())
    assert guard.flagged == 1
    assert module.updates_skipped == 1
    assert spikes.spikes == 1
    assert Path("reports/update-000126-spike/report.json").exists()
    assert trainer.global_step == 130


@pytest.mark.parametrize("gradient", [[1.0, INF, 2.0, 3.0], [1e20] * 4])
def test_norms_beyond_float32_are_told_from_infinity(gradient: list[float]) -> None:
    """pytorch#46849, #53843, under automatic optimization: Inf is flagged, 1e20 four times is 2e20."""

    class Given(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.w.sum()
            self.w.register_hook(lambda _: torch.tensor(gradient))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module, logger = Given(), RowLogger()
    trainer = build_trainer(callbacks=[PreClipNorm(), FiniteGuard()], logger=logger)
    if INF in gradient:
        with pytest.raises(NonFiniteError, match="update 1: the gradient of w is not finite"):
            trainer.fit(module, ListLoader([torch.zeros(1)]))
        assert torch.equal(module.w.detach(), torch.zeros(4))
    else:
        trainer.fit(module, ListLoader([torch.zeros(1)]))
        assert logger.series("train/grad_norm") == [(1, pytest.approx(2e20, rel=1e-6))]


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("place", ["attention", "gradient"])
def test_origin_of_a_verdict_that_comes_late(
    place: str, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device judges, the report comes during the next update; it is still the right window's."""
    monkeypatch.setattr(module_of_updates, "_judges_by_itself", lambda device: True)
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
