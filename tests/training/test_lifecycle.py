"""One module in several trainers, one loader in several epochs: what belongs to a run starts with it.

Every test that stands for a public report names it.
"""

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from andrea_pl import (
    LanguageModule,
    NonFiniteError,
    TextDataModule,
    TextSource,
    TransformerConfig,
    Window,
    WindowLoader,
)
from tests.support.toy import NAN, A, B, ListLoader, RowLogger, ToyU, build_trainer, fit, window

BAD = Window([(torch.tensor(A), NAN)])
SHAPE = TransformerConfig(vocab_size=11, block_size=4, d_model=8, n_heads=2, n_layers=1)

skips_quietly = pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning")


def tokens() -> dict[str, torch.Tensor]:
    rows = torch.tensor([[1, 2, 3, 4, 5], [3, 4, 5, 6, 7]])
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


class Reports(pl.Callback):
    """Keeps reports as they are published."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []

    def take_report(self, trainer: Any, report: Any) -> None:
        self.taken.append(dict(report))


@skips_quietly
class TestCounters:
    """Lightning#12789: a fresh fit starts at 0, a resume continues."""

    def test_a_second_trainer(self) -> None:
        """Run 2 logged train/skipped 2 and updates_applied 4 at global_step 3."""
        module = ToyU(on_nonfinite="skip")
        fit(module, [window(A), BAD, BAD])
        logger = RowLogger()
        trainer, _ = fit(module, [window(A, B)] * 3, logger=logger)
        assert [value for _, value in logger.series("train/skipped")] == [0, 0, 0]
        assert (module.updates_applied, module.updates_skipped, trainer.global_step) == (3, 0, 3)

    def test_skips_in_a_row_start_anew(self) -> None:
        """The first bad window of run 2 is the first in a row."""
        module = ToyU(on_nonfinite="skip", max_consecutive_skips=2)
        fit(module, [window(A), BAD, BAD])
        fit(module, [BAD, window(A)])
        assert (module.updates_applied, module.updates_skipped) == (1, 1)
        with pytest.raises(NonFiniteError, match="`max_consecutive_skips`=2"):
            fit(module, [BAD, BAD, BAD])

    def test_no_report_of_an_earlier_run(self) -> None:
        module = ToyU()
        fit(module, [window(A)])
        seen: list[Any] = []

        class Looks(pl.Callback):
            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                seen.append(pl_module.update_report)

        fit(module, [window(A)], callbacks=[Looks()])
        assert seen == [None]

    @pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
    def test_a_resume_continues(self, tmp_path: Path) -> None:
        module = ToyU(on_nonfinite="skip")
        trainer, _ = fit(module, [window(A), BAD])
        trainer.save_checkpoint(tmp_path / "two.ckpt")
        fit(module, [BAD])  # a run between, which does not count
        reports = Reports()
        trainer = build_trainer(max_epochs=2, callbacks=[reports])
        trainer.fit(module, ListLoader([window(A), BAD]), ckpt_path=tmp_path / "two.ckpt")
        assert (module.updates_applied, module.updates_skipped, trainer.global_step) == (2, 2, 4)
        assert [each["skipped"] for each in reports.taken] == [1, 2]

    def test_the_same_trainer_goes_on(self) -> None:
        module = ToyU(on_nonfinite="skip")
        trainer, _ = fit(module, [window(A), BAD])
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, ListLoader([window(A)] * 2))
        assert (module.updates_applied, module.updates_skipped, trainer.global_step) == (3, 1, 4)

    def test_evaluation_keeps_them(self, tmp_path: Path) -> None:
        """Validation after a run is written at its last update."""
        module = LanguageModule(SHAPE)
        trainer, _ = fit(module, [tokens()] * 2)
        trainer.save_checkpoint(tmp_path / "two.ckpt")
        logger = RowLogger()
        loaded = LanguageModule.load_from_checkpoint(tmp_path / "two.ckpt")
        build_trainer(logger=logger).validate(loaded, ListLoader([tokens()]), verbose=False)
        assert [step for step, _ in logger.series("val/loss")] == [2]
        assert loaded.updates_applied == 2

    def test_loaded_weights_start_a_fresh_fit(self, tmp_path: Path) -> None:
        """Nothing of the checkpoint's run but its weights: neither its rate nor its length."""
        first = LanguageModule(SHAPE, lr=1e-2)
        trainer, _ = fit(first, [tokens()] * 2)
        trainer.save_checkpoint(tmp_path / "two.ckpt")
        module = LanguageModule.load_from_checkpoint(tmp_path / "two.ckpt", lr=1e-3)
        _, recorder = fit(module, [tokens()] * 4)
        rates = [report["lr"] for report in recorder.reports]
        assert rates == pytest.approx([1e-3 * each for each in (1, 0.853553, 0.5, 0.146447)], rel=1e-5)
        assert module.updates_applied == 4

    def test_a_validation_that_broke_off_does_not_count(self) -> None:
        """Its sums are none of the next run's."""

        class Breaks(pl.Callback):
            def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
                raise RuntimeError("broken off")

        module = LanguageModule(SHAPE)
        other = {key: value.flip(0)[:1] for key, value in tokens().items()}
        with pytest.raises(RuntimeError, match="broken off"):
            build_trainer(callbacks=[Breaks()]).validate(module, ListLoader([other]), verbose=False)
        trainer = build_trainer()
        trainer.validate(module, ListLoader([tokens()]), verbose=False)
        expected = float(module.sequence_losses(tokens()).detach().sum()) / 8
        assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(expected, rel=1e-6)

    def test_a_module_that_was_trained_can_be_copied(self) -> None:
        module = LanguageModule(SHAPE)
        fit(module, [tokens()] * 2)
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            fit(twin, [tokens()])
            assert twin.updates_applied == 1


class Drawn(pl.Callback):
    """Keeps which items every epoch drew, in order."""

    def __init__(self) -> None:
        self.epochs: dict[int, list[int]] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        drawn = self.epochs.setdefault(trainer.current_epoch, [])
        drawn.extend(int(each) for part in batch for each in part.flatten())


class Counts(ToyU):
    """Toy U on items that are numbers."""

    def count_tokens(self, micro_batch: Any) -> int:
        return micro_batch.numel()

    def loss_sum(self, micro_batch: Any) -> Any:
        return super().loss_sum(torch.zeros_like(micro_batch))


class Reloads(Counts):
    """Makes its loader anew each time it is asked."""

    def __init__(self, build: Any) -> None:
        super().__init__()
        self.build_loader = build

    def train_dataloader(self) -> Any:
        return self.build_loader()


def shuffled() -> WindowLoader:
    return WindowLoader(DataLoader(range(8), batch_size=1, shuffle=True), 2)


def drawn(module: Any, loader: Any = None, path: Path | None = None, **options: Any) -> dict[int, list[int]]:
    """Train and return what every epoch drew."""
    seen = Drawn()
    callbacks = [seen, *options.pop("callbacks", [])]
    build_trainer(**({"max_epochs": 3} | options), callbacks=callbacks).fit(module, loader, ckpt_path=path)
    return seen.epochs


class TestOrder:
    """Lightning#20812: a loader that is made anew does not repeat the first epoch's order for ever."""

    def test_reloaded_every_epoch(self) -> None:
        epochs = drawn(Reloads(shuffled), reload_dataloaders_every_n_epochs=1)
        assert all(sorted(order) == list(range(8)) for order in epochs.values())
        assert len({tuple(order) for order in epochs.values()}) == 3
        assert epochs == drawn(Counts(), shuffled()), "that of a loader which stays"

    def test_reloaded_every_second_epoch(self) -> None:
        epochs = drawn(Reloads(shuffled), reload_dataloaders_every_n_epochs=2, max_epochs=4)
        assert epochs == drawn(Counts(), shuffled(), max_epochs=4)

    def test_a_sampler_of_its_own(self) -> None:
        def build() -> WindowLoader:
            items = list(range(8))
            return WindowLoader(DataLoader(items, batch_size=2, sampler=RandomSampler(items)), 2)

        epochs = drawn(Reloads(build), reload_dataloaders_every_n_epochs=1)
        assert len({tuple(order) for order in epochs.values()}) == 3

    def test_a_stream(self) -> None:
        """One that is told of the epoch, and has no length."""

        class Stream(IterableDataset[int]):
            epoch = -1

            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

            def __iter__(self) -> Any:
                return iter(range(10 * self.epoch, 10 * self.epoch + 4))

        def build() -> WindowLoader:
            return WindowLoader(DataLoader(Stream(), batch_size=1), 2)

        epochs = drawn(Reloads(build), reload_dataloaders_every_n_epochs=1)
        assert epochs == {epoch: list(range(10 * epoch, 10 * epoch + 4)) for epoch in range(3)}

    @pytest.mark.parametrize("reload", [0, 1])
    def test_resume_within_an_epoch(self, tmp_path: Path, reload: int) -> None:
        class Saves(pl.Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

        options = {"reload_dataloaders_every_n_epochs": reload}
        straight = drawn(Reloads(shuffled), callbacks=[Saves()], **options)
        order = [each for epoch in straight.values() for each in epoch]
        for cut in (2, 4, 6, 8, 9):
            rest = drawn(Reloads(shuffled), path=tmp_path / f"{cut}.ckpt", **options)
            assert [each for epoch in rest.values() for each in epoch] == order[2 * cut :], cut

    def test_overfitted_windows_stay(self) -> None:
        epochs = drawn(Reloads(shuffled), reload_dataloaders_every_n_epochs=1, overfit_batches=2)
        assert epochs[0] == epochs[1] == epochs[2]
        assert len(epochs[0]) == 4

    def test_a_loader_in_two_fits(self) -> None:
        """It goes on with its epochs, in a second trainer too."""
        loader = shuffled()
        first = drawn(Counts(), loader, max_epochs=2)
        second = drawn(Counts(), loader, max_epochs=2)
        assert len({tuple(order) for order in (*first.values(), *second.values())}) == 4

    def test_a_limit_holds_for_a_new_loader(self) -> None:
        """Half an epoch is an epoch, and the next one draws anew."""
        epochs = drawn(Reloads(shuffled), reload_dataloaders_every_n_epochs=1, limit_train_batches=2)
        assert [len(order) for order in epochs.values()] == [4, 4, 4]
        assert epochs == drawn(Counts(), shuffled(), limit_train_batches=2)

    def test_lightning_does_not_take_it_for_a_dataloader(self) -> None:
        loader = shuffled()
        assert not any(hasattr(loader, name) for name in ("sampler", "batch_sampler", "dataset"))

    def test_the_text_data_module(self) -> None:
        """Its loader is told of the epoch when it is made."""

        def run(**options: Any) -> list[list[int]]:
            rows = [[n, n + 1, n + 2] for n in range(8)]
            data = TextDataModule(
                [TextSource(name="t", kind="tokens", documents=rows)],
                vocab_size=11,
                block_size=4,
                sequences_per_update=2,
                val_fraction=0.0,
            )
            seen: list[list[int]] = []

            class Seen(pl.Callback):
                def on_train_batch_start(
                    self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
                ) -> None:
                    if batch_idx == 0:
                        seen.append([])
                    seen[-1] += [each for part in batch for each in part["document_id"].tolist()]

            trainer = build_trainer(max_epochs=3, callbacks=[Seen()], **options)
            trainer.fit(LanguageModule(SHAPE), datamodule=data)
            return seen

        reloaded = run(reload_dataloaders_every_n_epochs=1)
        assert reloaded == run()
        assert len({tuple(order) for order in reloaded}) == 3
