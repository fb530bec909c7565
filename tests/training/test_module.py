"""The update: token weighting, windows and tails, clipping, the axis, NaN and Inf.

Every test that stands for a public report names it.
"""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from andrea_callbacks import GradientNorm, UpdateLog
from andrea_pl import (
    TokenWeightedModule,
    UserError,
    Window,
    WindowLoader,
)
from tests.support.toy import (
    INF,
    NAN,
    A,
    B,
    ListLoader,
    Recorder,
    RowLogger,
    ToyU,
    build_trainer,
    fit,
    halving,
    labels,
    micro_batches,
    scaler_plugin,
    window,
)


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

    @pytest.mark.guarantee("averaged over tokens")
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

    @pytest.mark.guarantee("clipped once by one global norm")
    def test_toy(self) -> None:
        module = ToyU(max_norm=0.1)
        _, recorder = fit(module, [window(A, B)])
        report = recorder.reports[0]
        assert recorder.gradients[0][0].tolist() == pytest.approx([0.25, -0.25])
        assert float(report["clip_coefficient"]) == pytest.approx(0.282842, abs=1e-6)
        assert (-module.b.detach()).tolist() == pytest.approx([0.0707, -0.0707], abs=1e-4)
        assert float(report["grad_norm"]) == pytest.approx(0.353553, abs=1e-6)
        assert float(report["grad_norm_clipped"]) == pytest.approx(0.1)

    @pytest.mark.guarantee("clipped once by one global norm")
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
        with pytest.raises(UserError, match="`max_norm` must be more than 0"):
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

    @pytest.mark.guarantee("clipped once by one global norm")
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


class TestWatching:
    """design.md: watching never changes training."""

    @pytest.mark.guarantee("watching changes nothing")
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
