"""Resume in projects that know nothing of ours: ExactResume beside Lightning's own ModelCheckpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from andrea_callbacks import ExactResume
from andrea_callbacks.numerics.rng_state import RandomState
from andrea_pl import Window
from tests.support.projects import TextRows
from tests.support.toy import ToyU, build_trainer

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


class Project(BoringModel):
    """Somebody's module: dropout, automatic optimization, one scheduler."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.nn.functional.dropout(x, 0.5, self.training))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Counted:
    """A loader that goes on in the middle of an epoch."""

    def __init__(self) -> None:
        self.rows = TextRows(24)
        self.delivered = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Tensor]:
        start = 0 if self.delivered == 6 else self.delivered
        for number in range(start, 6):
            self.delivered = number + 1
            yield torch.stack([self.rows[4 * number + at] for at in range(4)])

    def state_dict(self) -> dict[str, Any]:
        return {"delivered": self.delivered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.delivered = state["delivered"]


class Validations(pl.Callback):
    """Keeps when validation ran."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.steps.append(trainer.global_step)


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", 1024.0, growth_interval=3))


def run(
    folder: Path,
    loader: Callable[[], Any],
    resume: Path | None = None,
    exact: bool = True,
    save: dict[str, Any] | None = None,
    more: list[pl.Callback] | None = None,
    **options: Any,
) -> tuple[dict[str, Any], list[int]]:
    """Train, saving all the way; return the checkpoint of the end, and when validation ran."""
    pl.seed_everything(1 if resume is None else 2, verbose=False)
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, **(save or {}))
    seen = Validations()
    callbacks = [seen, saving, *([ExactResume()] if exact else []), *(more or [])]
    trainer = build_trainer(callbacks=callbacks, enable_checkpointing=True, **({"max_epochs": 4} | options))
    validation = DataLoader(TextRows(8), batch_size=4)
    trainer.fit(Project(), loader(), validation, ckpt_path=resume)
    trainer.save_checkpoint(folder / "end.ckpt")
    return torch.load(folder / "end.ckpt", weights_only=True), seen.steps


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Say whether weights, moments and loss scale are equal, bit for bit."""

    def parts(checkpoint: dict[str, Any]) -> list[Tensor]:
        moments = checkpoint["optimizer_states"][0]["state"].values()
        kept = [
            *checkpoint["state_dict"].values(),
            *(each[name] for each in moments for name in sorted(each)),
        ]
        scale = checkpoint.get("MixedPrecision", {}).get("scale", 0.0)
        return [*kept, torch.tensor([scale, checkpoint["lr_schedulers"][0]["last_epoch"]])]

    return all(torch.equal(here, there) for here, there in zip(parts(ours), parts(theirs), strict=True))


def shuffled() -> DataLoader[Tensor]:
    return DataLoader(TextRows(24), batch_size=4, shuffle=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {"plugins": scaled}, {"max_steps": 20}],
    ids=["plain", "accumulating", "scaled", "by steps"],
)
def test_at_the_end_of_an_epoch_with_any_loader(tmp_path: Path, options: dict[str, Any]) -> None:
    """Order and dropout come from torch's global generator, which Lightning does not save."""

    def settings() -> dict[str, Any]:
        return {key: [value()] if callable(value) else value for key, value in options.items()}

    straight, _ = run(tmp_path / "straight", shuffled, **settings())
    files = sorted((tmp_path / "straight").glob("step=*.ckpt"), key=lambda file: int(file.stem[5:]))
    for file in files[:3]:
        exact, _ = run(tmp_path / "exact", shuffled, resume=file, **settings())
        assert same(exact, straight), file.name
    control, _ = run(tmp_path / "control", shuffled, resume=files[1], exact=False, **settings())
    assert not same(control, straight)


@pytest.mark.system
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_in_the_middle_of_an_epoch_with_a_loader_that_can(tmp_path: Path, accumulate: int) -> None:
    """Every step, of six batches an epoch; validations that were due are made up for, none is repeated."""
    options: dict[str, Any] = {
        "accumulate_grad_batches": accumulate,
        "val_check_interval": 3,
        "save": {"every_n_train_steps": 1},
    }
    straight, steps = run(tmp_path / "straight", Counted, **options)
    files = list((tmp_path / "straight").glob("step=*.ckpt"))
    assert len(files) >= 8
    for file in files:
        step = int(file.stem[5:])
        exact, later = run(tmp_path / "exact", Counted, resume=file, **options)
        assert same(exact, straight), file.name
        assert later in ([each for each in steps if each >= step], [each for each in steps if each > step])


class Interrupted(pl.Callback):
    """Saves in the middle of a validation, and breaks it off."""

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6 and not trainer.sanity_checking:
            trainer.save_checkpoint("broken.ckpt")
            raise KeyboardInterrupt


def test_a_validation_that_draws_is_run_again(tmp_path: Path) -> None:
    """A plain DataLoader draws a seed when it begins; the run begins it once."""
    options: dict[str, Any] = {"val_check_interval": 3, "max_epochs": 2}
    straight, _ = run(tmp_path / "straight", Counted, **options)
    with pytest.raises(SystemExit):
        run(tmp_path / "broken", Counted, more=[Interrupted()], **options)
    exact, steps = run(tmp_path / "exact", Counted, resume=Path("broken.ckpt"), **options)
    assert same(exact, straight)
    assert steps == [6, 9, 12]


def test_states_of_generators_as_plain_values(tmp_path: Path) -> None:
    """They pass through a checkpoint, and what is drawn afterwards is the same."""
    import random

    import numpy as np

    def draw() -> list[Any]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            torch.rand(3).tolist(),
        ]

    draw()
    torch.save(RandomState(torch.device("cpu")).state_dict(), tmp_path / "state")
    wanted = draw()
    state = torch.load(tmp_path / "state", weights_only=True)
    RandomState.from_state_dict(state, torch.device("cpu")).restore()
    assert draw() == wanted


class Unfreezing(BaseFinetuning):
    """Trains block 0 from epoch 1 on, as Lightning's page on finetuning has it."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks[0], train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[0], optimizer, lr=0.05)


def blocks() -> nn.ModuleList:
    torch.manual_seed(4)
    first = nn.Sequential(nn.Linear(32, 4), nn.BatchNorm1d(4))
    return nn.ModuleList([first, nn.Linear(4, 2)])


class PlainBlocks(BoringModel):
    """Somebody's module of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()  # type: ignore[assignment]
        self.blocks = blocks()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.05)


class WeightedBlocks(ToyU):
    """The same as token-weighted updates; a micro-batch is rows."""

    def __init__(self) -> None:
        super().__init__(
            lambda parameters: torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.05)
        )
        self.b.requires_grad_(False)
        self.blocks = blocks()

    def count_tokens(self, micro_batch: Tensor) -> int:
        return len(micro_batch)

    def loss_sum(self, micro_batch: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](micro_batch)).square().sum()


class CountedWindows(Counted):
    """The rows in windows of one micro-batch."""

    def __iter__(self) -> Iterator[Any]:
        return (Window([rows]) for rows in super().__iter__())


UNFREEZING: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], Any]]] = {
    "plain": (PlainBlocks, Counted),
    "token-weighted": (WeightedBlocks, CountedWindows),
}


def unfreeze(kind: str, folder: Path, resume: Path | None = None, **options: Any) -> Any:
    """Train three epochs of six updates, saving every update; return module and files by update."""
    build, loader = UNFREEZING[kind]
    module: Any = build()
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    callbacks = [Unfreezing(), saving, ExactResume()]
    trainer = build_trainer(callbacks=callbacks, enable_checkpointing=True, max_epochs=3)
    trainer.fit(module, loader(), ckpt_path=resume, **options)
    return module


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual")
@pytest.mark.parametrize("kind", UNFREEZING)
class TestUnfreezing:
    """Lightning#21901: what a callback has unfrozen goes on training after a resume."""

    @pytest.mark.system
    def test_weights_are_equal(self, tmp_path: Path, kind: str, caplog: Any) -> None:
        """Before the epoch, at its start, within it and after it; batch norm tracks its means again too."""
        straight = unfreeze(kind, tmp_path / "straight")
        for step in (3, 6, 7, 9, 15):
            caplog.clear()
            with caplog.at_level("INFO", "lightning.pytorch"):
                module = unfreeze(kind, tmp_path / "exact", tmp_path / "straight" / f"step={step}.ckpt")
            said = "blocks.0.0.weight (trained)" in caplog.text
            assert said == (step > 6), step
            for name, each in straight.state_dict().items():
                assert float((each - module.state_dict()[name]).abs().max()) == 0.0, (step, name)

    def test_a_checkpoint_that_does_not_know(self, tmp_path: Path, kind: str) -> None:
        """An old one loads, and changes nothing: block 0 stays as it is frozen."""
        unfreeze(kind, tmp_path / "straight")
        checkpoint = torch.load(tmp_path / "straight" / "step=9.ckpt", weights_only=True)
        kept = checkpoint["state_dict"]["blocks.0.0.weight"]
        del checkpoint["andrea_resume"]["trained"]
        torch.save(checkpoint, tmp_path / "old.ckpt")
        module = unfreeze(kind, tmp_path / "old", tmp_path / "old.ckpt")
        assert torch.equal(module.blocks[0][0].weight, kept)

    def test_frozen_by_hand(self, tmp_path: Path, kind: str) -> None:
        """The other way round, and by no callback that keeps a state: what was frozen late stays frozen."""

        class Freezes(pl.Callback):
            def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
                if trainer.current_epoch == 1:
                    pl_module.blocks[1].requires_grad_(False)

        build, loader = UNFREEZING[kind]

        def fit(resume: Path | None = None) -> Any:
            module: Any = build()
            saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
            trainer = build_trainer(
                callbacks=[Freezes(), saving, ExactResume()], enable_checkpointing=True, max_epochs=2
            )
            trainer.fit(module, loader(), ckpt_path=resume)
            return module

        straight = fit()
        resumed = fit(tmp_path / "step=9.ckpt")
        for name, each in straight.state_dict().items():
            assert float((each - resumed.state_dict()[name]).abs().max()) == 0.0, name
