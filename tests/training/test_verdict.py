"""Updates that the device judges, as an accelerator does; on CPU tensors, read when it would read."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from andrea_callbacks import EpochSummary, FiniteGuard, PreClipNorm
from andrea_callbacks.numerics.host_transfer import HostCopy
from andrea_callbacks.numerics.scheduler_rollback import ScheduleMove
from andrea_pl import ClipSingleDeviceStrategy, NonFiniteError, Window
from andrea_pl.optim import Clipper
from tests.support.toy import INF, NAN, A, B, ListLoader, RowLogger, ToyU, build_trainer, window

BAD = Window([torch.tensor(A), (torch.tensor(B), NAN)])
BAD_GRADIENT = Window([(torch.tensor(A), INF)])

pytestmark = pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning")


@pytest.fixture
def deferring(read_late: Any) -> None:
    """Take the CPU for a device that judges by itself."""
    read_late()


def fused(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def halving(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda index: 0.5**index)


class Reports(pl.Callback):
    """Takes reports as they are published, and what a training step returns."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.returned: list[str] = []

    def take_report(self, trainer: Any, report: Any) -> None:
        self.taken.append(dict(report))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.returned.append(outputs["outcome"])


def run(module: Any, windows: list[Any], **options: Any) -> Reports:
    reports = Reports()
    options = {"strategy": ClipSingleDeviceStrategy(), **options}
    trainer = build_trainer(**{**options, "callbacks": [reports, *options.get("callbacks", [])]})
    trainer.fit(module, ListLoader(windows))
    return reports


WINDOWS = [window(A, B), BAD, window(B), BAD_GRADIENT, BAD, window([-100]), window(A), window(A, B)]
OUTCOMES = [
    "applied",
    "nonfinite_skip",
    "applied",
    *["nonfinite_skip"] * 2,
    "empty",
    "applied",
    "applied",
]


@pytest.mark.parametrize("own_strategy", [True, False])
def test_same_run_as_when_the_host_waits(own_strategy: bool, read_late: Any) -> None:
    """Weights, moments, schedule and reports are those of immediate verdicts, bit for bit."""
    runs = []
    for defers in (False, True):
        read_late(defers)
        module = ToyU(fused, halving, max_norm=0.1, on_nonfinite="skip")
        logger, guard, clip = RowLogger(), FiniteGuard(), PreClipNorm()
        strategy = ClipSingleDeviceStrategy() if own_strategy else "auto"
        reports = run(module, WINDOWS, strategy=strategy, logger=logger, callbacks=[guard, clip])
        assert reports.returned.count("pending") == (7 if defers else 0)
        runs.append((module, reports, logger, guard))
    (here, plain, plain_rows, plain_guard), (there, late, late_rows, late_guard) = runs
    assert [each["outcome"] for each in plain.taken] == OUTCOMES
    assert torch.equal(here.b, there.b)
    for one, two in zip(plain.taken, late.taken, strict=True):
        assert one.keys() == two.keys()
        for key in one.keys() - {"clip_seconds"}:
            same = (
                pytest.approx(float(one[key]), rel=1e-6, nan_ok=True)
                if isinstance(one[key], Tensor)
                else one[key]
            )
            assert (float(two[key]) if isinstance(two[key], Tensor) else two[key]) == same, key
    assert [step for step, _ in late_rows.rows] == list(range(1, 9))
    assert plain_rows.series("train/lr") == late_rows.series("train/lr")
    assert plain_guard.flagged == late_guard.flagged == 3
    assert there.trainer.global_step == 8
    assert there.lr_schedulers().last_epoch == there.updates_applied == 4


def test_the_verdict_is_read_after_the_next_backward(
    deferring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the device has work; nothing of ours reads a number between two steps but this."""
    events: list[str] = []
    original = HostCopy.read
    monkeypatch.setattr(HostCopy, "read", lambda self: (events.append("read"), original(self))[1])

    class Noting(ToyU):
        def loss_sum(self, micro_batch: Any) -> Tensor:
            events.append("forward")
            return super().loss_sum(micro_batch)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            super().on_before_optimizer_step(optimizer)
            events.append("step")

    run(Noting(fused, max_norm=0.1), [window(A, B)] * 3)
    one = ["forward", "forward"]
    assert events == [*one, "step", *one, "read", "step", *one, "read", "step", "read"]


@pytest.mark.parametrize("bad", [BAD, BAD_GRADIENT])
def test_raise_during_the_next_update(deferring: None, bad: Window, tmp_path: Path) -> None:
    """The message names update, micro-batch and parameter; no weight moved, no checkpoint was written."""
    clean = ToyU(fused, halving)
    run(clean, [window(A, B)])
    module = ToyU(fused, halving)
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    reports = Reports()
    with pytest.raises(
        NonFiniteError, match=r"^update 2: the .* (is|are) not finite; `on_nonfinite`"
    ) as error:
        build_trainer(
            strategy=ClipSingleDeviceStrategy(),
            callbacks=[reports, saving],
            enable_checkpointing=True,
        ).fit(module, ListLoader([window(A, B), bad, window(B), window(A)]))
    assert ("micro-batch 2 of 2 (nan)" if bad is BAD else "the gradient of b") in str(error.value)
    assert torch.equal(module.b, clean.b)
    assert [each["outcome"] for each in reports.taken] == ["applied", "nonfinite_raise"]
    assert [file.name for file in tmp_path.glob("*.ckpt")] == ["step=1.ckpt"]
    assert module.lr_schedulers().last_epoch == 1
    assert module.optimizers().param_groups[0]["lr"] == 0.05


def test_raise_at_the_very_end(deferring: None) -> None:
    """The last update has no next; it is judged before the epoch ends."""
    module = ToyU(fused)
    with pytest.raises(NonFiniteError, match="update 2"):
        run(module, [window(A, B), BAD])


def test_too_many_in_a_row(deferring: None) -> None:
    module = ToyU(fused, on_nonfinite="skip", max_consecutive_skips=2)
    with pytest.raises(NonFiniteError, match=r"update 4.*`max_consecutive_skips`=2"):
        run(module, [window(A, B), BAD, BAD, BAD, window(A)])


def test_checkpoints_hold_settled_updates(deferring: None, tmp_path: Path) -> None:
    """A checkpoint after a skipped update has the schedule, counters and summary that this leaves behind."""
    module = ToyU(fused, halving, on_nonfinite="skip")
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run(module, [window(A, B), BAD, window(B)], callbacks=[saving], enable_checkpointing=True)
    for step, applied in ((1, 1), (2, 1), (3, 2)):
        kept = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert kept["andrea_updates"]["applied"] == kept["lr_schedulers"][0]["last_epoch"] == applied
        assert kept["andrea_updates"]["applied"] + kept["andrea_updates"]["skipped"] == step
        assert kept["optimizer_states"][0]["param_groups"][0]["lr"] == 0.1 * 0.5**applied
        (summary,) = [value for key, value in kept["callbacks"].items() if "EpochSummary" in key]
        assert summary["updates"] == applied


def test_validation_follows_its_update(deferring: None) -> None:
    class Validates(ToyU):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen = self.update_report["update"] if self.update_report else 0

    module = Validates(fused)
    seen: list[tuple[int, int]] = []

    class Check(pl.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append((trainer.global_step, pl_module.seen))

    trainer = build_trainer(callbacks=[Check()], val_check_interval=2, strategy=ClipSingleDeviceStrategy())
    trainer.fit(module, ListLoader([window(A)] * 6), ListLoader([torch.zeros(1)]))
    assert seen == [(2, 2), (4, 4), (6, 6)]


def test_an_exception_does_not_lose_the_last_report(deferring: None) -> None:
    class Fails(ToyU):
        def loss_sum(self, micro_batch: Any) -> Tensor:
            if self.trainer.global_step == 2:
                raise RuntimeError("out of memory")
            return super().loss_sum(micro_batch)

    logger = RowLogger()
    with pytest.raises(RuntimeError, match="out of memory"):
        run(Fails(fused), [window(A)] * 4, logger=logger)
    assert [step for step, _ in logger.series("train/loss")] == [1, 2]


def test_summary_of_an_epoch_has_its_last_update(deferring: None) -> None:
    summary = EpochSummary()
    run(ToyU(fused), [window(A, B), window(A)], callbacks=[summary])
    assert (summary.last["updates"], summary.last["tokens"]) == (2, 5)


def test_what_cannot_be_held_is_judged_at_once(deferring: None) -> None:
    """Optimizers without found_inf, and windows without tokens, which the host knows of already."""
    for build in (lambda p: torch.optim.AdamW(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)):
        assert run(ToyU(build), [window(A, B), window(A)]).returned == ["applied", "applied"]
    assert run(ToyU(fused), [window([-100]), window(A)]).returned == ["empty", "pending"]


def test_callbacks_see_the_averaged_gradient(deferring: None) -> None:
    seen: list[Tensor] = []

    class Looks(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.append(pl_module.b.grad.clone())

    run(ToyU(fused, max_norm=0.1), [window(A, B)], callbacks=[Looks()])
    assert seen[0].tolist() == pytest.approx([0.25, -0.25])


class NoReading(TorchDispatchMode):
    """Refuses to turn a tensor into a number, which is how a host waits for its device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a number was read"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["torch", "extension"])
@pytest.mark.parametrize("max_norm", [0.1, None])
def test_no_number_is_read_within_an_update(
    deferring: None, kind: Any, max_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two batches nothing of ours asks the device for anything but the verdict before."""
    original = HostCopy.read
    modes: list[Any] = []

    def reading(self: HostCopy) -> list[float]:
        with _disable_current_modes():
            return original(self)

    monkeypatch.setattr(HostCopy, "read", reading)
    measured = Clipper._squared_norms
    if kind == "torch":  # whose CPU path reads its sums, to look at tiny ones again

        def measuring(self: Any, tensors: Any) -> Tensor:
            with _disable_current_modes():
                return measured(self, tensors)

        monkeypatch.setattr(Clipper, "_squared_norms", measuring)

    class Watched(ToyU):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with NoReading() as mode:
                modes.append(mode)
                return super().training_step(batch, batch_idx)

        def count_tokens(self, micro_batch: Any) -> int:
            return len(micro_batch)

    module = Watched(fused, halving, max_norm=max_norm)
    run(module, [window(A, B), window(A), window(B)], strategy=ClipSingleDeviceStrategy(kind))
    assert (len(modes), module.updates_applied) == (3, 3)


def test_first_update_of_fused_sgd_with_momentum(deferring: None) -> None:
    """Which no device can hold; the host judges it, and the buffers are what they should be."""

    def build(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)

    module, clean = (ToyU(build, on_nonfinite="skip") for _ in range(2))
    assert run(module, [BAD, window(A, B), BAD, window(A)]).returned == [
        "nonfinite_skip",
        "applied",
        "pending",
        "pending",
    ]
    run(clean, [window(A, B), window(A)])
    assert torch.equal(module.b, clean.b)


@pytest.mark.parametrize("schedule", [OneCycleLR, CyclicLR])
def test_schedules_that_move_more_than_the_rate(schedule: Any, read_late: Any) -> None:
    """OneCycleLR and CyclicLR write betas too; after a bad update those are put right as well."""

    def build(optimizer: Any) -> Any:
        if schedule is OneCycleLR:
            return OneCycleLR(optimizer, 0.1, total_steps=9)
        return CyclicLR(optimizer, 0.01, 0.1, step_size_up=3)

    weights = []
    for defers in (False, True):
        read_late(defers)
        module = ToyU(fused, build, on_nonfinite="skip")
        run(module, [window(A, B), BAD, window(B), window(A)])
        weights.append(module.b.detach())
    assert torch.equal(*weights)


def test_what_others_wrote_stays(deferring: None) -> None:
    """A callback that sets the weight decay of each update, one of which is taken back."""
    seen: list[float] = []

    class Decays(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.1 * (batch_idx + 1)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.append(optimizer.param_groups[0]["weight_decay"])

    module = ToyU(fused, halving, on_nonfinite="skip")
    run(module, [window(A, B), BAD, window(B)], callbacks=[Decays()])
    assert seen == pytest.approx([0.1, 0.2, 0.3])


def test_a_module_without_callbacks_settles_too(deferring: None) -> None:
    class Bare(ToyU):
        def configure_callbacks(self) -> list[Any]:
            return []

    module = Bare(fused)
    with pytest.raises(NonFiniteError, match="update 2"):
        build_trainer(strategy=ClipSingleDeviceStrategy()).fit(module, ListLoader([window(A), BAD]))


def test_moves_of_nested_schedulers_are_taken_back() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=torch.tensor(1.0))
    parts = [LinearLR(optimizer, 0.1, total_iters=3), LambdaLR(optimizer, lambda index: 1 / (1 + index))]
    scheduler = SequentialLR(optimizer, parts, milestones=[3])
    rates = []
    for _ in range(6):
        before = float(optimizer.param_groups[0]["lr"])
        optimizer.step()
        move = ScheduleMove(scheduler)
        scheduler.step()
        move.end().undo()
        assert float(optimizer.param_groups[0]["lr"]) == before
        scheduler.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    assert rates == pytest.approx([0.4, 0.7, 1.0, 1 / 2, 1 / 3, 1 / 4])
