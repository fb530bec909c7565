"""The schedule of a run whose length is known only when it starts."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from andrea_pl import (
    LanguageModule,
    TransformerConfig,
    UserError,
    WindowLoader,
)
from tests.support.runs import micro_batch, token_data
from tests.support.toy import ListLoader, ToyU, build_trainer, fit

SHAPE = TransformerConfig(vocab_size=40, block_size=8, d_model=16, n_heads=2, n_layers=1)


class TestSchedule:
    def rates(self, module: LanguageModule, loader: Any, **options: Any) -> list[float]:
        _, recorder = fit(module, loader, **options)
        return [report["lr"] for report in recorder.reports]

    def windows(self, count: int) -> WindowLoader:
        return WindowLoader(ListLoader([micro_batch() for _ in range(count)]), 4)

    def test_total_is_windows_times_epochs(self) -> None:
        """Lightning#11599: ceil(10 / 4) * 2 = 6 updates, the cosine ending there."""
        module = LanguageModule(SHAPE, lr=1.0)
        rates = self.rates(module, self.windows(10), max_epochs=2)
        expected = [0.5 * (1 + math.cos(math.pi * index / 6)) for index in range(6)]
        assert rates == pytest.approx(expected)

    def test_total_is_capped_by_max_steps(self) -> None:
        rates = self.rates(LanguageModule(SHAPE, lr=1.0), self.windows(10), max_epochs=2, max_steps=4)
        assert rates == pytest.approx([0.5 * (1 + math.cos(math.pi * index / 4)) for index in range(4)])

    def test_limit_train_batches_counts(self) -> None:
        rates = self.rates(
            LanguageModule(SHAPE, lr=1.0), self.windows(10), max_epochs=2, limit_train_batches=2
        )
        assert rates == pytest.approx([0.5 * (1 + math.cos(math.pi * index / 4)) for index in range(4)])

    def test_unknown_length(self) -> None:
        class Stream:
            def __iter__(self) -> Any:
                return iter([micro_batch()] * 3)

        with pytest.raises(UserError, match=r"set trainer\.max_steps"):
            fit(LanguageModule(SHAPE), WindowLoader(Stream(), 2))
        assert len(self.rates(LanguageModule(SHAPE, schedule="constant"), WindowLoader(Stream(), 2))) == 2

    def test_warm_up_longer_than_the_run(self) -> None:
        with pytest.raises(UserError, match="warmup_updates=9 and total_updates=3"):
            fit(LanguageModule(SHAPE, warmup_updates=9), self.windows(10))

    def test_named_optimizer_and_scheduler(self) -> None:
        shape = TransformerConfig(
            vocab_size=40, block_size=8, d_model=16, n_heads=2, n_layers=1, norm_weight=False
        )
        module = LanguageModule(
            shape,
            optimizer=lambda parameters: torch.optim.Muon(parameters, lr=0.1),
            schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        )
        trainer, recorder = fit(module, self.windows(10))
        assert isinstance(trainer.optimizers[0], torch.optim.Muon)
        assert [report["lr"] for report in recorder.reports] == pytest.approx([0.1, 0.05, 0.025])

    def test_resume_over_a_stream(self, tmp_path: Path) -> None:
        """A loader without a length resumes at any update, though Lightning asks for one window ahead."""

        class Stream(torch.utils.data.IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(range(12))

        def run(ckpt: Any = None) -> list[list[int]]:
            seen: list[list[int]] = []

            class Counting(ToyU):
                def loss_sum(self, micro_batch: Any) -> torch.Tensor:
                    return super().loss_sum(torch.tensor([0]))

                def count_tokens(self, micro_batch: Any) -> int:
                    return 1

            class Seen(pl.Callback):
                def on_train_batch_start(
                    self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
                ) -> None:
                    seen.append([int(part) for part in batch])

            saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
            trainer = build_trainer(callbacks=[Seen(), saving], enable_checkpointing=True, max_epochs=2)
            trainer.fit(Counting(), WindowLoader(DataLoader(Stream(), batch_size=1), 4), ckpt_path=ckpt)
            return seen

        straight = run()
        assert straight == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] * 2
        for cut in range(1, 6):
            assert run(tmp_path / f"step={cut}.ckpt") == straight[cut:], cut

    def test_resume_with_max_epochs_alone(self, tmp_path: Path) -> None:
        """A resume at update 2 delivers window 3 next, and ends with the straight run's weights."""

        def run(ckpt: Any = None, stop: int = -1) -> tuple[list[list[int]], Any, torch.Tensor]:
            torch.manual_seed(3)
            module = LanguageModule(SHAPE, lr=1e-2, warmup_updates=2)
            seen: list[list[int]] = []

            class Seen(pl.Callback):
                def on_train_batch_start(
                    self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
                ) -> None:
                    seen.append(sorted(n for part in batch for n in part["document_id"].tolist()))

            saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
            trainer = build_trainer(callbacks=[Seen(), saving], enable_checkpointing=True, max_epochs=2)
            trainer.fit(module, datamodule=token_data(), ckpt_path=ckpt)
            return seen, trainer, torch.cat([p.detach().flatten() for p in module.parameters()])

        straight, _, weights = run()
        assert len(straight) == 8
        for cut in (2, 4, 6):
            epoch = 0 if cut <= 4 else 1
            path = next(tmp_path.glob(f"epoch={epoch}-step={cut}.ckpt"))
            resumed, _, end = run(ckpt=path)
            assert resumed == straight[cut:]
            assert torch.equal(end, weights)
