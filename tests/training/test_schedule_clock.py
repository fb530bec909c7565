"""When schedulers move: their own settings, schedulers of other people's making, resumes, new groups.

Every test that stands for a public report names it.
"""

import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.optim import lr_scheduler as schedulers
from transformers.optimization import Adafactor, AdafactorSchedule

from andrea_callbacks import EpochSummary, RunJournal, TensorBoardLayout, UpdateProgressBar
from andrea_pl import ClipSingleDeviceStrategy, LanguageModule, TransformerConfig, UserError, Window
from andrea_pl.optim import build_optimizer, build_scheduler
from andrea_pl.optim.schedules import FactorLR
from tests.support.runs import Rates, Saves, language, rates, tokens
from tests.support.toy import NAN, A, B, ListLoader, RowLogger, ToyU, build_trainer, fit, window

BAD = Window([(torch.tensor(A), NAN)])
SHAPE = TransformerConfig(vocab_size=11, block_size=4, d_model=8, n_heads=2, n_layers=1)

pytestmark = pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch"
)
skips_quietly = pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning")


class Configured(ToyU):
    """Toy U whose `configure_optimizers` returns what it is told to, made of an optimizer at rate 1."""

    def __init__(self, returned: Any, **options: Any) -> None:
        super().__init__(**options)
        self.returned = returned

    def configure_optimizers(self) -> Any:
        return self.returned(torch.optim.SGD(self.parameters(), lr=1.0))


def stepping(**terms: Any) -> Any:
    """Return a configuration of a scheduler that divides the rate by ten, with these terms."""
    return lambda optimizer: {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": schedulers.StepLR(optimizer, 1, gamma=0.1), **terms},
    }


class TestTerms:
    """Lightning#17738: what the user wrote of interval and frequency is honoured."""

    @pytest.mark.parametrize(
        ("terms", "expected"),
        [
            ({"interval": "epoch"}, [1, 1, 1, 0.1, 0.1, 0.1]),
            ({"interval": "epoch", "frequency": 2}, [1] * 6),
            ({"frequency": 3}, [1, 1, 1, 0.1, 0.1, 0.1]),
            ({"interval": "step", "frequency": 2, "name": "rate"}, [1, 1, 0.1, 0.1, 0.01, 0.01]),
            ({}, [1, 0.1, 1e-2, 1e-3, 1e-4, 1e-5]),
            ({"strict": True, "monitor": None}, [1, 0.1, 1e-2, 1e-3, 1e-4, 1e-5]),
        ],
    )
    def test_interval_and_frequency(self, terms: dict[str, Any], expected: list[float]) -> None:
        found = rates(Configured(stepping(**terms)), [window(A, B)] * 3, max_epochs=2)
        assert found == pytest.approx(expected)

    @pytest.mark.parametrize(
        "returned",
        [
            lambda o: ([o], [{"scheduler": schedulers.StepLR(o, 1, gamma=0.1), "interval": "epoch"}]),
            lambda o: ([o], {"scheduler": schedulers.StepLR(o, 1, gamma=0.1), "interval": "epoch"}),
            lambda o: [stepping(interval="epoch")(o)],
        ],
        ids=["two lists", "a list and a dict", "a list of dicts"],
    )
    def test_other_ways_to_return_it(self, returned: Any) -> None:
        found = rates(Configured(returned), [window(A, B)] * 3, max_epochs=2)
        assert found == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1])

    def test_no_interval_means_every_update_and_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        """Lightning's own default, "epoch", cannot be told from what was written; LearningRateMonitor can."""
        logger = RowLogger()
        with caplog.at_level(logging.INFO):
            bare = Configured(lambda o: ([o], [schedulers.StepLR(o, 1, gamma=0.1)]))
            monitor = LearningRateMonitor()
            found = rates(
                bare, [window(A)] * 3, max_epochs=2, logger=logger, callbacks=[monitor], log_every_n_steps=1
            )
        assert found == pytest.approx([1, 0.1, 1e-2, 1e-3, 1e-4, 1e-5])
        assert sum("StepLR moves after every update" in each.message for each in caplog.records) == 1
        assert len(logger.series("lr-SGD")) == 6

    @skips_quietly
    @pytest.mark.parametrize("defers", [False, True])
    def test_frequency_counts_updates_that_changed_weights(self, defers: bool, read_late: Any) -> None:
        read_late(defers)

        def returned(optimizer: Any) -> Any:
            return stepping(frequency=2)(optimizer)

        class Fused(Configured):
            def configure_optimizers(self) -> Any:
                return returned(torch.optim.AdamW(self.parameters(), lr=1.0, fused=True))

        module = Fused(None, on_nonfinite="skip")
        windows = [window(A, B), BAD, window(B), BAD, BAD, window(A), window(A, B), window(B)]
        found = rates(module, windows, strategy=ClipSingleDeviceStrategy())
        assert found == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.1, 0.01])
        assert module.lr_schedulers().last_epoch == 2

    @pytest.mark.parametrize(
        ("terms", "message"),
        [
            ({"interval": "steps"}, r"interval of StepLR must be \"step\" or \"epoch\", got 'steps'"),
            ({"frequency": 0}, "frequency of StepLR must be a whole number of at least 1, got 0"),
            ({"freqency": 2}, r"unknown keys \['freqency'\]"),
        ],
    )
    def test_terms_without_a_meaning(self, terms: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            rates(Configured(stepping(**terms)), [window(A)])

    def test_the_module_is_as_before_after_the_call(self) -> None:
        """An own configure_optimizers on the instance, as LightningCLI's, is asked and comes back."""
        module = ToyU()
        module.configure_optimizers = lambda: stepping(interval="epoch")(  # type: ignore[method-assign]
            torch.optim.SGD(module.parameters(), lr=1.0)
        )
        kept = vars(module)["configure_optimizers"]
        for _ in range(2):
            assert rates(module, [window(A)] * 2, max_epochs=2) == pytest.approx([1, 1, 0.1, 0.1])
            assert vars(module)["configure_optimizers"] is kept
        plain = ToyU()
        fit(plain, [window(A)])
        assert "configure_optimizers" not in vars(plain)

    def test_a_fit_that_ends_before_the_call(self) -> None:
        class Stops(pl.Callback):
            def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
                trainer.strategy.setup = None  # raises before the optimizers are asked for

        module = Configured(stepping(interval="epoch"))
        with pytest.raises(TypeError):
            fit(module, [window(A)], callbacks=[Stops()])
        assert rates(module, [window(A)] * 2, max_epochs=2) == pytest.approx([1, 1, 0.1, 0.1])

    def test_a_setup_that_does_not_call_ours(self) -> None:
        class Forgets(Configured):
            def setup(self, stage: str) -> None:
                pass

        with pytest.warns(UserWarning, match=r"call super\(\)\.setup\(stage\) in Forgets\.setup"):
            found = rates(Forgets(stepping(interval="epoch")), [window(A)] * 3)
        assert found == pytest.approx([1, 0.1, 0.01])
        with (
            pytest.warns(UserWarning, match="call super"),
            pytest.warns(RuntimeWarning, match="the keys will be ignored"),
            pytest.raises(UserError, match="which one is not known here"),
        ):
            rates(Forgets(plateau(monitor="x")), [window(A)])

    @pytest.mark.parametrize("saves", ["at batches", "at epochs", "before the module"])
    @pytest.mark.parametrize("bare", [False, True], ids=["", "without ExactResume"])
    def test_resume_around_the_end_of_an_epoch(self, tmp_path: Path, saves: str, bare: bool) -> None:
        """The move at the end of an epoch is neither lost nor made twice."""

        class Module(Configured):
            def configure_callbacks(self) -> Any:
                return [] if bare else super().configure_callbacks()

        saving: Any = {
            "at batches": Saves(tmp_path),
            "before the module": Saves(tmp_path, "on_train_epoch_end"),
            "at epochs": ModelCheckpoint(
                tmp_path, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True
            ),
        }[saves]
        straight = rates(
            Module(stepping(interval="epoch")), [window(A)] * 2, max_epochs=3, callbacks=[saving]
        )
        assert straight == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
        for cut in (2, 4):
            resumed = Module(stepping(interval="epoch"))
            found = rates(resumed, [window(A)] * 2, tmp_path / f"step={cut}.ckpt", max_epochs=3)
            assert found == pytest.approx(straight[cut:])

    def test_a_checkpoint_of_an_earlier_version(self, tmp_path: Path) -> None:
        """It knows of no epochs that moved the schedule, and goes on by the trainer's."""
        rates(Configured(stepping(interval="epoch")), [window(A)] * 2, callbacks=[Saves(tmp_path, at=2)])
        kept = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
        del kept["andrea_updates"]["schedule"]
        torch.save(kept, tmp_path / "old.ckpt")
        found = rates(
            Configured(stepping(interval="epoch")), [window(A)] * 2, tmp_path / "old.ckpt", max_epochs=3
        )
        assert found == pytest.approx([0.1, 0.1, 0.01, 0.01])

    def test_an_epoch_that_max_steps_breaks_off_does_not_count(self) -> None:
        module = Configured(stepping(interval="epoch"))
        trainer, _ = fit(module, [window(A)] * 4, max_steps=2)
        assert trainer.optimizers[0].param_groups[0]["lr"] == 1.0

    def test_a_stream_has_epochs_too(self) -> None:
        class Stream:
            def __iter__(self) -> Any:
                return iter([window(A)] * 2)

        found = rates(Configured(stepping(interval="epoch")), Stream(), max_epochs=2)
        assert found == pytest.approx([1, 1, 0.1, 0.1])


def plateau(**terms: Any) -> Any:
    """Return a configuration of ReduceLROnPlateau that divides the rate by ten once nothing improves."""
    return lambda optimizer: {
        "optimizer": optimizer,
        "lr_scheduler": {
            "scheduler": schedulers.ReduceLROnPlateau(optimizer, factor=0.1, patience=0),
            **terms,
        },
    }


class Validates(Configured):
    """Logs a metric that improves once, then no more."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", 2.0 if self.trainer.current_epoch == 0 else 1.0, batch_size=1)


class TestPlateau:
    """Lightning#17738, ReduceLROnPlateau: it steps on its `monitor`."""

    EXPECTED = (1, 1, 1, 1, 1, 1, 0.1, 0.1)

    def run(self, module: Any, epochs: int = 4, **options: Any) -> list[float]:
        validation = ListLoader([torch.zeros(1)])
        return rates(module, [window(A)] * 2, validation=validation, max_epochs=epochs, **options)

    def test_steps_on_its_monitor(self) -> None:
        assert self.run(Validates(plateau(monitor="val/loss"))) == pytest.approx(self.EXPECTED)

    @pytest.mark.parametrize("hook", ["on_validation_end", "on_train_batch_end", "on_train_epoch_end"])
    def test_resume_at_the_end_of_an_epoch(self, tmp_path: Path, hook: str) -> None:
        """A checkpoint of before the move holds the metric that it goes by."""

        module = Validates(plateau(monitor="val/loss"))
        assert self.run(module, callbacks=[Saves(tmp_path, hook)]) == pytest.approx(self.EXPECTED)
        for cut in (2, 4, 6):
            resumed = self.run(Validates(plateau(monitor="val/loss")), path=tmp_path / f"step={cut}.ckpt")
            assert resumed == pytest.approx(self.EXPECTED[cut:]), cut

    def test_a_training_metric(self) -> None:
        """One that is known at the epoch's end only: the mean of what was logged."""

        class Logs(Configured):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                report = super().training_step(batch, batch_idx)
                self.log("mean", float(batch_idx), on_step=False, on_epoch=True, batch_size=1)
                return report

        found = rates(Logs(plateau(monitor="mean")), [window(A)] * 2, max_epochs=3)
        assert found == pytest.approx([1, 1, 1, 1, 0.1, 0.1])

    def test_a_missing_metric(self) -> None:
        with pytest.raises(UserError, match=r"metric 'val/los', which was not logged.*that were: .*val/loss"):
            self.run(Validates(plateau(monitor="val/los")))
        with pytest.warns(UserWarning, match="the rate stays"):
            found = self.run(Validates(plateau(monitor="val/los", strict=False)), epochs=2)
        assert found == [1] * 4

    @pytest.mark.parametrize(
        ("terms", "message"),
        [({}, "no monitor is given"), ({"monitor": "x", "interval": "step"}, 'use interval "epoch"')],
    )
    def test_what_cannot_be_done(self, terms: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            rates(Configured(plateau(**terms)), [window(A)])

    def test_of_a_language_module(self) -> None:
        """It goes by `val/loss`, which this module logs itself."""
        module = language(
            optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
            schedule=lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
        )
        trainer = build_trainer(max_epochs=2)
        trainer.fit(module, ListLoader([tokens()]), ListLoader([tokens()]))
        assert trainer.lr_scheduler_configs[0].scheduler.num_bad_epochs == 0
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


class TestAveraging:
    """Lightning#17738, SWA: its annealing takes epochs again."""

    @pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch")
    def test_annealing_takes_epochs(self) -> None:
        averaging = StochasticWeightAveraging(
            swa_lrs=0.1, swa_epoch_start=2, annealing_epochs=2, annealing_strategy="linear"
        )
        module = Configured(stepping(interval="step", frequency=100))
        found = rates(module, [window(A)] * 3, max_epochs=4, callbacks=[averaging])
        assert found == pytest.approx([1] * 6 + [0.55] * 3 + [0.1] * 3)

    @pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch")
    @pytest.mark.parametrize("cut", [1, 2, 3])
    def test_resume_under_the_cosine(self, tmp_path: Path, cut: int) -> None:
        """Lightning#11665: no IndexError, and the rates and weights of the run that goes on."""

        def run(path: Path | None = None) -> tuple[list[float], Any]:
            module = language(lr=1e-2)
            averaging = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2, annealing_epochs=2)
            saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True)
            return rates(module, [tokens()] * 2, path, callbacks=[averaging, saving], max_epochs=4), module

        straight, module = run()
        resumed, again = run(tmp_path / f"step={2 * cut}.ckpt")
        assert resumed == pytest.approx(straight[2 * cut :])
        for here, there in zip(again.parameters(), module.parameters(), strict=True):
            assert torch.equal(here, there)

    @pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch")
    def test_resume_within_an_epoch_of_averaging(self, tmp_path: Path) -> None:
        """Lightning rebuilds its schedule at the next epoch, and no sooner; that is said."""

        def run(path: Path | None = None) -> list[float]:
            averaging = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2, annealing_epochs=2)
            callbacks = [averaging, Saves(tmp_path)]
            return rates(language(lr=1e-2), [tokens()] * 2, path, callbacks=callbacks, max_epochs=4)

        straight = run()
        assert run(tmp_path / "step=1.ckpt") == pytest.approx(straight[1:]), "before it began"
        with pytest.warns(UserWarning, match="annealing will be an epoch late; resume from .* epoch's end"):
            assert run(tmp_path / "step=3.ckpt")[0] == pytest.approx(straight[3])


class Warming(LanguageModule):
    """A model with the default cosine and a warm-up, for a command line that gives other things."""

    def __init__(self) -> None:
        super().__init__(SHAPE, warmup_updates=3)


class TestForeignSchedules:
    """A user's own scheduler under LanguageModule is left alone."""

    @pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
    @pytest.mark.filterwarnings("ignore:.*will be overridden by `LightningCLI.configure_optimizers`")
    def test_of_lightning_cli(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """SGD(lr 0.1) and ConstantLR(factor 1): a rate of 0.1 for all updates, and not of 0.0333."""
        defaults = {"max_steps": 4, "logger": False, "accelerator": "cpu", "enable_checkpointing": False}
        quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        options = ["--optimizer=SGD", "--optimizer.lr=0.1", "--lr_scheduler=ConstantLR"]
        monkeypatch.setattr(sys, "argv", ["train", *options, "--lr_scheduler.factor=1"])
        cli = LightningCLI(
            Warming,
            run=False,
            save_config_callback=None,
            trainer_defaults=defaults | quiet,
            seed_everything_default=False,
        )
        found = Rates()
        cli.trainer.callbacks.append(found)
        cli.trainer.fit(cli.model, ListLoader([tokens()] * 4))
        assert found.seen == pytest.approx([0.1] * 4)

    @pytest.mark.parametrize("scheduled", [True, False])
    def test_of_a_subclass(self, scheduled: bool) -> None:
        """Without a scheduler there was an IndexError."""

        class Own(LanguageModule):
            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
                if not scheduled:
                    return optimizer
                return [optimizer], [schedulers.ConstantLR(optimizer, factor=1.0)]

        torch.manual_seed(3)
        assert rates(Own(SHAPE, warmup_updates=3), [tokens()] * 4) == pytest.approx([0.1] * 4)

    def test_our_own_scheduler_in_other_hands(self) -> None:
        """One of build_scheduler keeps the length that it was built with."""

        class Own(LanguageModule):
            def configure_optimizers(self) -> Any:
                optimizer = build_optimizer(self.network, 1.0)
                return [optimizer], [build_scheduler(optimizer, total_updates=8, warmup_updates=2)]

        torch.manual_seed(3)
        assert rates(Own(SHAPE), [tokens()] * 3) == pytest.approx([0.5, 1.0, 1.0])

    def test_a_length_is_asked_for_only_by_the_cosine(self) -> None:
        """A stream without an end has none, and a schedule of the user's does not need it."""

        class Stream:
            def __iter__(self) -> Any:
                return iter([tokens()] * 2)

        class Own(LanguageModule):
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        torch.manual_seed(3)
        assert rates(Own(SHAPE), Stream()) == pytest.approx([0.1] * 2)

    def test_the_cosine_within_a_chain_still_learns_the_length(self) -> None:
        class Chained(LanguageModule):
            def configure_optimizers(self) -> Any:
                found = super().configure_optimizers()
                own = found["lr_scheduler"]["scheduler"]
                constant = schedulers.ConstantLR(found["optimizer"], factor=1.0)
                chain = schedulers.ChainedScheduler([own, constant], found["optimizer"])
                return [found["optimizer"]], [chain]

        torch.manual_seed(3)
        found = rates(Chained(SHAPE, lr=1.0), [tokens()] * 4)
        assert found == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)


class Grows(pl.Callback):
    """Adds a group at the second update, unless the checkpoint has it."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        optimizer = trainer.optimizers[0]
        if trainer.global_step == 1:
            optimizer.add_param_group({"params": [pl_module.extra], "lr": 0.5})

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.ckpt_path:
            trainer.optimizers[0].add_param_group({"params": [pl_module.extra], "lr": 0.5})


class Growing(LanguageModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(SHAPE, **options)
        self.extra = nn.Parameter(torch.zeros(11))

    def loss_sum(self, micro_batch: Any) -> torch.Tensor:
        return super().loss_sum(micro_batch) + (self.extra - 1).square().sum()


class Groups(pl.Callback):
    """Keeps the rates of all groups at every update."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates.append([group["lr"] for group in optimizer.param_groups])


class TestNewGroups:
    """pytorch#104361: a group added later under the default cosine follows the schedule."""

    COSINE = (1.0, 0.853553, 0.5, 0.146447)

    def run(self, folder: Path, path: Path | None = None) -> tuple[list[list[float]], Any]:
        torch.manual_seed(3)
        module = Growing(lr=1e-2)
        groups = Groups()
        saving = Saves(folder)
        rates(module, [tokens()] * 4, path, callbacks=[Grows(), groups, saving], max_steps=4)
        return groups.rates, module

    def test_follows_from_its_first_update_on(self, tmp_path: Path) -> None:
        found, _ = self.run(tmp_path)
        assert [each[-1] for each in found[1:]] == pytest.approx(
            [0.5 * factor for factor in self.COSINE[1:]], abs=1e-6
        )
        for update, each in enumerate(found):
            assert each[0] == pytest.approx(1e-2 * self.COSINE[update], rel=1e-5)

    @pytest.mark.parametrize("cut", [2, 3])
    def test_resume_with_the_group(self, tmp_path: Path, cut: int) -> None:
        straight, module = self.run(tmp_path / "a")
        resumed, again = self.run(tmp_path / "b", tmp_path / "a" / f"step={cut}.ckpt")
        assert resumed == straight[cut:]
        for here, there in zip(again.parameters(), module.parameters(), strict=True):
            assert torch.equal(here, there)

    def test_finetuning_unfreezes_under_the_cosine(self, tmp_path: Path) -> None:
        """Lightning's BaseFinetuning adds the group, and brings it back on a resume."""

        class Unfreezes(BaseFinetuning):
            def freeze_before_training(self, pl_module: Any) -> None:
                self.freeze(pl_module.network.blocks)

            def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
                if epoch == 1:
                    self.unfreeze_and_add_param_group(pl_module.network.blocks, optimizer, lr=0.5)

        def run(path: Path | None = None) -> list[list[float]]:
            groups = Groups()
            saving = Saves(tmp_path)
            module = language(lr=1e-2, weight_decay=0.0)
            rates(module, [tokens()] * 2, path, callbacks=[Unfreezes(), groups, saving], max_epochs=2)
            return groups.rates

        straight = run()
        added = [each[-1] for each in straight[2:]]
        assert added == pytest.approx([0.5 * factor for factor in self.COSINE[2:]], abs=1e-6)
        assert run(tmp_path / "step=3.ckpt") == straight[3:]

    @skips_quietly
    def test_a_move_is_taken_back_over_a_new_group(self, read_late: Any) -> None:
        """Added while the device has not judged the update before, which turns out to be bad."""
        read_late()

        class Adds(pl.Callback):
            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                if trainer.global_step == 2:
                    extra = nn.Parameter(torch.zeros(1))
                    trainer.optimizers[0].add_param_group({"params": [extra], "lr": 0.5})

        module = ToyU(
            lambda p: torch.optim.AdamW(p, lr=1.0, fused=True),
            lambda o: FactorLR(o, lambda k: 0.5**k),
            on_nonfinite="skip",
        )
        groups = Groups()
        windows = [window(A, B), BAD, window(B), window(A)]
        rates(module, windows, strategy=ClipSingleDeviceStrategy(), callbacks=[Adds(), groups])
        assert groups.rates == [[1.0], [0.5], [0.5, 0.25], [0.25, 0.125]]

    def test_the_state_of_a_plain_lambda_still_loads(self) -> None:
        """Checkpoints of earlier versions hold that of LambdaLR."""
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        plain = schedulers.LambdaLR(optimizer, lambda k: 0.5**k)
        optimizer.step()
        plain.step()
        ours = FactorLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), lambda k: 0.5**k)
        ours.load_state_dict(plain.state_dict())
        assert (ours.last_epoch, ours.base_lrs) == (1, [1.0])
        ours.optimizer.step()
        ours.step()
        assert ours.get_last_lr() == [0.25]


class TestClosures:
    """Lightning#4188: LBFGS needs a closure, and is refused in one sentence."""

    def test_lbfgs(self) -> None:
        with pytest.raises(UserError, match="LBFGS needs a closure"):
            fit(language(optimizer=lambda p: torch.optim.LBFGS(p), schedule="constant"), [tokens()])

    def test_any_step_that_must_have_one(self) -> None:
        class Closing(torch.optim.SGD):
            def step(self, closure: Any) -> Any:
                raise AssertionError

        with pytest.raises(UserError, match="Closing needs a closure"):
            fit(ToyU(lambda p: Closing(p, lr=1.0)), [window(A)])

    def test_one_that_may_have_one_is_welcome(self) -> None:
        class Optional(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                return super().step(closure)

        assert rates(ToyU(lambda p: Optional(p, lr=1.0)), [window(A)]) == [1.0]


class TestNoOptimizer:
    """Lightning#11178: configure_optimizers that returns None."""

    def test_says_what_it_needs(self) -> None:
        with pytest.raises(UserError, match=r"returned None.*return an optimizer"):
            rates(Configured(lambda optimizer: None), [window(A)])


class TestNoRate:
    """Lightning#12067: Adafactor with lr=None, which sets its rate itself."""

    def build(self, parameters: Any) -> Any:
        return Adafactor(parameters, lr=None, relative_step=True, scale_parameter=True, warmup_init=True)

    def test_trains_without_a_rate_to_report(self) -> None:
        """The weights are those of a plain loop; no `lr` is made up."""
        bar, summary, logger = UpdateProgressBar(), EpochSummary(), RowLogger()
        module = language(optimizer=self.build, schedule="constant", max_norm=None)
        callbacks = [bar, summary, TensorBoardLayout()]
        fit(module, [tokens()] * 3, callbacks=callbacks, logger=logger, enable_progress_bar=True)
        plain = language(max_norm=None)
        optimizer = self.build(plain.network.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            logits = plain.network(tokens()["input_ids"]).flatten(0, 1)
            nn.functional.cross_entropy(logits, tokens()["labels"].flatten()).backward()
            optimizer.step()
        for here, there in zip(module.network.parameters(), plain.network.parameters(), strict=True):
            torch.testing.assert_close(here, there)
        assert module.updates_applied == 3
        assert not logger.series("train/lr")
        assert len(logger.series("train/loss")) == 3

    def test_the_cosine_says_what_it_needs(self) -> None:
        with pytest.raises(UserError, match=r"lr=None and sets its rate itself.*`schedule`=constant"):
            fit(language(optimizer=self.build), [tokens()])

    def test_a_schedule_of_its_own_works(self) -> None:
        module = language(optimizer=self.build, schedule=AdafactorSchedule)
        fit(module, [tokens()] * 2)
        assert module.updates_applied == 2

    def test_a_module_that_steps_by_itself_is_journalled(self, tmp_path: Path) -> None:
        build = self.build

        class Foreign(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(2, 1)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.layer(batch).square().sum()

            def configure_optimizers(self) -> Any:
                return build(self.parameters())

        journal = RunJournal(tmp_path / "journal.jsonl")
        build_trainer(callbacks=[journal]).fit(Foreign(), ListLoader([torch.ones(3, 2)] * 2))
        lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
        assert len([line for line in lines if line["kind"] == "update"]) == 2


@pytest.mark.parametrize("form", ["dict", "pair"])
def test_no_scheduler_may_be_written_out(form: str) -> None:
    class Written(ToyU):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return {"optimizer": optimizer, "lr_scheduler": None} if form == "dict" else ([optimizer], None)

    _, recorder = fit(Written(), [window(A)])
    assert recorder.reports[0]["lr"] == 1.0


def test_a_scheduler_needs_a_rate() -> None:
    module = language(optimizer=partial(Adafactor, lr=None), schedule=partial(schedulers.StepLR, step_size=4))
    with pytest.raises(UserError, match=r"Adafactor has lr=None .* StepLR cannot scale it"):
        fit(module, [tokens()])


@pytest.mark.parametrize(
    "schedule",
    [
        partial(schedulers.LambdaLR, lr_lambda=lambda index: 0.5),
        partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=9),
        partial(schedulers.CosineAnnealingWarmRestarts, T_0=3),
    ],
    ids=["LambdaLR", "OneCycleLR", "CosineAnnealingWarmRestarts"],
)
def test_a_scheduler_that_cannot_follow_a_new_group_stops_before_weights_move(schedule: Any) -> None:
    module = Growing(lr=1e-2, schedule=schedule)
    before: list[torch.Tensor] = []

    class Keep(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            before[:] = [each.detach().clone() for each in pl_module.parameters()]

    with pytest.raises(UserError, match="a parameter group was added to the optimizer"):
        fit(module, [tokens()] * 3, callbacks=[Grows(), Keep()])
    assert all(map(torch.equal, before, module.parameters()))


def test_statistics_alone_move_no_weight() -> None:
    """SWA runs an epoch more for BatchNorm, and gives its average afterwards: updates 13 to 16 trained on."""

    class Normed(ToyU):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def loss_sum(self, micro_batch: Any) -> torch.Tensor:
            values = micro_batch.float()[:, None]
            return (
                super().loss_sum(micro_batch) + 0.0 * self.norm(values).sum() + self.norm.bias.square().sum()
            )

    class Averages(StochasticWeightAveraging):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(pl_module.b.detach().clone())
            super().on_train_end(trainer, pl_module)

    seen: list[torch.Tensor] = []
    module = Normed()
    trainer, recorder = fit(
        module,
        [window([0, 1, 1], [0, 0])] * 4,
        callbacks=[Averages(0.1, swa_epoch_start=1, annealing_epochs=1)],
        max_epochs=3,
    )
    assert [each["outcome"] for each in recorder.reports[12:]] == ["empty"] * 4
    assert torch.equal(recorder.weights[12], recorder.weights[15])
    assert torch.equal(seen[0], module.b.detach()) or trainer.global_step == 16
    assert int(module.norm.num_batches_tracked) > 0
