"""PreClipNorm: groups, layers, kinds of gradients, shares of clipped updates, and what it warns about."""

import math
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from andrea_callbacks import ClipWarning, PreClipNorm, RunEvent
from andrea_pl import LanguageModule, TransformerConfig
from tests.support.runs import text_windows
from tests.support.toy import ListLoader, RowLogger, ToyU, build_trainer, fit, window


class Parts(pl.LightningModule):
    """Gradients are what a batch says: 3, 4, zero, none, and none of an optimizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        self.still = nn.Parameter(torch.zeros(2))
        self.unused = nn.Parameter(torch.zeros(2))
        self.outside = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first, second = (block.weight.sum() for block in self.blocks)
        return batch[0] * first + batch[1] * second + 0.0 * self.still.sum() + self.outside.sum()

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [self.blocks[0].weight, self.still], "name": "first"},
            {"params": [self.blocks[1].weight, self.unused]},
        ]
        return torch.optim.SGD(groups, lr=1e-3)


def batches(*pairs: tuple[float, float]) -> list[Tensor]:
    return [torch.tensor(pair) for pair in pairs]


@pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning")
def test_groups_layers_and_kinds() -> None:
    """transformers#614: gradients 3 and 4 in two groups have norm 5."""
    logger = RowLogger()
    trainer = build_trainer(callbacks=[PreClipNorm(every=2)], logger=logger, gradient_clip_val=1.0)
    trainer.fit(Parts(), ListLoader(batches((3, 4), (1, 1), (6, 8))))
    rows = dict(logger.rows)
    assert "grad_norm_group/first" not in rows[2]
    for step, factor in ((1, 1), (3, 2)):
        row = rows[step]
        assert row["train/grad_norm"] == pytest.approx(5 * factor)
        assert (row["grad_norm_group/first"], row["grad_norm_group/1"]) == (3 * factor, 4 * factor)
        assert (row["grad_norm_layer/blocks.0"], row["grad_norm_layer/blocks.1"]) == (3 * factor, 4 * factor)
        assert row["grad_norm_layer/still"] == 0
        kinds = [row[f"gradients/{kind}"] for kind in ("none", "zero", "finite", "nonfinite")]
        assert kinds == [1, 1, 2, 0]
        assert row["train/clip_threshold"] == 1.0
    assert rows[3]["train/clip_fraction"] == 1.0
    assert rows[3]["train/clip_coefficient_mean"] == pytest.approx(
        (1 / 5 + 1 / math.sqrt(2) + 1 / 10) / 3, rel=1e-5
    )


@pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning")
def test_layers_by_patterns() -> None:
    logger = RowLogger()
    clip = PreClipNorm(layers=[r"block", "still"])
    build_trainer(callbacks=[clip], logger=logger).fit(Parts(), ListLoader(batches((3, 4))))
    layers = {name: value for name, value in logger.rows[0][1].items() if "layer" in name}
    assert layers == {"grad_norm_layer/block": 5.0, "grad_norm_layer/still": 0.0}
    logger = RowLogger()
    module = LanguageModule(TransformerConfig(32, 16, d_model=8, n_heads=2, n_layers=2), schedule="constant")
    fit(module, text_windows(1), callbacks=[PreClipNorm()], logger=logger)
    layers = {name.partition("/")[2] for _, row in logger.rows for name in row if "grad_norm_layer" in name}
    named = {
        "network.blocks.0",
        "network.blocks.1",
        "network.embedding",
        "network.final_norm",
        "network.output",
    }
    assert layers == named


class Events(pl.Callback):
    def __init__(self) -> None:
        self.taken: list[RunEvent] = []

    def take_event(self, trainer: Any, event: RunEvent) -> None:
        self.taken.append(event)


def test_parameters_without_a_gradient_are_named_once() -> None:
    """Lightning#13533: unused parameters; one outside the optimizer has a gradient all the same."""
    events = Events()
    trainer = build_trainer(callbacks=[PreClipNorm(), events], max_epochs=3)
    with pytest.warns(ClipWarning) as caught:
        trainer.fit(Parts(), ListLoader(batches((3, 4), (1, 1))))
    said = [str(each.message) for each in caught if each.category is ClipWarning]
    assert len(said) == 1
    assert "1 parameters never received a gradient in the first epoch: unused; look for detach()" in said[0]
    assert [(event.kind, event.update) for event in events.taken] == [("no_gradient", 2)]


def hard_clips(hard: int, count: int) -> list[Tensor]:
    """Return batches of which the first `hard` of each hundred are clipped to less than half."""
    return batches(*((3, 0) if number % 100 < hard else (1.5, 0) for number in range(count)))


@pytest.mark.system
@pytest.mark.parametrize(("hard", "warned"), [(51, True), (50, False)])
def test_hard_clips_as_a_rule_are_warned_about_once(hard: int, warned: bool) -> None:
    class Plain(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.w * batch[0]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    events = Events()
    trainer = build_trainer(callbacks=[PreClipNorm(), events], gradient_clip_val=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Plain(), ListLoader(hard_clips(hard, 400)))
    said = [str(each.message) for each in caught if each.category is ClipWarning]
    assert len(said) == warned
    if warned:
        assert said[0].startswith("update 100: 51 of the last 100 updates were clipped to less than half")
        for word in ("learning rate", "divided by", "abnormal input", "masks"):
            assert word in said[0]
        assert [event.kind for event in events.taken] == ["clipped_hard"]


@pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning")
def test_shares_of_our_module_leave_out_what_is_not_finite() -> None:
    logger = RowLogger()
    bad = type(window([0]))([(torch.tensor([0]), math.nan)])
    fit(
        ToyU(max_norm=0.5, on_nonfinite="skip"),
        [window([0]), bad, window([0, 0, 1, 1])],
        callbacks=[PreClipNorm()],
        logger=logger,
    )
    shares = dict(logger.series("train/clip_fraction"))
    assert shares[3] == 0.5  # the first of two
    assert dict(logger.series("train/clip_coefficient_mean"))[3] == pytest.approx(0.5 / 0.707107, rel=1e-5)
