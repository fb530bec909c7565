"""Checkpoints beside callbacks that replace the weights: averages in validation and at the end of a run."""

import copy
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn

from andrea_callbacks import ExactResume, RunReport
from andrea_pl import DurableCheckpoint
from andrea_pl.runs.checkpoint_io import read_checkpoint
from andrea_pl.runs.fingerprint import fingerprint
from andrea_pl.runs.manifest import fault_of, newest_valid
from andrea_pl.runs.signals import StoppedBySignal
from tests.support.runs import Windows
from tests.support.toy import ListLoader, ToyU, build_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended", "ignore:SWA is currently only supported"
)

DECAY = 0.5


class Module(ToyU):
    """Logs what validation sees of the weights."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=rate))
        self.validated: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.b.detach().clone())
        self.log("score", self.b.detach()[0], batch_size=1)


class ForeignEMA(pl.Callback):
    """An average of another project's making: swaps `.data` from the start of validation to its end."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, each in pl_module.named_parameters():
            before = self.average.get(name, each.detach())
            self.average[name] = DECAY * before + (1 - DECAY) * each.detach()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        for name, each in pl_module.named_parameters() if self.average else []:
            self.kept[name] = each.data
            each.data = self.average[name].clone()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        for name, each in pl_module.named_parameters() if self.kept else []:
            each.data = self.kept.pop(name)

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self.average)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = dict(state_dict["average"])


class LateEMA(ForeignEMA):
    """One that puts the weights back when training goes on."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pass

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_validation_end(trainer, pl_module)


class OwnEMA(Module):
    """A module that keeps its average itself, and puts its weights back in its own last hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(2))
        self.kept: Tensor | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.lerp_(self.b.detach(), 1 - DECAY)

    def on_validation_epoch_start(self) -> None:
        self.kept = self.b.detach().clone()
        self.b.data.copy_(self.average)

    def on_validation_end(self) -> None:
        assert self.kept is not None
        self.b.data.copy_(self.kept)


class Told(pl.Callback):
    """Sends SIGTERM once, within a validation."""

    def __init__(self, update: int, sanity: bool = False) -> None:
        self.update = update
        self.sanity = sanity
        self.is_sent = False

    def on_validation_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        if not self.is_sent and trainer.global_step == self.update and trainer.sanity_checking == self.sanity:
            self.is_sent = True  # a second one ends the process
            signal.raise_signal(signal.SIGTERM)


AVERAGES: dict[str, Any] = {
    "Lightning's": (lambda: [EMAWeightAveraging(decay=DECAY)], Module),
    "foreign": (lambda: [ForeignEMA()], Module),
    "late": (lambda: [LateEMA()], Module),
    "two": (lambda: [EMAWeightAveraging(decay=DECAY), ForeignEMA()], Module),
    "the module's": (list, OwnEMA),
    "none": (list, Module),
}
LATE = ("late", "the module's")


class Run:
    """A fit with a validation every two updates, in a folder."""

    def __init__(
        self, folder: Path, kind: str, told: Told | None = None, resume: Path | None = None, **options: Any
    ) -> None:
        callbacks, build = AVERAGES[kind]
        self.saving = DurableCheckpoint(**({"minutes": None, "dirpath": str(folder), "keep": 0} | options))
        others = [DurableCheckpoint(minutes=None, dirpath=f"{folder}-b", name="b")] if kind == "two" else []
        self.module = build()
        self.trainer = build_trainer(
            callbacks=[*others, self.saving, *callbacks(), *([told] if told else [])],
            enable_checkpointing=True,
            val_check_interval=2,
            num_sanity_val_steps=1,
        )
        self.stopped: StoppedBySignal | None = None
        try:
            self.trainer.fit(self.module, Windows(), ListLoader([torch.tensor([0])] * 3), ckpt_path=resume)
        except StoppedBySignal as stop:
            self.stopped = stop

    @property
    def weights(self) -> Tensor:
        """What training came to."""
        kept = read_checkpoint(self.last)
        return kept.get("current_model_state", kept["state_dict"])["b"]

    @property
    def last(self) -> Path:
        assert self.saving.last_path is not None
        return Path(self.saving.last_path)


class TestSignals:
    """nequip#590: a signal within a validation that other weights are validated in."""

    @pytest.mark.parametrize("kind", AVERAGES)
    def test_the_resumed_run_equals_the_undisturbed_one(self, tmp_path: Path, kind: str) -> None:
        straight = Run(tmp_path / "straight", kind)
        first = Run(tmp_path / "cut", kind, Told(4))
        assert first.stopped is not None
        resumed = Run(tmp_path / "cut", kind, resume=first.last)
        assert float((resumed.weights - straight.weights).abs().max()) == 0.0
        assert torch.equal(resumed.module.b, straight.module.b)
        assert first.stopped.update == (5 if kind in LATE else 4)
        assert len(first.module.validated) == 1 + 3 + (1 if kind == "none" else 3)

    @pytest.mark.parametrize("kind", ["Lightning's", "foreign", "none"])
    def test_the_checkpoint_that_was_resumed_from_stays(self, tmp_path: Path, kind: str) -> None:
        """A second signal, within the validation that is made up for; its file was saved between updates."""

        class Early(pl.Callback):
            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step == 3:
                    signal.raise_signal(signal.SIGTERM)

        straight = Run(tmp_path / "straight", kind)
        early: Any = Early()
        first = Run(tmp_path / "cut", kind, early)
        assert first.stopped is not None
        before = read_checkpoint(first.last)
        again = Run(tmp_path / "cut", kind, Told(4), first.last)
        assert again.stopped is not None
        assert again.last == first.last
        after = read_checkpoint(again.last)
        for key in {"state_dict", "current_model_state"} & before.keys():
            assert torch.equal(after[key]["b"], before[key]["b"])
        assert after["andrea_resume"]["place"] == ("validation" if kind == "none" else "validated")
        resumed = Run(tmp_path / "cut", kind, resume=again.last)
        assert float((resumed.weights - straight.weights).abs().max()) == 0.0

    @pytest.mark.filterwarnings("ignore:.*sigterm")
    def test_during_the_sanity_check(self, tmp_path: Path) -> None:
        """Lightning takes that signal; the run stops after its first update, with its own weights."""
        straight = Run(tmp_path / "straight", "foreign")
        first = Run(tmp_path / "cut", "foreign", Told(0, sanity=True))
        assert first.stopped is not None
        assert first.stopped.update == 1
        resumed = Run(tmp_path / "cut", "foreign", resume=first.last)
        assert float((resumed.weights - straight.weights).abs().max()) == 0.0


@pytest.mark.parametrize("kind", AVERAGES)
def test_the_best_holds_the_weights_of_training(tmp_path: Path, kind: str) -> None:
    """The score is that of the average; where the module is late to put them back, that is said."""
    if kind in LATE:
        with pytest.warns(
            UserWarning, match="update 2 is the best so far, and is not saved: the weights were"
        ):
            Run(tmp_path / "late", kind, monitor="score")
        return
    run = Run(tmp_path / "best", kind, monitor="score", every=1, mode="max")
    best = read_checkpoint(run.saving.best_model_path)
    weights = best.get("current_model_state", best["state_dict"])["b"]
    recorded = Recorded()
    module = Module()
    build_trainer(callbacks=[recorded]).fit(module, Windows())
    assert torch.equal(weights, recorded.weights[best["global_step"] - 1])


class Recorded(pl.Callback):
    """Keeps the weights after every update."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.weights.append(pl_module.b.detach().clone())


def test_a_module_that_clips_its_weights_last(tmp_path: Path) -> None:
    """What is done in the module's own hook, after all callbacks, is no replacement: the best is saved."""

    class Clips(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            self.b.data.clamp_(-0.01, 0.01)

    saving = DurableCheckpoint(monitor="score", minutes=None, dirpath=str(tmp_path))
    trainer = build_trainer(callbacks=[saving], enable_checkpointing=True, val_check_interval=2)
    trainer.fit(Clips(), Windows(), ListLoader([torch.tensor([0])]))
    assert saving.best


class Normed(pl.LightningModule):
    """A plain module with batch norm, for which SWA adds an epoch without updates."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(2))
        self.norm = nn.BatchNorm1d(2, affine=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = torch.arange(6.0).view(3, 2) * batch_idx
        return (self.norm(noise) * self.b - noise).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class TestTheEnd:
    """Lightning#6074: SWA's average is in no checkpoint."""

    def averaged(
        self, folder: Path, callbacks: list[Any], build: Any = Module, epochs: int = 4, **options: Any
    ) -> tuple[DurableCheckpoint, Any, Recorded]:
        saving = DurableCheckpoint(minutes=None, dirpath=str(folder))
        recorded, module = Recorded(), build()
        trainer = build_trainer(
            callbacks=[recorded, *callbacks, ExactResume(), saving],
            enable_checkpointing=True,
            max_epochs=epochs,
        )
        trainer.fit(module, Windows(), **options)
        return saving, module, recorded

    def test_stochastic_weight_averaging(self, tmp_path: Path, caplog: Any) -> None:
        """The mean of the weights before the last two epochs, by hand; a resume continues from the others."""
        average = StochasticWeightAveraging(0.05, swa_epoch_start=3, annealing_epochs=1)
        with caplog.at_level("INFO", "lightning.pytorch"):
            saving, module, recorded = self.averaged(tmp_path, [average, RunReport()])
        final = tmp_path / "final-000040.ckpt"
        kept = read_checkpoint(final)
        mean = (recorded.weights[19].double() + recorded.weights[29].double()) / 2
        torch.testing.assert_close(kept["state_dict"]["b"].double(), mean, rtol=1e-6, atol=1e-7)
        assert torch.equal(kept["state_dict"]["b"], module.b)
        assert "optimizer_states" not in kept
        assert fault_of(final) is None
        found = newest_valid(tmp_path)
        assert (found.path.name, found.passed_over) == ("update-000040.ckpt", [])
        assert torch.equal(read_checkpoint(found.path)["state_dict"]["b"], recorded.weights[39])
        assert saving.last_path == str(found.path)
        assert f"{final} holds the weights that the run ends with" in caplog.text
        assert f"{found.path} holds those of training" in caplog.text
        assert f"checkpoint: {final}" in caplog.text

    def test_averaging_with_batch_norm(self, tmp_path: Path) -> None:
        """The average is in place for one more epoch, whose only update Lightning counts: it is the last
        checkpoint's. The one before it has the weights of training."""
        average = StochasticWeightAveraging(0.05, swa_epoch_start=3, annealing_epochs=1)
        saving, module, recorded = self.averaged(tmp_path, [average], Normed)
        assert torch.equal(read_checkpoint(str(saving.last_path))["state_dict"]["b"], module.b)
        kept = read_checkpoint(tmp_path / "update-000040.ckpt")
        assert torch.equal(kept["state_dict"]["b"], recorded.weights[39])

    def test_an_average_that_the_checkpoint_has(self, tmp_path: Path) -> None:
        """Lightning's EMA puts it under `state_dict`, and the weights of training beside it."""
        saving, module, recorded = self.averaged(tmp_path, [EMAWeightAveraging(decay=DECAY)], epochs=1)
        assert [each.name for each in tmp_path.glob("*.ckpt")] == ["update-000010.ckpt"]
        kept = read_checkpoint(str(saving.last_path))
        assert torch.equal(kept["state_dict"]["b"], module.b)
        assert torch.equal(kept["current_model_state"]["b"], recorded.weights[-1])

    def test_an_average_of_the_modules_own(self, tmp_path: Path) -> None:
        """Put in place after all callbacks."""

        class Ends(OwnEMA):
            def on_train_end(self) -> None:
                self.b.data.copy_(self.average)

        _, module, recorded = self.averaged(tmp_path, [], Ends, epochs=1)
        assert torch.equal(read_checkpoint(tmp_path / "final-000010.ckpt")["state_dict"]["b"], module.average)
        kept = read_checkpoint(tmp_path / "update-000010.ckpt")
        assert torch.equal(kept["state_dict"]["b"], recorded.weights[-1])

    def test_one_final_file_is_kept(self, tmp_path: Path) -> None:
        """A longer run replaces it when it ends; going back moves it aside with what is later."""

        class Halves(pl.Callback):
            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                pl_module.b.data.mul_(0.5)

        def names() -> list[str]:
            return sorted(each.stem for each in tmp_path.glob("*.ckpt"))

        self.averaged(tmp_path, [Halves()], epochs=1)
        assert names() == ["final-000010", "update-000010"]
        self.averaged(tmp_path, [Halves()], epochs=3, ckpt_path=tmp_path / "update-000010.ckpt")
        assert names() == ["final-000030", "update-000010", "update-000030"]
        self.averaged(tmp_path, [Halves()], epochs=2, ckpt_path=tmp_path / "update-000010.ckpt")
        assert names() == ["final-000020", "update-000010", "update-000020"]
        aside = tmp_path / "earlier-1"
        assert sorted(each.stem for each in aside.glob("*.ckpt")) == ["final-000030", "update-000030"]

    def test_nothing_where_nothing_is_replaced(self, tmp_path: Path) -> None:
        trainer = self.averaged(tmp_path, [], epochs=1)[0]
        assert [each.name for each in tmp_path.glob("*.ckpt")] == ["update-000010.ckpt"]
        assert trainer.last_path == f"{tmp_path}/update-000010.ckpt"


def test_callbacks_are_those_of_the_user_again(tmp_path: Path) -> None:
    """After a fit, and after one that failed."""

    class Fails(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise RuntimeError("stop")

    for more in ([], [Fails()]):
        trainer = build_trainer(
            callbacks=[*more, ExactResume(), DurableCheckpoint(dirpath=str(tmp_path))],
            enable_checkpointing=True,
        )
        before = list(trainer.callbacks)
        try:
            trainer.fit(Normed(), Windows())
        except RuntimeError:
            assert more
        assert trainer.callbacks == before


class TestFingerprint:
    def test_is_of_bits(self) -> None:
        """Of every kind of number; a NaN equals itself, and a negative zero is no zero."""
        for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64):
            module = nn.ParameterList([nn.Parameter(torch.tensor([1.0, float("nan"), 3.0]).to(kind))])
            module.append(nn.Parameter(torch.empty(0)))
            before = fingerprint(module)
            assert before == fingerprint(copy.deepcopy(module))
            with torch.no_grad():
                module[0][2] = torch.nextafter(torch.tensor(3.0), torch.tensor(4.0)) if kind.is_complex else 5
            assert before != fingerprint(module)
        zeros = [fingerprint(nn.ParameterList([torch.full((2,), value)])) for value in (0.0, -0.0)]
        assert zeros[0] != zeros[1]
