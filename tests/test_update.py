"""The update: token weighting, windows and tails, clipping, the axis, NaN and Inf.

Every test that stands for a public report names it.
"""

import copy
import math
import warnings
import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from andrea_callbacks import GradientNorm, UpdateLog
from andrea_pl import (
    LanguageModule,
    NonFiniteError,
    TokenWeightedModule,
    TransformerConfig,
    UserError,
    Window,
    WindowLoader,
)
from toy import ListLoader, Recorder, RowLogger, ToyU, build_trainer, fit, labels, window

A, B = [0], [1, 1, 1]
NAN, INF = float("nan"), float("inf")


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


def halving(optimizer: Any) -> Any:
    """Return a schedule of 1 / (k + 1)."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda index: 1 / (index + 1))


def micro_batches(count: int) -> DataLoader[Any]:
    """Return a DataLoader of micro-batches of one label."""
    return DataLoader(list(torch.zeros(count, 1, dtype=torch.int64)), batch_size=1)


class TestWindowsAndTails:
    """cases.md, Windows and tails."""

    def test_ten_by_four(self) -> None:
        """Lightning#4653, #1549: 4 + 4 + 2; two epochs give 6 updates."""
        module = ToyU()
        trainer, recorder = fit(module, WindowLoader(micro_batches(10), 4), max_epochs=2)
        assert [report["tokens"] for report in recorder.reports] == [4, 4, 2, 4, 4, 2]
        assert trainer.global_step == 6

    def test_six_by_four(self) -> None:
        """Lightning#1549: 4, 2, 4, 2."""
        _, recorder = fit(ToyU(), WindowLoader(micro_batches(6), 4), max_epochs=2)
        assert [report["tokens"] for report in recorder.reports] == [4, 2, 4, 2]

    def test_tail_is_not_diluted(self) -> None:
        """Lightning#19987, transformers#39659: a tail [0] has norm 0.707107, not 0.176777."""
        _, recorder = fit(ToyU(max_norm=None), [window(A)])
        assert float(recorder.reports[0]["grad_norm"]) == pytest.approx(0.707107, abs=1e-6)

    def test_epoch_shorter_than_a_window(self) -> None:
        """Lightning#21808: one shorter update an epoch and one warning."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, recorder = fit(ToyU(), WindowLoader(micro_batches(3), 4), max_epochs=2)
        assert [report["tokens"] for report in recorder.reports] == [3, 3]
        assert sum("shorter update" in str(each.message) for each in caught) == 1

    def test_max_steps_counts_updates(self) -> None:
        """Lightning#19684, #14527: 33 batches of one by 32 are 32 and 1; max_steps=1 stops after 32."""
        _, recorder = fit(ToyU(), WindowLoader(micro_batches(33), 32))
        assert [report["tokens"] for report in recorder.reports] == [32, 1]
        trainer, recorder = fit(ToyU(), WindowLoader(micro_batches(33), 32), max_steps=1)
        assert [report["tokens"] for report in recorder.reports] == [32]
        assert trainer.global_step == 1

    def test_validation_does_not_touch_gradients(self) -> None:
        """Lightning#18713: norms are identical with and without validation after every update."""

        class Validating(ToyU):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.loss_sum(batch)

        norms = []
        for module, options in ((ToyU(), {}), (Validating(), {"val_check_interval": 1})):
            recorder = Recorder()
            trainer = build_trainer(callbacks=[recorder], **options)
            batches = ListLoader([window(A, B), window(B, B), window(A, A)])
            trainer.fit(module, batches, ListLoader(labels(A, B)) if options else None)
            norms.append([float(report["grad_norm"]) for report in recorder.reports])
        assert norms[0] == norms[1]

    def test_empty_list_is_refused(self) -> None:
        with pytest.raises(UserError, match="at least one micro-batch"):
            fit(ToyU(), [Window()])


class TwoGroups(TokenWeightedModule):
    """Parameters with given gradients, in groups."""

    def __init__(self, gradients: list[list[Tensor]], build: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.targets = gradients
        self.groups = nn.ModuleList(
            nn.ParameterList(nn.Parameter(torch.zeros_like(each)) for each in group) for group in gradients
        )
        self.build = build or (lambda groups: torch.optim.SGD(groups, lr=1.0))

    def count_tokens(self, micro_batch: Any) -> int:
        return 1

    def loss_sum(self, micro_batch: Any) -> Tensor:
        pairs = zip(self.groups, self.targets, strict=True)
        return sum(((p * g).sum() for ps, gs in pairs for p, g in zip(ps, gs, strict=True)), torch.zeros(()))

    def configure_optimizers(self) -> Any:
        return self.build([{"params": list(group)} for group in self.groups])

    def steps(self) -> list[list[float]]:
        """Return what SGD at rate 1 subtracted: the gradients after the clip."""
        return [(-p.detach()).tolist() for group in self.groups for p in group]


class TestClipping:
    """cases.md, Clipping."""

    def test_toy(self) -> None:
        module = ToyU(max_norm=0.1)
        _, recorder = fit(module, [window(A, B)])
        report = recorder.reports[0]
        assert recorder.gradients[0][0].tolist() == pytest.approx([0.25, -0.25])
        assert float(report["clip_coefficient"]) == pytest.approx(0.282842, abs=1e-6)
        assert (-module.b.detach()).tolist() == pytest.approx([0.0707, -0.0707], abs=1e-4)
        assert float(report["grad_norm"]) == pytest.approx(0.353553, abs=1e-6)
        assert float(report["grad_norm_clipped"]) == pytest.approx(0.1)

    def test_once_per_window(self) -> None:
        """transformers#1563, lingua#59: the sum is clipped, not its parts."""

        class Given(TwoGroups):
            def loss_sum(self, micro_batch: Any) -> Tensor:
                return (self.groups[0][0] * micro_batch).sum()

        module = Given([[torch.zeros(2)]], max_norm=1.0)
        fit(module, [Window([torch.tensor([4.0, 0.0]), torch.tensor([0.0, 4.0])])])
        assert module.steps()[0] == pytest.approx([0.7071, 0.7071], abs=1e-4)

    @pytest.mark.parametrize("fused", [False, True])
    def test_scaled_gradients(self, fused: bool) -> None:
        """Lightning#18089, #9694, #15501, #21435: under a scaler the recorded norm is that of fp32."""
        losses, norms = [], []
        for plugin in (None, scaler_plugin(1024.0)):
            module = ToyU(build=lambda p: torch.optim.SGD(p, lr=0.5, fused=fused), max_norm=0.1)
            options = {} if plugin is None else {"plugins": [plugin]}
            _, recorder = fit(module, [window(A, B)] * 50, **options)
            assert float(recorder.reports[0]["grad_norm"]) == pytest.approx(0.353553, abs=1e-6)
            assert {report["outcome"] for report in recorder.reports} == {"applied"}
            losses.append([float(report["loss"]) for report in recorder.reports])
            norms.append([float(report["grad_norm"]) for report in recorder.reports])
        assert norms[1] == pytest.approx(norms[0], rel=0.02)
        assert losses[1] == pytest.approx(losses[0], rel=0.02)

    @pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
    def test_fused_adamw(self, precision: Any) -> None:
        """Lightning#15501, #21435: fused AdamW is clipped by the true norm."""
        module = ToyU(build=lambda p: torch.optim.AdamW(p, lr=0.05, fused=True))
        _, recorder = fit(module, [window(A, B)], precision=precision)
        assert float(recorder.reports[0]["grad_norm"]) == pytest.approx(0.353553, abs=1e-6)

    def test_skips_in_a_row_under_a_scaler(self) -> None:
        """transformers#23905, Lightning#4148: three skipped windows and then a good one raise nothing."""
        module = ToyU(on_nonfinite="skip")
        bad = Window([(torch.tensor(A), NAN)])
        batches = [bad, bad, bad, window(A, B)]
        with pytest.warns(UserWarning, match="not finite"):
            _, recorder = fit(module, batches, plugins=[scaler_plugin(1024.0)])
        assert [report["outcome"] for report in recorder.reports] == ["nonfinite_skip"] * 3 + ["applied"]
        assert torch.equal(recorder.weights[2], torch.zeros(2))

    def test_infinite_element(self) -> None:
        """pytorch#46849, #53843: [1, inf, 2, 3] is flagged, weights are untouched, no NaN appears in them."""
        module = TwoGroups([[torch.tensor([1.0, INF, 2.0, 3.0])]], on_nonfinite="skip")
        with pytest.warns(UserWarning, match=r"gradient of groups\.0\.0"):
            _, recorder = fit(module, [Window([0])])
        assert recorder.reports[0]["outcome"] == "nonfinite_skip"
        assert torch.equal(recorder.weights[0], torch.zeros(4))

    def test_huge_but_finite(self) -> None:
        """pytorch#46849: four times 1e20 has norm 2e20 and is clipped, not zeroed."""
        module = TwoGroups([[torch.full((4,), 1e20)]])
        _, recorder = fit(module, [Window([0])])
        assert float(recorder.reports[0]["grad_norm"]) == pytest.approx(2e20, rel=1e-6)
        assert module.steps()[0] == pytest.approx([0.5] * 4)

    @pytest.mark.parametrize("value", [-1.0, 0.0, NAN, INF])
    def test_bad_threshold(self, value: float) -> None:
        """pytorch#31367: refused at construction."""
        with pytest.raises(UserError, match="max_norm must be more than 0"):
            ToyU(max_norm=value)

    def test_none_records_without_clipping(self) -> None:
        """pytorch#31367: None records and leaves the gradient alone."""
        module = TwoGroups([[torch.tensor([30.0, 40.0])]], max_norm=None)
        _, recorder = fit(module, [Window([0])])
        assert float(recorder.reports[0]["grad_norm"]) == 50.0
        assert float(recorder.reports[0]["clip_coefficient"]) == 1.0
        assert module.steps()[0] == [30.0, 40.0]

    def test_tied_weights_count_once(self) -> None:
        """Megatron#7227: ones(4) listed in two groups has norm 2 and is clipped to 0.5 each."""

        class Tied(TwoGroups):
            def configure_optimizers(self) -> Any:
                shared = self.groups[0][0]
                optimizer = torch.optim.SGD([{"params": [shared]}], lr=1.0)
                optimizer.param_groups.append({**optimizer.param_groups[0], "params": [shared], "lr": 0.0})
                return optimizer

        module = Tied([[torch.ones(4)]])
        _, recorder = fit(module, [Window([0])])
        assert float(recorder.reports[0]["grad_norm"]) == pytest.approx(2.0)
        assert module.steps()[0] == pytest.approx([0.5] * 4)

    def test_global_over_groups(self) -> None:
        """transformers#614: gradients 3 and 4 in two groups are clipped by norm 5."""
        module = TwoGroups([[torch.tensor([3.0])], [torch.tensor([4.0])]])
        _, recorder = fit(module, [Window([0])])
        assert float(recorder.reports[0]["grad_norm"]) == pytest.approx(5.0)
        assert [step[0] for step in module.steps()] == pytest.approx([0.6, 0.8])

    def test_sparse(self) -> None:
        """pytorch#4829: rows 1, 1, 2 of a sparse embedding: sqrt(3 * 4 + 3 * 1) = 3.872983."""

        class Sparse(TokenWeightedModule):
            def __init__(self) -> None:
                super().__init__(max_norm=1.0)
                self.rows = nn.Embedding(4, 3, sparse=True)

            def count_tokens(self, micro_batch: Any) -> int:
                return 1

            def loss_sum(self, micro_batch: Any) -> Tensor:
                return self.rows(micro_batch).sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=1.0)

        module = Sparse()
        start = module.rows.weight.detach().clone()
        _, recorder = fit(module, [Window([torch.tensor([1, 1, 2])])])
        assert float(recorder.reports[0]["grad_norm"]) == pytest.approx(3.872983, abs=1e-6)
        assert float((start - module.rows.weight.detach()).norm()) == pytest.approx(1.0, abs=1e-6)

    def test_below_the_threshold_bitwise(self) -> None:
        gradient = torch.rand(1000)
        module = TwoGroups([[gradient / gradient.norm() * 0.999]])
        before = module.targets[0][0].clone()
        fit(module, [Window([0])])
        assert torch.equal(-module.groups[0][0].detach(), before)

    def test_names_say_which_norm(self) -> None:
        """Lightning#12595, #18669: both norms and the coefficient are logged under names that say which."""
        logger = RowLogger()
        fit(ToyU(max_norm=0.1), [window(A, B)], logger=logger)
        row = {name: value for _, part in logger.rows for name, value in part.items()}
        assert row["train/grad_norm"] == pytest.approx(0.353553, abs=1e-6)
        assert row["train/grad_norm_clipped"] == pytest.approx(0.1)
        assert row["train/clip_coefficient"] == pytest.approx(0.282842, abs=1e-6)

    def test_strategy_hook(self) -> None:
        """A strategy that offers the hook measures and clips."""
        calls: list[str] = []

        class Clipping(SingleDeviceStrategy):
            def gradient_norm(self, optimizer: Any) -> GradientNorm:
                calls.append("norm")
                parameters = tuple(optimizer.param_groups[0]["params"])
                rows = torch.tensor([[9.0, 0.0]], dtype=torch.float64)
                return GradientNorm(total=rows[0, 0].sqrt(), parameters=parameters, rows=rows)

            def clip_gradients(self, optimizer: Any, max_norm: float, hold: Tensor | None = None) -> Tensor:
                calls.append(f"clip {max_norm}")
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad.zero_()
                return torch.tensor(max_norm / 3.0, dtype=torch.float64)

        module = ToyU(max_norm=0.5)
        _, recorder = fit(module, [window(A, B)], strategy=Clipping("cpu"))
        assert calls == ["norm", "norm", "clip 0.5"]  # for a callback and for the clip; ours keep it
        assert float(recorder.reports[0]["grad_norm"]) == 3.0
        assert torch.equal(module.b.detach(), torch.zeros(2))


def scaler_plugin(scale: float) -> MixedPrecision:
    """Return 16-mixed with a GradScaler on the CPU."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))


class TestAxis:
    """cases.md, Axis, schedule, logging."""

    def test_rows_at_every_update(self) -> None:
        """Lightning#17958, #835, #4304, #1923: rows at 1, 2, 3 once each, whatever log_every_n_steps is."""
        for every in (1, 50):
            logger = RowLogger()
            fit(ToyU(), WindowLoader(micro_batches(10), 4), logger=logger, log_every_n_steps=every)
            rows = [step for step, row in logger.rows if "train/loss" in row]
            assert rows == [1, 2, 3]
            for name in ("tokens", "grad_norm", "grad_norm_clipped", "clip_coefficient", "lr", "skipped"):
                assert [step for step, _ in logger.series(f"train/{name}")] == [1, 2, 3]

    def test_rate_of_the_update(self) -> None:
        """Lightning#19275, litgpt#926: (1, 1.0), (2, 0.5), (3, 0.3333)."""
        logger = RowLogger()
        fit(ToyU(scheduler=halving), WindowLoader(micro_batches(10), 4), logger=logger)
        assert logger.series("train/lr") == [(1, 1.0), (2, 0.5), (3, pytest.approx(0.3333, abs=1e-4))]

    @pytest.mark.parametrize("loggers", [False, None, []])
    def test_without_loggers(self, loggers: Any) -> None:
        """Lightning#7206: none at all."""
        trainer, _ = fit(ToyU(), [window(A)], logger=loggers)
        assert trainer.global_step == 1

    def test_several_loggers(self) -> None:
        """Lightning#7206: several get the same rows."""
        loggers = [RowLogger("one"), RowLogger("two")]
        fit(ToyU(), [window(A), window(B)], logger=loggers)
        assert loggers[0].rows == loggers[1].rows
        assert [step for step, _ in loggers[0].series("train/loss")] == [1, 2]

    def test_scheduler_counts_updates(self) -> None:
        """Lightning#1476, #6379: `last_epoch` equals the updates that changed weights."""
        module = ToyU(scheduler=halving)
        trainer, _ = fit(module, WindowLoader(micro_batches(10), 4))
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == module.updates_applied == 3

    def test_skipped_step_holds_the_schedule(self) -> None:
        """Lightning#16228, pytorch#44511: first window Inf: `last_epoch` 0, skipped 1, no warning."""
        module = ToyU(scheduler=halving, on_nonfinite="skip")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer, recorder = fit(module, [Window([(torch.tensor(A), INF)])])
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 0
        assert recorder.reports[0]["skipped"] == 1
        assert not any("lr_scheduler" in str(each.message) for each in caught)

    def test_global_step_and_checkpoint(self, tmp_path: Any) -> None:
        """Lightning#16143, #17281: `global_step` 3, and a checkpoint with every_n_train_steps=1."""
        saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
        trainer, _ = fit(
            ToyU(), WindowLoader(micro_batches(10), 4), callbacks=[saving], enable_checkpointing=True
        )
        assert trainer.global_step == 3
        assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
            f"epoch=0-step={step}.ckpt" for step in (1, 2, 3)
        ]

    def test_bad_update_is_shown(self) -> None:
        """trl#6702: loss NaN and a counter of 1, at the update."""
        logger = RowLogger()
        with pytest.warns(UserWarning, match="not finite"):
            fit(
                ToyU(on_nonfinite="skip"),
                [window(A), Window([(torch.tensor(A), NAN)]), window(B)],
                logger=logger,
            )
        losses = logger.series("train/loss")
        assert [step for step, value in losses if math.isnan(value)] == [2]
        assert logger.series("train/skipped") == [(1, 0), (2, 1), (3, 1)]

    def test_bad_update_is_shown_when_it_raises(self) -> None:
        """trl#6702: also where the run stops there."""
        logger = RowLogger()
        with pytest.warns(UserWarning, match="not finite"), pytest.raises(NonFiniteError):
            fit(ToyU(), [window(A), Window([(torch.tensor(A), NAN)])], logger=logger)
        assert [step for step, _ in logger.series("train/loss")] == [1, 2]
        assert math.isnan(logger.series("train/loss")[1][1])
        assert logger.series("train/skipped")[-1] == (2, 1)


class TestNonFinite:
    """cases.md, NaN and Inf."""

    def test_names_update_and_micro_batch(self) -> None:
        """Lightning#12344: NaN in the second micro-batch of window 1."""
        batch = Window([torch.tensor(A), (torch.tensor(B), NAN)])
        with pytest.warns(UserWarning, match="update 1"), pytest.raises(NonFiniteError) as caught:
            fit(ToyU(), [batch])
        assert "update 1" in str(caught.value)
        assert "micro-batch 2 of 2 (nan)" in str(caught.value)
        assert "gradient of b" in str(caught.value)

    def test_infinite_loss(self) -> None:
        """pytorch#83537: a loss times Inf is flagged as Inf."""
        with (
            pytest.warns(UserWarning, match=r"micro-batch 1 of 1 \(inf\)"),
            pytest.raises(NonFiniteError, match="inf"),
        ):
            fit(ToyU(), [Window([(torch.tensor(A), INF)])])

    def test_raise_leaves_everything(self, tmp_path: Any) -> None:
        """pocket-tts#262: weights, moments and schedule as before, and no checkpoint of a poisoned state."""
        module = ToyU(build=lambda p: torch.optim.AdamW(p, lr=0.1), scheduler=halving)
        recorder = Recorder()
        saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
        trainer = build_trainer(callbacks=[recorder, saving], enable_checkpointing=True)
        state: dict[str, Any] = {}

        class Keep(pl.Callback):
            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                state["optimizer"] = copy.deepcopy(trainer.optimizers[0].state_dict())

        trainer.callbacks.append(Keep())
        with pytest.warns(UserWarning, match="not finite"), pytest.raises(NonFiniteError):
            trainer.fit(module, ListLoader([window(A, B), Window([(torch.tensor(A), NAN)])]))
        assert torch.equal(module.b.detach(), recorder.weights[0])
        after = trainer.optimizers[0].state_dict()["state"][0]
        before = state["optimizer"]["state"][0]
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1
        assert [path.name for path in (tmp_path / "saved").iterdir()] == ["epoch=0-step=1.ckpt"]

    def test_skip_leaves_optimizer_state(self) -> None:
        """flaxchat#6: a skipped window leaves optimizer state and later weights bitwise unchanged."""
        bad = Window([(torch.tensor(A), NAN)])
        results = []
        for batches in ([window(A, B), window(B)], [window(A, B), bad, window(B)]):
            module = ToyU(
                build=lambda p: torch.optim.AdamW(p, lr=0.1), scheduler=halving, on_nonfinite="skip"
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer, _ = fit(module, batches)
            results.append((module.b.detach(), trainer.optimizers[0].state_dict()["state"][0]))
        assert torch.equal(results[0][0], results[1][0])
        assert all(torch.equal(results[0][1][key], results[1][1][key]) for key in results[0][1])

    def test_too_many_skips_in_a_row(self) -> None:
        bad = Window([(torch.tensor(A), NAN)])
        module = ToyU(on_nonfinite="skip", max_consecutive_skips=2)
        with (
            pytest.warns(UserWarning, match="not finite"),
            pytest.raises(NonFiniteError, match="max_consecutive_skips=2"),
        ):
            fit(module, [bad, bad, window(A), bad, bad, bad])
        assert module.updates_skipped == 5

    def test_clean_updates_after_a_bad_one(self) -> None:
        """OLMo-core, ZClip, llm.c: the next 100 clean updates are neither skipped nor flagged."""
        logger = RowLogger()
        batches = [Window([(torch.tensor(A), NAN)]), *[window(A, B)] * 100]
        with pytest.warns(UserWarning, match="update 1"):
            _, recorder = fit(ToyU(on_nonfinite="skip"), batches, logger=logger)
        assert [report["outcome"] for report in recorder.reports[1:]] == ["applied"] * 100
        assert {value for _, value in logger.series("train/nonfinite")} == {1.0}
        assert math.isfinite(logger.series("train/clipped_share")[-1][1])

    def test_overflow_under_a_scaler(self) -> None:
        """design.md: finite loss and Inf gradient under a scaler are normal, counted, and lower the scale."""

        class Overflowing(ToyU):
            def loss_sum(self, micro_batch: Any) -> Tensor:
                loss = super().loss_sum(micro_batch)
                if self.trainer.precision_plugin.scaler.get_scale() > 256:
                    loss = loss + (self.b * float("inf")).nan_to_num(0.0, 0.0, 0.0).sum()
                    loss.register_hook(lambda gradient: gradient * INF)
                return loss

        logger = RowLogger()
        module = Overflowing(scheduler=halving)
        trainer, recorder = fit(module, [window(A, B)] * 4, plugins=[scaler_plugin(1024.0)], logger=logger)
        outcomes = [report["outcome"] for report in recorder.reports]
        assert outcomes == ["scaler_skip", "scaler_skip", "applied", "applied"]
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2
        assert [value for _, value in logger.series("train/loss_scale")] == [512, 256, 256, 256]
        assert torch.equal(recorder.weights[1], torch.zeros(2))

    def test_falling_scale(self) -> None:
        """fairseq#4555: the scale is logged, warned about while it falls, and its end raises."""

        class Overflowing(ToyU):
            def loss_sum(self, micro_batch: Any) -> Tensor:
                loss = super().loss_sum(micro_batch)
                loss.register_hook(lambda gradient: gradient * INF)
                return loss

        module = Overflowing(min_loss_scale=16.0)
        with (
            pytest.warns(UserWarning, match="update 7: the gradient of b is not finite"),
            pytest.warns(UserWarning, match="keeps falling"),
            pytest.raises(NonFiniteError, match="the loss scale is down to 16"),
        ):
            fit(module, [window(A, B)] * 20, plugins=[scaler_plugin(1024.0)])

    def test_empty_window_under_a_scaler(self) -> None:
        module = ToyU()
        _, recorder = fit(module, [window([-100]), window(A, B)], plugins=[scaler_plugin(1024.0)])
        assert [report["outcome"] for report in recorder.reports] == ["empty", "applied"]


class TestExceptions:
    """An exception within an update leaves nothing behind for the next."""

    def test_half_an_update_is_forgotten(self) -> None:
        class Failing(ToyU):
            fails = True

            def loss_sum(self, micro_batch: Any) -> Tensor:
                if isinstance(micro_batch, tuple) and self.fails:
                    raise KeyError("out of memory, say")
                return super().loss_sum(micro_batch)

        module = Failing(max_norm=None)
        with pytest.raises(KeyError):
            fit(module, [Window([torch.tensor(B), (torch.tensor(A), 1.0)])])
        assert module.b.grad is not None
        module.fails = False
        _, recorder = fit(module, [window(A, B)])
        assert recorder.gradients[0][0].tolist() == pytest.approx([0.25, -0.25])


class TestRefusals:
    """What cannot work is refused with the name of what to use."""

    @pytest.mark.parametrize(
        ("options", "remedy"),
        [
            ({"gradient_clip_val": 1.0}, "model.max_norm"),
            ({"gradient_clip_val": 0}, "model.max_norm"),
            ({"gradient_clip_algorithm": "norm"}, "model.max_norm"),
            ({"accumulate_grad_batches": 2}, "data.sequences_per_update"),
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


class TestWatching:
    """design.md: watching never changes training."""

    def test_callbacks_change_no_weight(self) -> None:
        class Bare(ToyU):
            def configure_callbacks(self) -> list[Any]:
                return []

        batches = [window(A, B), window(B), window(A)] * 5
        results = []
        for kind in (Bare, ToyU):
            module = kind(build=lambda p: torch.optim.AdamW(p, lr=0.1), max_norm=0.1)
            fit(module, batches, logger=RowLogger())
            results.append(module.b.detach())
        assert torch.equal(results[0], results[1])

    def test_user_callbacks_are_kept(self) -> None:
        mine = UpdateLog()
        trainer, _ = fit(ToyU(), [window(A)], callbacks=[mine])
        assert [each for each in trainer.callbacks if isinstance(each, UpdateLog)] == [mine]

    def test_counters_survive_a_checkpoint(self, tmp_path: Any) -> None:
        """stable-pretraining#388: weights_only=True takes a checkpoint with every callback on."""
        module = ToyU(on_nonfinite="skip", scheduler=halving)
        bad = Window([(torch.tensor(A), NAN)])
        with pytest.warns(UserWarning, match="not finite"):
            trainer, _ = fit(module, [window(A), bad, window(B)])
        path = tmp_path / "counters.ckpt"
        trainer.save_checkpoint(path)
        torch.load(path, weights_only=True)
        again = ToyU(on_nonfinite="skip", scheduler=halving)
        build_trainer(max_epochs=1).fit(again, ListLoader([window(A)] * 3), ckpt_path=path)
        assert (again.updates_applied, again.updates_skipped) == (2, 1)
