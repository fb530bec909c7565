"""Complex parameters: no imaginary part is lost in norms, moments, ratios, attribution or the search for "
"NaN."""

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from andrea_callbacks import FiniteGuard, MomentMonitor, NonFiniteError, PreClipNorm, SpikeForensics
from andrea_callbacks.forensics.attribution import attribute
from andrea_callbacks.forensics.batch_faults import faults_in
from andrea_callbacks.hooks.update_window import UpdateWindow
from tests.support.toy import ListLoader, RowLogger, build_trainer

pytestmark = pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning")


class Complex(pl.LightningModule):
    """One parameter 3 + 4j, loss |w|² / 2 times the batch."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3 + 4j]))
        self.real = nn.Parameter(torch.tensor([1.0]))

    def sequence_losses(self, batch: Tensor) -> Tensor:
        return (self.w * self.w.conj()).real / 2 * batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.sequence_losses(batch).sum() + 0.0 * self.real.sum()

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.w]}, {"params": [self.real]}]
        return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)


def test_moments_and_ratios() -> None:
    """pytorch#59998: were 0.1, 0.0333, 0.06 and 0.01897, since the imaginary part was dropped."""
    logger = RowLogger()
    callbacks = [PreClipNorm(every=1), MomentMonitor(every=1)]
    trainer = build_trainer(callbacks=callbacks, logger=logger, gradient_clip_val=1.0)
    trainer.fit(Complex(), ListLoader([torch.ones(1)]))
    row = dict(logger.rows)[1]
    assert row["train/grad_norm"] == pytest.approx(5.0, rel=1e-6)
    assert row["moments/update/0"] == pytest.approx(0.1 * math.sqrt(2), rel=1e-4)
    assert row["update_ratio/0"] == pytest.approx(0.1 * math.sqrt(2) / 5, rel=1e-4)
    assert row["moments/first/0"] == pytest.approx(0.1, rel=1e-4)
    assert row["moments/second/0"] == pytest.approx(math.sqrt(1e-3), rel=1e-4)
    assert row["moments/update/1"] == 0.0


def test_a_nan_in_an_imaginary_part() -> None:
    module = Complex()
    with torch.no_grad():
        torch.view_as_real(module.w)[0, 1] = float("nan")
    with pytest.raises(NonFiniteError, match=r"update 1: w is not finite"):
        build_trainer(callbacks=[FiniteGuard(state_every=1)]).fit(module, ListLoader([torch.zeros(1)]))
    assert faults_in({"x": torch.tensor([1 + 1j, complex(0, float("nan"))])})[0].rows == (1,)


def test_parts_of_a_complex_gradient() -> None:
    """Two rows of factors 1 and 3: a quarter and three quarters of a gradient of 4 (3 + 4j)."""
    module, batch = Complex(), torch.tensor([1.0, 3.0])
    window = UpdateWindow(number=1, micro_batches=[batch], states=[None])
    whole = [4 * module.w.detach()]
    found = attribute(build_trainer(), module, window, module.sequence_losses, [module.w], whole, 20.0)
    assert [part.share for part in found.sequences] == pytest.approx([0.75, 0.25])
    assert [part.norm for part in found.sequences] == pytest.approx([15.0, 5.0])
    assert found.agreement == pytest.approx(1.0)


def test_a_spike_of_a_complex_gradient_is_attributed() -> None:
    forensics = SpikeForensics(min_history=5)
    batches = [torch.tensor([0.01, 0.01])] * 12 + [torch.tensor([0.01, 5.0])]
    build_trainer(callbacks=[forensics]).fit(Complex(), ListLoader(batches))
    assert forensics.spikes == 1


def test_gradients_that_are_conjugated_lazily() -> None:
    class Conjugated(Complex):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            parts = torch.view_as_real(self.w.conj().resolve_conj())
            return parts.square().sum() / 2 + 0.0 * self.real.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logger = RowLogger()
    build_trainer(callbacks=[PreClipNorm()], logger=logger).fit(Conjugated(), ListLoader([torch.ones(1)]))
    assert dict(logger.series("train/grad_norm"))[1] == pytest.approx(5.0)
