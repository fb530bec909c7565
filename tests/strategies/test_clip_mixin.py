"""The clip hook on one device: names, precisions, clippers, exceptions, and other people's modules."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from andrea_callbacks import FiniteGuard, PreClipNorm
from andrea_pl import (
    ClipSingleDeviceStrategy,
    LanguageModule,
    NonFiniteError,
    TransformerConfig,
    UserError,
    Window,
)
from andrea_pl.optim import clipping
from tests.support.toy import NAN, A, B, ListLoader, Recorder, RowLogger, ToyU, build_trainer, fit, window

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning"),
    pytest.mark.filterwarnings("ignore:Precision 16-mixed is not supported"),
]
KINDS = pytest.mark.parametrize("kind", ["torch", "extension"])


def strategy_of(kind: str | None) -> Any:
    return "auto" if kind is None else ClipSingleDeviceStrategy(clipper=kind)  # type: ignore[arg-type]


def adamw(fused: bool) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=fused)


def precision_plugin(name: str) -> list[Any]:
    """Return the plugin of a precision; 16-mixed with a GradScaler on the CPU."""
    if name == "32":
        return []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if name == "16-mixed" else None
    return [MixedPrecision(name, "cpu", scaler=scaler)]


class TestNames:
    def test_registered(self) -> None:
        trainer = build_trainer(strategy="clip_single_device")
        assert isinstance(trainer.strategy, ClipSingleDeviceStrategy)
        assert trainer.strategy.root_device == torch.device("cpu")
        assert trainer.strategy.clipper.kind == "auto"
        for name in ("clip_ddp", "clip_model_parallel"):
            assert type(build_trainer(strategy=name).strategy).strategy_name == name

    def test_one_device_is_meant(self) -> None:
        with pytest.raises(UserError, match="clip_ddp"):
            build_trainer(strategy="clip_single_device", devices=2)

    def test_given_device(self) -> None:
        assert ClipSingleDeviceStrategy(device="cpu").root_device == torch.device("cpu")
        trainer = build_trainer(strategy=ClipSingleDeviceStrategy(device="cpu"), accelerator="auto")
        assert trainer.strategy.root_device == torch.device("cpu")

    def test_unknown_clipper(self) -> None:
        with pytest.raises(UserError, match="got 'gpu'"):
            ClipSingleDeviceStrategy(clipper="gpu")  # type: ignore[arg-type]


class TestPrecisions:
    """Lightning#15501, #21435, #18089, #9694: fused or not, the norm is that of the true gradient."""

    @KINDS
    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("precision", ["32", "bf16-mixed", "16-mixed"])
    def test_norm_of_toy_u(self, kind: str, fused: bool, precision: str) -> None:
        module = ToyU(adamw(fused), max_norm=0.1)
        _, recorder = fit(
            module, [window(A, B)], strategy=strategy_of(kind), plugins=precision_plugin(precision)
        )
        report = recorder.reports[0]
        assert float(report["grad_norm"]) == pytest.approx(0.353553, abs=1e-6)
        assert float(report["grad_norm_clipped"]) == pytest.approx(0.1, abs=1e-6)
        assert float(report["clip_coefficient"]) == pytest.approx(0.282842, abs=1e-6)

    @KINDS
    @pytest.mark.parametrize("fused", [False, True])
    def test_what_reaches_the_moments_is_clipped(self, kind: str, fused: bool) -> None:
        """[0.25, -0.25] clipped at 0.1 is [0.0707, -0.0707], a tenth of which is AdamW's first moment."""
        for precision in ("32", "bf16-mixed", "16-mixed"):
            trainer, _ = fit(
                ToyU(adamw(fused), max_norm=0.1),
                [window(A, B)],
                strategy=strategy_of(kind),
                plugins=precision_plugin(precision),
            )
            (state,) = trainer.optimizers[0].state.values()
            assert state["exp_avg"].tolist() == pytest.approx([0.00707107, -0.00707107], rel=1e-5)

    @pytest.mark.system
    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
    def test_fifty_steps_lose_alike(self, fused: bool, precision: str) -> None:
        """50 updates of a small language model end within 2 % of the same run in float32."""
        losses = []
        for each in ("32", precision):
            _, recorder = train_language(
                "extension", lambda p: torch.optim.AdamW(p, lr=3e-3, fused=fused), precision=each
            )
            losses.append(sum(float(report["loss"]) for report in recorder.reports[-5:]) / 5)
        assert losses[1] == pytest.approx(losses[0], rel=0.02)

    @KINDS
    @pytest.mark.parametrize("fused", [False, True])
    def test_overflow_is_skipped_by_the_scaler(self, kind: str, fused: bool) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        module = ToyU(adamw(fused), max_norm=0.1)
        _, recorder = fit(
            module,
            [Window([(torch.tensor(A), 8.0)]), window(A, B)],
            strategy=strategy_of(kind),
            plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        )
        assert [each["outcome"] for each in recorder.reports] == ["scaler_skip", "applied"]
        assert torch.equal(recorder.weights[0], torch.zeros(2))
        assert float(scaler.get_scale()) == 2.0**126


def train_language(
    kind: str | None, build: Any, precision: str = "32", updates: int = 50, max_norm: float = 0.9
) -> tuple[list[Tensor], Recorder]:
    """Train a small language model on windows of two and return its weights and what was seen."""
    generator = torch.Generator().manual_seed(5)
    starts = torch.randint(0, 19, (updates, 2, 3), generator=generator)
    rows = (starts[..., None] + torch.arange(9)) % 19
    windows = [
        Window(
            [
                {"input_ids": part[:, :-1], "labels": part[:, 1:], "num_tokens": part[:, 1:].numel()}
                for part in each
            ]
        )
        for each in rows
    ]
    torch.manual_seed(6)
    shape = TransformerConfig(vocab_size=19, block_size=8, d_model=16, n_heads=2, n_layers=2)
    module = LanguageModule(shape, optimizer=build, schedule="constant", max_norm=max_norm)
    _, recorder = fit(module, windows, strategy=strategy_of(kind), plugins=precision_plugin(precision))
    assert [each["outcome"] for each in recorder.reports] == ["applied"] * updates
    return [each.detach().double() for each in module.parameters()], recorder


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    gap = sum(float((a - b).square().sum()) for a, b in zip(one, other, strict=True))
    return (gap / sum(float(a.square().sum()) for a in one)) ** 0.5


class TestClippersAgree:
    """The same run with torch, the extension and no strategy of ours."""

    @pytest.mark.system
    @pytest.mark.parametrize(
        ("name", "bound"), [("adamw", 1e-3), ("fused adamw", 1e-3), ("sgd", 1e-6), ("fused sgd", 1e-6)]
    )
    def test_fifty_updates(self, name: str, bound: float) -> None:
        def build(parameters: Any) -> Any:
            fused = name.startswith("fused")
            if name.endswith("adamw"):
                return torch.optim.AdamW(parameters, lr=3e-3, fused=fused)
            return torch.optim.SGD(parameters, lr=0.1, fused=fused)

        runs = {kind: train_language(kind, build) for kind in ("torch", "extension", None)}
        repeated, _ = train_language("extension", build)
        assert all(torch.equal(a, b) for a, b in zip(runs["extension"][0], repeated, strict=True))
        for weights, recorder in runs.values():
            assert distance(runs["extension"][0], weights) < bound
            for gradients, report in zip(recorder.gradients, recorder.reports, strict=True):
                exact = sum(float(each.double().square().sum()) for each in gradients if each is not None)
                assert float(report["grad_norm"]) == pytest.approx(exact**0.5, rel=1e-6)
        clipped = [float(each["clip_coefficient"]) < 1 for each in runs["extension"][1].reports]
        assert any(clipped)
        assert not all(clipped)


class Boom(RuntimeError):
    pass


class Fragile(ToyU):
    """Catches what goes wrong within an update, as a module that survives a lack of memory would."""

    fail_after_clip: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            return super().training_step(batch, batch_idx)
        except Boom:
            return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        if self.fail_after_clip is not None:
            self.fail_after_clip -= 1
            if self.fail_after_clip < 0:
                self.fail_after_clip = None
                raise Boom


class TestAfterABadUpdate:
    """The update after it is that of a run in which the bad one never happened."""

    @pytest.mark.parametrize("kind", ["torch", "extension", None])
    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("precision", ["32", "16-mixed"])
    def test_exception_between_clip_and_step(self, kind: str | None, fused: bool, precision: str) -> None:
        spoiled = Fragile(adamw(fused), max_norm=0.1)
        spoiled.fail_after_clip = 1
        clean = ToyU(adamw(fused), max_norm=0.1)
        fit_all(spoiled, [window(A, B), window(B), window(A)], kind, precision)
        fit_all(clean, [window(A, B), window(A)], kind, precision)
        assert spoiled.updates_applied == 2
        assert torch.equal(spoiled.b, clean.b)

    @pytest.mark.parametrize("kind", ["torch", "extension", None])
    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("precision", ["32", "16-mixed"])
    def test_skipped_three_times_in_a_row(self, kind: str | None, fused: bool, precision: str) -> None:
        """transformers#23905, Lightning#4148: no RuntimeError from a scaler either; weights bitwise equal."""
        bad = [Window([torch.tensor(A), (torch.tensor(B), NAN)])] * 3
        spoiled = ToyU(adamw(fused), max_norm=0.1, on_nonfinite="skip")
        clean = ToyU(adamw(fused), max_norm=0.1)
        fit_all(spoiled, [window(A, B), *bad, window(A), window(B)], kind, precision)
        fit_all(clean, [window(A, B), window(A), window(B)], kind, precision)
        assert (spoiled.updates_applied, spoiled.updates_skipped) == (3, 3)
        assert torch.equal(spoiled.b, clean.b)

    @pytest.mark.parametrize("fused", [False, True])
    def test_a_fit_after_one_that_raised(self, fused: bool) -> None:
        """With the same module, a new trainer and a new scaler."""
        module = ToyU(adamw(fused), max_norm=0.1)
        with pytest.raises(NonFiniteError):
            fit_all(module, [window(A, B), Window([(torch.tensor(B), NAN)])], "torch", "16-mixed")
        fit_all(module, [window(A, B), window(A)], "torch", "16-mixed")
        assert (module.updates_applied, module.updates_skipped) == (2, 0)

    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_overflow_of_the_first_update(self, fused: bool, momentum: float) -> None:
        """Normal at the start of a run; fused SGD would take memory as it was for its momentum."""

        def build(parameters: Any) -> Any:
            return torch.optim.SGD(parameters, lr=0.1, momentum=momentum, fused=fused)

        poison()
        weights = []
        for scale, first in ((2.0**127, [Window([(torch.tensor(A), 8.0)])]), (2.0**10, [])):
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            module = ToyU(build, max_norm=0.1)
            build_trainer(
                strategy=strategy_of("extension"), plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)]
            ).fit(module, ListLoader([*first, window(A, B), window(A)]))
            weights.append(module.b.detach())
        assert torch.equal(*weights)


def poison() -> None:
    """Have small tensors that are allocated and never written hold NaN."""
    kept = [torch.full((2,), NAN) for _ in range(2000)]
    del kept


def fit_all(module: Any, windows: list[Any], kind: str | None, precision: str = "32") -> None:
    trainer = build_trainer(strategy=strategy_of(kind), plugins=precision_plugin(precision))
    trainer.fit(module, ListLoader(windows))


BY_VALUE = {"gradient_clip_val": 0.3, "gradient_clip_algorithm": "value"}


class Foreign(BoringModel):
    """Automatic optimization in a project that knows nothing of ours."""

    def __init__(self, fused: bool = False) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.fused = fused

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, fused=self.fused)


class Measuring(Foreign):
    """Notes the norm that a clip leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        gradients = [each.grad for each in self.parameters() if each.grad is not None]
        self.norms.append(float(nn.utils.get_total_norm(gradients)))


class TestAutomaticOptimization:
    @KINDS
    def test_same_as_lightning(self, kind: str) -> None:
        ours, theirs = Measuring(), Measuring()
        for module, strategy in ((ours, strategy_of(kind)), (theirs, "auto")):
            torch.manual_seed(2)
            build_trainer(
                strategy=strategy, gradient_clip_val=0.3, limit_train_batches=6, limit_val_batches=0
            ).fit(module)
        assert ours.norms == pytest.approx(theirs.norms, rel=1e-5)
        assert max(ours.norms) == pytest.approx(0.3, rel=1e-5)
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, two)

    @KINDS
    @pytest.mark.parametrize("precision", ["32", "bf16-mixed", "16-mixed"])
    def test_fused_optimizers_are_not_refused(self, kind: str, precision: str) -> None:
        """Lightning#15501: clipped within the step, after the scaler's division."""
        moved = []
        for fused in (False, True):
            torch.manual_seed(2)
            module = Foreign(fused)
            logger = RowLogger()
            build_trainer(
                strategy=strategy_of(kind),
                plugins=precision_plugin(precision),
                gradient_clip_val=0.3,
                limit_train_batches=6,
                limit_val_batches=0,
                callbacks=[PreClipNorm(), FiniteGuard()],
                logger=logger,
            ).fit(module)
            moved.append([each.detach().clone() for each in module.parameters()])
            assert len(logger.series("train/grad_norm")) == 6
            assert max(value for _, value in logger.series("train/grad_norm_clipped")) <= 0.3 + 1e-6
        for one, two in zip(*moved, strict=True):
            torch.testing.assert_close(one, two)

    def test_the_norm_is_measured_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        strategy = strategy_of("extension")
        calls: list[int] = []
        norms = strategy.clipper._norms
        original = norms._measure
        monkeypatch.setattr(norms, "_measure", lambda tensors: (calls.append(1), original(tensors))[1])
        callbacks = [PreClipNorm(), FiniteGuard()]
        build_trainer(
            strategy=strategy,
            gradient_clip_val=0.3,
            limit_train_batches=6,
            limit_val_batches=0,
            callbacks=callbacks,
        ).fit(Foreign())
        assert len(calls) == 6

    def test_a_hold_is_lifted_by_nobody(self) -> None:
        """Lightning asks for a clip by 0 after every hook, where there is no bound."""

        class Holds(Foreign):
            def on_before_optimizer_step(self, optimizer: Any) -> None:
                self.trainer.strategy.clip_gradients(optimizer, 0.1, torch.ones(()))

        for options in ({}, {"gradient_clip_val": 0.3}, BY_VALUE):
            module = Holds(fused=True)
            before = [each.detach().clone() for each in module.parameters()]
            build_trainer(
                strategy=strategy_of("torch"), limit_train_batches=2, limit_val_batches=0, **options
            ).fit(module)
            assert all(map(torch.equal, before, module.parameters()))

    def test_by_value_stays_lightning_s(self) -> None:
        module = Measuring()
        build_trainer(
            strategy=strategy_of("torch"),
            gradient_clip_val=0.01,
            gradient_clip_algorithm="value",
            limit_train_batches=2,
            limit_val_batches=0,
        ).fit(module)
        assert max(module.norms) <= 0.01 * 66**0.5 + 1e-6

    def test_the_plugin_is_given_back(self) -> None:
        """A precision plugin may serve another trainer, with another strategy."""
        (plugin,) = precision_plugin("16-mixed")
        build_trainer(strategy=strategy_of("torch"), plugins=[plugin], max_steps=1, limit_val_batches=0).fit(
            Foreign()
        )
        assert not {"clip_gradients", "unscale_"} & (vars(plugin).keys() | vars(plugin.scaler).keys())

    def test_nothing_is_built_to_predict(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        monkeypatch.setattr(clipping, "load_extension", lambda device: pytest.fail("it was"))
        build_trainer(strategy=strategy_of("extension"), limit_predict_batches=1).predict(Foreign())

    def test_scaler_state_is_that_of_the_stock_plugin(self, tmp_path: Any) -> None:
        """A checkpoint of a stock strategy carries the scale over."""
        plain = build_trainer(
            plugins=precision_plugin("16-mixed"), limit_train_batches=1, limit_val_batches=0
        )
        plain.fit(Foreign())
        plain.precision_plugin.scaler.update(64.0)
        plain.save_checkpoint(tmp_path / "stock.ckpt")
        ours = build_trainer(
            strategy=strategy_of("torch"),
            plugins=precision_plugin("16-mixed"),
            max_steps=2,
            limit_val_batches=0,
        )
        ours.fit(Foreign(), ckpt_path=tmp_path / "stock.ckpt")
        assert ours.precision_plugin.scaler.get_scale() == 64.0


def test_weights_do_not_depend_on_watching() -> None:
    """Callbacks that ask for the norm change nothing, bit for bit."""

    class Asks(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            norm = trainer.strategy.gradient_norm(optimizer)
            assert float(norm.total) > 0
            assert len(norm.per_parameter) == len(norm.parameters) == 1

    weights = []
    for callbacks in ([], [Asks()]):
        module = ToyU(adamw(True), max_norm=0.1)
        fit(module, [window(A, B), window(A)], strategy=strategy_of("extension"), callbacks=callbacks)
        weights.append(module.b.detach())
    assert torch.equal(*weights)


def test_a_stock_strategy_has_no_hook() -> None:
    assert not hasattr(SingleDeviceStrategy("cpu"), "gradient_norm")


def test_parameters_instead_of_an_optimizer() -> None:
    """The strategy's hook takes what its clipper takes: a generator, here."""
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    strategy = ClipSingleDeviceStrategy("torch")
    assert float(strategy.gradient_norm(layer.parameters()).total) == 5.0
    strategy.clip_gradients(layer.parameters(), 1.0)
    assert layer.weight.grad.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]]
