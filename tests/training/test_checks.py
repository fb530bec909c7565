"""What an update refuses: options, batches, optimizers and trainers that it cannot be exact with."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from andrea_pl import (
    TokenWeightedModule,
    UserError,
)
from tests.support.toy import A, ListLoader, ToyU, build_trainer, fit, window


class TestRefusals:
    """What cannot work is refused with the name of what to use."""

    @pytest.mark.parametrize(
        ("options", "remedy"),
        [
            ({"gradient_clip_val": 1.0}, "`max_norm`"),
            ({"gradient_clip_val": 0}, "`max_norm`"),
            ({"gradient_clip_algorithm": "norm"}, "`max_norm`"),
            ({"accumulate_grad_batches": 2}, "`sequences_per_update`"),
        ],
    )
    def test_trainer_options(self, options: Any, remedy: str) -> None:
        with pytest.raises(UserError, match=remedy):
            fit(ToyU(), [window(A)], **options)

    def test_lr_find(self) -> None:
        with pytest.raises(UserError, match="lr_find"):
            fit(ToyU(), [window(A)], callbacks=[LearningRateFinder()])

    def test_lr_find_by_the_tuner(self) -> None:
        with pytest.raises(UserError, match="lr_find"):
            Tuner(build_trainer()).lr_find(ToyU(), ListLoader([window(A)]))

    def test_fsdp1(self) -> None:
        """Lightning#19626, #20138."""
        module = ToyU()
        trainer = build_trainer()
        trainer.strategy.__class__ = FSDPStrategy
        module.trainer = trainer
        with pytest.raises(UserError, match="ModelParallelStrategy"):
            module.setup("fit")

    @pytest.mark.filterwarnings("ignore:The lr scheduler dict contains the key")
    def test_plateau(self) -> None:
        def plateau(optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

        class Monitored(ToyU):
            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
                return {
                    "optimizer": optimizer,
                    "lr_scheduler": {"scheduler": plateau(optimizer), "monitor": "x"},
                }

        with pytest.raises(UserError, match="ReduceLROnPlateau"):
            fit(Monitored(), [window(A)])

    def test_two_optimizers(self) -> None:
        class Two(ToyU):
            def configure_optimizers(self) -> Any:
                return [
                    torch.optim.SGD(self.parameters(), lr=1.0),
                    torch.optim.SGD(self.parameters(), lr=1.0),
                ]

        with pytest.raises(UserError, match="2; put the parameters into groups"):
            fit(Two(), [window(A)])

    @pytest.mark.parametrize(
        ("option", "value"),
        [("on_nonfinite", "ignore"), ("max_consecutive_skips", -1), ("min_loss_scale", -1.0)],
    )
    def test_options(self, option: str, value: Any) -> None:
        with pytest.raises(UserError, match=option):
            ToyU(**{option: value})

    def test_loss_must_be_a_scalar(self) -> None:
        class Unreduced(ToyU):
            def loss_sum(self, micro_batch: Any) -> Tensor:
                return self.b * 1.0

        with pytest.raises(UserError, match=r"0-d tensor.*got shape \(2,\)"):
            fit(Unreduced(), [window(A)])

    def test_tokens_must_be_whole(self) -> None:
        class Half(ToyU):
            def count_tokens(self, micro_batch: Any) -> Any:
                return 0.5

        with pytest.raises(UserError, match=r"whole number of labels, got 0\.5"):
            fit(Half(), [window(A)])

    def test_hook_without_super(self) -> None:
        class Overriding(ToyU):
            def on_before_optimizer_step(self, optimizer: Any) -> None:
                pass

        with pytest.raises(RuntimeError, match=r"must call super\(\)"):
            fit(Overriding(), [window(A)])

    @pytest.mark.parametrize("method", ["count_tokens", "loss_sum"])
    def test_missing_methods(self, method: str) -> None:
        with pytest.raises(NotImplementedError, match=method):
            getattr(TokenWeightedModule(), method)(None)
