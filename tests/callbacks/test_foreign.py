"""The callbacks in a project that knows nothing of ours: automatic and manual optimization."""

import math
import subprocess
import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel

from andrea_callbacks import FiniteGuard, PreClipNorm
from toy import RowLogger, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Precision 16-mixed is not supported"),
]


class Norms(pl.Callback):
    """Compute the norm of every optimizer step independently, in float64."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.after: list[float] = []

    @staticmethod
    def measure(module: Any) -> float:
        return math.sqrt(
            sum(float(p.grad.double().square().sum()) for p in module.parameters() if p.grad is not None)
        )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(self.measure(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step > len(self.after):
            self.after.append(self.measure(pl_module))


def run(module: Any, callbacks: list[Any], **options: Any) -> RowLogger:
    logger = RowLogger()
    torch.manual_seed(0)
    trainer = build_trainer(
        callbacks=callbacks, logger=logger, limit_train_batches=8, limit_val_batches=0, **options
    )
    trainer.fit(module)
    return logger


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 4},
        {"gradient_clip_val": 0.5},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0},
    ],
)
def test_automatic_optimization(options: Any) -> None:
    norms, clip = Norms(), PreClipNorm()
    logger = run(BoringModel(), [clip, norms, FiniteGuard()], **options)
    steps = list(range(1, 1 + 8 // options.get("accumulate_grad_batches", 1)))
    assert logger.series("train/grad_norm") == [
        (step, pytest.approx(norm, rel=1e-6)) for step, norm in zip(steps, norms.norms, strict=True)
    ]
    clipped = [value for _, value in logger.series("train/grad_norm_clipped")]
    assert clipped == pytest.approx(norms.after, rel=1e-5)
    max_norm = options.get("gradient_clip_val", math.inf)
    bitten = [norm > max_norm for norm in norms.norms]
    assert logger.series("train/clipped_share")[-1][1] == pytest.approx(sum(bitten) / len(bitten))
    assert {value for _, value in logger.series("train/nonfinite")} == {0.0}


def test_clip_by_value_is_not_guessed() -> None:
    logger = run(BoringModel(), [PreClipNorm()], gradient_clip_val=0.1, gradient_clip_algorithm="value")
    assert len(logger.series("train/grad_norm")) == 8
    assert logger.series("train/clip_coefficient") == []


def test_own_clipping_is_not_guessed() -> None:
    class Own(BoringModel):
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            pass

    logger = run(Own(), [PreClipNorm()])
    assert len(logger.series("train/grad_norm")) == 8
    assert logger.series("train/grad_norm_clipped") == []


def test_manual_optimization() -> None:
    norms = Norms()
    logger = run(ManualOptimBoringModel(), [PreClipNorm(), FiniteGuard(), norms])
    assert [value for _, value in logger.series("train/grad_norm")] == pytest.approx(norms.norms, rel=1e-6)
    assert logger.series("train/clip_coefficient") == []


@pytest.mark.parametrize("fused", [False, True])
def test_under_a_scaler(fused: bool) -> None:
    """The norm is that of the true gradient, also where a fused optimizer leaves it scaled."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Adam(BoringModel):
        def __init__(self) -> None:
            torch.manual_seed(1)
            super().__init__()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=fused)

    scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    plain = MixedPrecision("bf16-mixed", "cpu")
    rows = [run(Adam(), [PreClipNorm(), FiniteGuard()], plugins=[each]) for each in (scaled, plain)]
    values = [[value for _, value in logger.series("train/grad_norm")] for logger in rows]
    assert values[0] == pytest.approx(values[1], rel=0.02)


def test_nothing_of_andrea_pl_is_imported() -> None:
    code = "import andrea_callbacks, sys; sys.exit(any(name.startswith('andrea_pl') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)
