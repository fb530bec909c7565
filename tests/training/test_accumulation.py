"""Token weighting: however labels are cut into micro-batches, the gradient is that of their mean."""

import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from andrea_pl import (
    LanguageModule,
    TransformerConfig,
    Window,
)
from tests.support.toy import A, B, RowLogger, ToyU, fit, halving, window


def gradient_of(batch: Any, **options: Any) -> Tensor:
    """Return the averaged gradient before clipping that one window gives Toy U."""
    _, recorder = fit(ToyU(max_norm=None, **options), [batch])
    gradient = recorder.gradients[0][0]
    assert gradient is not None
    return gradient


class TestTokenWeighting:
    """cases.md, Token weighting."""

    @pytest.mark.parametrize(
        "batch",
        [window(A, B), window(A + B), window([0, 1], [1, 1]), torch.tensor([0, 1, 1, 1])],
        ids=["two", "one", "other cut", "no window"],
    )
    @pytest.mark.guarantee("averaged over tokens")
    def test_any_cut_gives_the_token_mean(self, batch: Any) -> None:
        """transformers#24725, #34191, #35438, #35210, trl#2175: the loss is neither doubled nor halved."""
        _, recorder = fit(ToyU(max_norm=None), [batch])
        assert recorder.gradients[0][0].tolist() == pytest.approx([0.25, -0.25])
        assert float(recorder.reports[0]["loss"]) == pytest.approx(0.693147, abs=1e-6)
        assert float(recorder.reports[0]["grad_norm"]) == pytest.approx(0.353553, abs=1e-6)
        assert recorder.reports[0]["tokens"] == 4

    def test_one_graph_alive(self) -> None:
        """torchtune#1875: the graph of a micro-batch is gone when the next one starts."""
        alive: list[int] = []
        graphs: list[Any] = []

        class Watching(ToyU):
            def loss_sum(self, micro_batch: Any) -> Tensor:
                alive.append(sum(graph() is not None for graph in graphs))
                loss = super().loss_sum(micro_batch)
                graphs.append(weakref.ref(loss))
                return loss

        fit(Watching(), [window(A, B, A, B)])
        assert alive == [0, 0, 0, 0]

    def test_padding_does_not_count(self) -> None:
        """composer#3273: the same four tokens among ignored ones."""
        batch = Window([torch.tensor([[0, -100, -100]]), torch.tensor([[1, 1, 1]]), torch.tensor([[-100]])])
        assert gradient_of(batch).tolist() == pytest.approx([0.25, -0.25])

    def test_ignored_micro_batch(self) -> None:
        """mcore-bridge#104, pytorch#70348: a micro-batch without a label gives no NaN."""
        _, recorder = fit(ToyU(max_norm=None), [window([-100, -100], B)])
        assert recorder.gradients[0][0].tolist() == pytest.approx([0.5, -0.5])
        assert float(recorder.reports[0]["loss"]) == pytest.approx(0.693147, abs=1e-6)

    @pytest.mark.parametrize("order", ["first", "last"])
    @pytest.mark.guarantee("an update without a label changes nothing")
    def test_empty_window_changes_nothing(self, order: str) -> None:
        """mlx-lm#1413: weights, moments and schedule stay, the outcome is `empty`, no NaN is logged."""
        logger = RowLogger()
        module = ToyU(build=lambda p: torch.optim.AdamW(p, lr=0.1), scheduler=halving)
        empty = window([-100], [-100, -100])
        batches = [empty, window(A, B)] if order == "first" else [window(A, B), empty]
        trainer, recorder = fit(module, batches, logger=logger)
        outcomes = [report["outcome"] for report in recorder.reports]
        assert outcomes == (["empty", "applied"] if order == "first" else ["applied", "empty"])
        before = torch.zeros(2) if order == "first" else recorder.weights[0]
        assert torch.equal(recorder.weights[0 if order == "first" else 1], before)
        assert trainer.global_step == 2
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == module.updates_applied == 1
        assert float(trainer.optimizers[0].state[module.b]["step"]) == 1
        assert not any(math.isnan(value) for _, row in logger.rows for value in row.values())
        assert [step for step, _ in logger.series("train/loss")] == ([2] if order == "first" else [1])
        assert [value for _, value in logger.series("train/tokens")] == (
            [0, 4] if order == "first" else [4, 0]
        )

    def test_no_host_read_per_micro_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """transformers#38029: reads on the host do not grow with the micro-batches."""
        reads: list[str] = []
        for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
            original = getattr(Tensor, name)

            def reading(self: Tensor, *args: Any, _original: Any = original, _name: str = name) -> Any:
                reads.append(_name)
                return _original(self, *args)

            monkeypatch.setattr(Tensor, name, reading)

        class Counted(ToyU):
            def count_tokens(self, micro_batch: Any) -> int:
                return len(micro_batch)

        counts = []
        for micro_batches in (2, 20):
            module = Counted()
            fit(module, [window(*[A] * micro_batches)])
            reads.clear()
            fit(Counted(), [window(*[A] * micro_batches)])
            counts.append(len(reads))
        assert counts[0] == counts[1]

    def test_smoothing_is_a_sum_too(self) -> None:
        """transformers#47261: the same gradient for any cut, with label smoothing 0.1."""
        cuts = [window(A, B), window(A + B), window([0, 1], [1], [1])]
        gradients = [gradient_of(cut, smoothing=0.1) for cut in cuts]
        expected = torch.zeros(2, requires_grad=True)
        F.cross_entropy(expected.expand(4, 2), torch.tensor([0, 1, 1, 1]), label_smoothing=0.1).backward()
        for gradient in gradients:
            torch.testing.assert_close(gradient, expected.grad)


def language_module(dtype: torch.dtype) -> LanguageModule:
    """Return a small language model, equal in both precisions up to rounding."""
    torch.manual_seed(7)
    config = TransformerConfig(vocab_size=11, block_size=64, d_model=16, n_heads=2, n_layers=2)
    module = LanguageModule(
        config, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), schedule="constant", max_norm=None
    )
    return module.to(dtype)


def pad_rows(rows: list[Tensor], extra: int) -> dict[str, Tensor]:
    """Pad rows on the right by hand, `extra` columns more than needed; nothing is counted beforehand."""
    width = max(len(row) for row in rows) - 1 + extra
    batch = {
        "input_ids": torch.zeros(len(rows), width, dtype=torch.int64),
        "labels": torch.full((len(rows), width), -100),
        "valid_mask": torch.zeros(len(rows), width, dtype=torch.bool),
    }
    for place, row in enumerate(rows):
        batch["input_ids"][place, : len(row) - 1] = row[:-1]
        batch["labels"][place, : len(row) - 1] = row[1:]
        batch["valid_mask"][place, : len(row) - 1] = True
    return batch


@st.composite
def cuts_of_64(draw: st.DrawFn) -> tuple[list[int], list[tuple[list[int], int]]]:
    """Draw 64 lengths of 1 to 50 labels, an order, and a partition with padding for each part."""
    lengths = draw(st.lists(st.integers(1, 50), min_size=64, max_size=64))
    order = draw(st.permutations(range(64)))
    borders = sorted(draw(st.sets(st.integers(1, 63), max_size=20)))
    parts = [order[start:end] for start, end in zip([0, *borders], [*borders, 64], strict=True)]
    return lengths, [(part, draw(st.integers(0, 3))) for part in parts]


@pytest.mark.system
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@settings(max_examples=15)
@given(case=cuts_of_64())
def test_any_partition_any_padding_any_order(dtype: torch.dtype, tolerance: float, case: Any) -> None:
    """The gradient of a set of sequences does not depend on how the set is cut, padded or ordered."""
    lengths, parts = case
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 11, (length + 1,), generator=generator) for length in lengths]
    batch = Window(pad_rows([rows[number] for number in part], extra) for part, extra in parts)
    _, recorder = fit(language_module(dtype), [batch])
    gradient = torch.cat([each.flatten() for each in recorder.gradients[0] if each is not None]).double()
    exact = language_module(torch.float64).network
    for row in rows:
        loss = F.cross_entropy(exact(row[None, :-1])[0], row[1:], reduction="sum") / sum(lengths)
        loss.backward()
    expected = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    assert float((gradient - expected).norm() / expected.norm()) < tolerance
