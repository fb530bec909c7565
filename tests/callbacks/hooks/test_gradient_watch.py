"""The norm before the first change of the gradients, whoever changes them, under manual and automatic "
"optimization."""

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.utils.clip_grad as torch_clip
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.utils.data import DataLoader

from andrea_callbacks import (
    ClipWarning,
    FiniteGuard,
    PreClipNorm,
    RunJournal,
    SpikeForensics,
    UnwatchedWarning,
    read_journal,
)
from andrea_callbacks.hooks.gradient_watch import _watches
from andrea_pl import ClipSingleDeviceStrategy
from tests.support.projects import TextRows, scaler_plugin
from tests.support.toy import ListLoader, RowLogger, build_trainer

PATCHED = ("_group_tensors_by_device_and_dtype", "_get_total_norm", "_clip_grads_with_norm_")
ORIGINALS = {name: getattr(torch_clip, name) for name in PATCHED} | {
    "backward": torch.autograd.backward,
    "value": torch.nn.utils.clip_grad_value_,
}
COEFFICIENTS = [0.5, 2.0]  # of the two halves that Manual's loss has, whose norms are then known


def originals() -> dict[str, Any]:
    found = {name: getattr(torch_clip, name) for name in PATCHED}
    return found | {"backward": torch.autograd.backward, "value": torch.nn.utils.clip_grad_value_}


@pytest.fixture(autouse=True)
def nothing_stays_wrapped() -> Any:
    yield
    assert originals() == ORIGINALS
    assert not _watches


Clip = Callable[["Manual", Any], None]


class Manual(pl.LightningModule):
    """Manual optimization with a clip of its own; the gradient of `a` is the batch, that of `b` twice the "
    "batch."""

    def __init__(self, clip: Clip, fused: bool = False, backward: str = "manual") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a = nn.Parameter(torch.zeros(32))
        self.b = nn.Parameter(torch.zeros(32))
        self.clip, self.fused, self.backward_kind = clip, fused, backward

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = (self.a * batch[0]).sum() + 2.0 * (self.b * batch[0]).sum()
        if self.backward_kind == "manual":
            self.manual_backward(loss)
        else:
            loss.backward()
        self.clip(self, optimizer)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, fused=self.fused)


def by_lightning(module: Manual, optimizer: Any) -> None:
    module.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


def by_torch(module: Manual, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)


def by_early_import(module: Manual, optimizer: Any) -> None:
    clip_grad_norm_([module.a, module.b], 0.5)


def by_parts(module: Manual, optimizer: Any) -> None:
    clip_grad_norm_(module.a, 0.3)
    clip_grad_norm_([module.b], 0.4)


def by_given_norm(module: Manual, optimizer: Any) -> None:
    parameters = list(module.parameters())
    norm = get_total_norm([each.grad for each in parameters if each.grad is not None])
    clip_grads_with_norm_(parameters, 0.5, norm)


def by_largest(module: Manual, optimizer: Any) -> None:
    clip_grad_norm_(module.parameters(), 0.5, norm_type=math.inf)


def by_value(module: Manual, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_value_(module.parameters(), 0.1)


def by_value_early(module: Manual, optimizer: Any) -> None:
    clip_grad_value_(module.parameters(), 0.1)


def by_lightning_by_value(module: Manual, optimizer: Any) -> None:
    module.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")


def by_logging_first(module: Manual, optimizer: Any) -> None:
    get_total_norm([each.grad for each in module.parameters() if each.grad is not None])
    clip_grad_norm_(module.parameters(), 0.5)


def by_strategy(module: Manual, optimizer: Any) -> None:
    module.trainer.strategy.clip_gradients(optimizer, 0.5)  # type: ignore[attr-defined]


def by_strategy_of_parameters(module: Manual, optimizer: Any) -> None:
    module.trainer.strategy.clip_gradients(module.parameters(), 0.5)  # type: ignore[attr-defined]


CLIPS: dict[Clip, float | None] = {  # and the threshold of the global norm
    by_lightning: 0.5,
    by_torch: 0.5,
    by_early_import: 0.5,
    by_parts: None,
    by_given_norm: None,
    by_largest: None,
    by_value: None,
    by_value_early: None,
    by_lightning_by_value: None,
    by_logging_first: 0.5,
    by_strategy: 0.5,
    by_strategy_of_parameters: 0.5,
}


class Norms(pl.Callback):
    """Measure in float64 what the optimizer steps along, before its step; a fused one divides within it."""

    def __init__(self) -> None:
        self.clipped: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        scale = float(getattr(optimizer, "grad_scale", None) or 1.0)
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in pl_module.parameters()))
        self.clipped.append(norm / scale)


def rows() -> DataLoader[Tensor]:
    return DataLoader(TextRows(8), batch_size=1)


def right_norms() -> list[float]:
    return [math.sqrt(5.0) * float(row.double().norm()) for row in TextRows(8)]


BOTH = (False, True)
OWN_CLIPS = [(clip, strategy, fused) for clip in CLIPS for strategy in BOTH for fused in BOTH]
REFUSED = [(clip, False, True) for clip in (by_lightning, by_lightning_by_value)]  # by Lightning itself
REFUSED += [(clip, False, fused) for clip in (by_strategy, by_strategy_of_parameters) for fused in BOTH]


@pytest.mark.parametrize(("clip", "strategy", "fused"), [each for each in OWN_CLIPS if each not in REFUSED])
def test_a_modules_own_clip(clip: Clip, strategy: bool, fused: bool) -> None:
    """The norm was the clipped one before, and it depended on the optimizer and the strategy."""
    logger, norms = RowLogger(), Norms()
    options: dict[str, Any] = {"strategy": ClipSingleDeviceStrategy("torch")} if strategy else {}
    callbacks = [PreClipNorm(every=3), RunJournal(), norms]
    trainer = build_trainer(callbacks=callbacks, logger=logger, **options)
    trainer.fit(Manual(clip, fused), rows())
    found = [value for _, value in logger.series("train/grad_norm")]
    assert found == pytest.approx(right_norms(), rel=1e-6)
    journalled = [row["grad_norm"] for row in read_journal("journal.jsonl") if row["kind"] == "update"]
    assert journalled == pytest.approx(right_norms(), rel=1e-6)
    clipped = [value for _, value in logger.series("train/grad_norm_clipped")]
    assert clipped == pytest.approx(norms.clipped, rel=1e-6)
    coefficients = [value for _, value in logger.series("train/clip_coefficient")]
    ratios = [after / before for after, before in zip(norms.clipped, right_norms(), strict=True)]
    assert coefficients == pytest.approx(ratios, rel=1e-6)
    thresholds = [] if CLIPS[clip] is None else [(1, CLIPS[clip]), (4, CLIPS[clip]), (7, CLIPS[clip])]
    assert logger.series("train/clip_threshold") == thresholds
    assert logger.series("train/clip_fraction")[-1][1] == 1.0
    groups = [value for _, value in logger.series("grad_norm_group/0")]
    assert groups == pytest.approx([right_norms()[at] for at in (0, 3, 6)], rel=1e-6)


@pytest.mark.parametrize("backward", ["manual", "plain"])
def test_the_issues_example_is_a_spike(backward: str) -> None:
    """Norm 96.51 clipped to 0.5: a spike among norms of one hundredth of that."""
    unit = torch.full((1, 32), 96.51 / math.sqrt(5.0 * 32))
    batches = [unit * (0.01 if number != 30 else 1.0) for number in range(40)]
    logger, forensics = RowLogger(), SpikeForensics()
    trainer = build_trainer(callbacks=[PreClipNorm(), forensics], logger=logger)
    trainer.fit(Manual(by_lightning, backward=backward), ListLoader(batches))
    assert dict(logger.series("train/grad_norm"))[31] == pytest.approx(96.51, rel=1e-6)
    assert dict(logger.series("train/grad_norm_clipped"))[31] == pytest.approx(0.5, rel=1e-5)
    assert forensics.spikes == 1


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("strategy", [False, True], ids=["", "clip strategy"])
def test_the_norm_is_after_unscaling(unscales: bool, strategy: bool) -> None:
    """A clip of gradients that still carry a scale of 1024 is a clip to 0.5 / 1024."""

    def clip(module: Manual, optimizer: Any) -> None:
        if unscales:
            module.trainer.precision_plugin.scaler.unscale_(optimizer.optimizer)
        clip_grad_norm_(module.parameters(), 0.5)

    options: dict[str, Any] = {"strategy": ClipSingleDeviceStrategy("torch")} if strategy else {}
    logger = RowLogger()
    trainer = build_trainer(
        callbacks=[PreClipNorm(every=1)], logger=logger, plugins=[scaler_plugin(1024.0)], **options
    )
    trainer.fit(
        Manual(clip, fused=unscales), rows()
    )  # for other optimizers Lightning unscales, and only once
    found = [value for _, value in logger.series("train/grad_norm")]
    assert found == pytest.approx(right_norms(), rel=1e-6)
    least = 0.5 / (1.0 if unscales else 1024.0)
    clipped = [value for _, value in logger.series("train/grad_norm_clipped")]
    assert clipped == pytest.approx([least] * 8, rel=1e-4)
    assert [value for _, value in logger.series("train/clip_threshold")] == [least] * 8


def halve(module: Manual, optimizer: Any) -> None:
    for each in module.parameters():
        each.grad.mul_(0.5)  # type: ignore[union-attr]


def halve_data(module: Manual, optimizer: Any) -> None:
    for each in module.parameters():
        each.grad.data.mul_(0.5)  # type: ignore[union-attr]


def replace(module: Manual, optimizer: Any) -> None:
    module.a.grad = module.a.grad * 0.5  # type: ignore[operator]


def halve_and_clip(module: Manual, optimizer: Any) -> None:
    halve(module, optimizer)
    clip_grad_norm_(module.parameters(), 0.5)


def clip_and_add(module: Manual, optimizer: Any) -> None:
    clip_grad_norm_(module.parameters(), 0.5)
    module.manual_backward((module.a * 3.0).sum())


@pytest.mark.parametrize("change", [halve, halve_data, replace, halve_and_clip, clip_and_add])
def test_other_changes_leave_the_norm_out(change: Clip) -> None:
    logger, forensics = RowLogger(), SpikeForensics()
    callbacks = [PreClipNorm(), forensics, RunJournal()]
    words = "update 1: the gradients were changed after the backward pass"
    with pytest.warns(ClipWarning, match=words) as said:
        build_trainer(callbacks=callbacks, logger=logger).fit(Manual(change), rows())
    assert len([each for each in said if each.category is ClipWarning]) == 1
    for scalar in ("train/grad_norm", "train/grad_norm_clipped", "grad_norm_group/0", "grad_norm_layer/a"):
        assert logger.series(scalar) == [], scalar
    updates = [row for row in read_journal("journal.jsonl") if row["kind"] == "update"]
    assert len(updates) == 8
    assert not any("grad_norm" in row for row in updates)


def test_a_change_of_one_update_leaves_out_that_update() -> None:
    """A hand-written clip through `.data`, which torch does not count, and which bites at two updates."""

    def clip(module: Manual, optimizer: Any) -> None:
        norm = math.sqrt(sum(float(each.grad.norm()) ** 2 for each in module.parameters()))  # type: ignore[union-attr]
        if norm > 14.0:
            for each in module.parameters():
                each.grad.data.mul_(14.0 / norm)  # type: ignore[union-attr]

    logger = RowLogger()
    with pytest.warns(ClipWarning, match="the gradients were changed"):
        build_trainer(callbacks=[PreClipNorm()], logger=logger).fit(Manual(clip), rows())
    kept = [(step, norm) for step, norm in enumerate(right_norms(), start=1) if norm <= 14.0]
    assert 0 < len(kept) < 8
    found = logger.series("train/grad_norm")
    assert [step for step, _ in found] == [step for step, _ in kept]
    assert [value for _, value in found] == pytest.approx([norm for _, norm in kept], rel=1e-6)


class Assigned(Manual):
    """Gradients that no backward pass made, as those of meta-learning are."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.a.grad, self.b.grad = batch[0].clone(), 2.0 * batch[0]
        self.clip(self, optimizer)
        optimizer.step()


class Accumulating(Manual):
    """Two backward passes, in-place zeroing, and a clip."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad(set_to_none=False)
        self.manual_backward((self.a * batch[0]).sum())
        self.manual_backward(2.0 * (self.b * batch[0]).sum())
        self.clip(self, optimizer)
        optimizer.step()


@pytest.mark.parametrize("kind", [Assigned, Accumulating])
@pytest.mark.parametrize("clip", [by_torch, by_value_early])
def test_other_ways_to_make_a_gradient(kind: type[Manual], clip: Clip) -> None:
    logger = RowLogger()
    build_trainer(callbacks=[PreClipNorm()], logger=logger).fit(kind(clip), rows())
    found = [value for _, value in logger.series("train/grad_norm")]
    assert found == pytest.approx(right_norms(), rel=1e-6)


class Automatic(pl.LightningModule):
    """Automatic optimization whose clip is the module's own."""

    def __init__(self, clip: Callable[[Any, Any], None], when: str) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(32))
        self.b = nn.Parameter(torch.zeros(32))
        self.clip, self.when = clip, when

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.a * batch[0]).sum() + 2.0 * (self.b * batch[0]).sum()

    def on_after_backward(self) -> None:
        if self.when == "after backward":
            self.clip(self, self.optimizers())

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.when == "configured":
            self.clip(self, optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("when", ["configured", "after backward"])
@pytest.mark.parametrize("clip", [by_lightning, by_early_import, by_value, by_parts])
def test_a_clip_of_its_own_under_automatic_optimization(clip: Clip, when: str) -> None:
    logger, manual, norms = RowLogger(), RowLogger(), Norms()
    build_trainer(callbacks=[PreClipNorm(), norms], logger=manual).fit(Manual(clip), rows())
    build_trainer(callbacks=[PreClipNorm()], logger=logger).fit(Automatic(clip, when), rows())
    for scalar in ("grad_norm", "grad_norm_clipped", "clip_coefficient", "clip_threshold", "clip_fraction"):
        found = [value for _, value in logger.series(f"train/{scalar}")]
        right = [value for _, value in manual.series(f"train/{scalar}")]
        assert found == pytest.approx(right, rel=1e-6), scalar


class Outer(pl.Callback):
    """A fit within a fit."""

    def __init__(self) -> None:
        self.logger = RowLogger()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            build_trainer(callbacks=[PreClipNorm()], logger=self.logger).fit(Manual(by_torch), rows())


def test_fits_nest() -> None:
    logger, outer = RowLogger(), Outer()
    build_trainer(callbacks=[PreClipNorm(), outer], logger=logger).fit(Manual(by_torch), rows())
    for rows_of in (logger, outer.logger):
        found = [value for _, value in rows_of.series("train/grad_norm")]
        assert found == pytest.approx(right_norms(), rel=1e-6)


@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_wrapped_after_an_exception(exception: type[BaseException]) -> None:
    def fail(module: Manual, optimizer: Any) -> None:
        assert originals() != ORIGINALS
        if module.trainer.global_step == 2:
            raise exception

    class Fails(pl.Callback):
        """Another callback that fails when told of it, so that those behind it are not told."""

        def on_exception(self, *_: Any) -> None:
            raise RuntimeError

    with pytest.raises((exception, RuntimeError, SystemExit)):
        build_trainer(callbacks=[PreClipNorm()]).fit(Manual(fail), rows())
    assert originals() == ORIGINALS
    with pytest.raises(RuntimeError):
        build_trainer(callbacks=[Fails(), PreClipNorm()]).fit(Manual(fail), rows())
    logger = RowLogger()
    build_trainer(callbacks=[PreClipNorm()], logger=logger).fit(Manual(by_torch), rows())  # tidies up
    assert [value for _, value in logger.series("train/grad_norm")] == pytest.approx(right_norms(), rel=1e-6)


def test_what_others_wrapped_meanwhile_stays() -> None:
    calls: list[str] = []

    class Wraps(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                inner = torch.nn.utils.clip_grad_value_

                def theirs(*arguments: Any, **options: Any) -> Any:
                    calls.append("theirs")
                    return inner(*arguments, **options)

                torch.nn.utils.clip_grad_value_ = theirs

    try:
        build_trainer(callbacks=[PreClipNorm(), Wraps()]).fit(Manual(by_value), rows())
        assert torch.nn.utils.clip_grad_value_ is not ORIGINALS["value"]
        alone = nn.Parameter(torch.zeros(1))
        alone.grad = torch.full((1,), 5.0)
        torch.nn.utils.clip_grad_value_(alone, 1.0)
        assert (len(calls), float(alone.grad)) == (9, 1.0)
    finally:
        torch.nn.utils.clip_grad_value_ = ORIGINALS["value"]


class Raw(Manual):
    """Steps an optimizer that Lightning does not wrap."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward((self.a * batch[0]).sum() + 2.0 * (self.b * batch[0]).sum())
        optimizer.step()


def test_raw_steps_are_spoken_of_once() -> None:
    callbacks = [PreClipNorm(), RunJournal(), SpikeForensics()]
    words = r"no update was seen in the last 50 batches.*use_pl_optimizer"
    with pytest.warns(UnwatchedWarning, match=words) as said:
        build_trainer(callbacks=callbacks, max_epochs=20).fit(Raw(by_torch), rows())
    assert len([each for each in said if each.category is UnwatchedWarning]) == 1


def test_long_accumulation_is_not_taken_for_it() -> None:
    """Lightning steps every 60th batch here."""
    trainer = build_trainer(callbacks=[PreClipNorm()], max_epochs=20, accumulate_grad_batches=60)
    trainer.fit(Automatic(by_torch, "never"), rows())


class StandIn(Manual):
    """An optimizer for Lightning's eyes, and another that does the work, as in Pyro's modules."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.optimizers().step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)


def test_no_norm_where_there_is_no_gradient() -> None:
    """The journal had a norm of 0.0 for every update."""
    logger = RowLogger()
    trainer = build_trainer(callbacks=[PreClipNorm(), RunJournal()], logger=logger, max_epochs=10)
    with pytest.warns(UnwatchedWarning) as said, pytest.warns(ClipWarning, match="never received a gradient"):
        trainer.fit(StandIn(by_torch), rows())
    assert len([each for each in said if each.category is UnwatchedWarning]) == 1
    assert logger.series("train/grad_norm") == []
    assert not any("grad_norm" in row for row in read_journal("journal.jsonl"))


class TwoOptimizers(pl.LightningModule):
    """Both backward passes, both clips, and then both steps; the gradients are the batch and twice the
    batch."""

    def __init__(self, change: str = "clip") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = nn.Parameter(torch.zeros(32)), nn.Parameter(torch.zeros(32))
        self.change = change

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        first.zero_grad()
        second.zero_grad()
        self.manual_backward((self.a * batch[0]).sum())
        if self.change == "clip":
            self.clip_gradients(first, 0.5, "norm")
        else:
            self.a.grad.mul_(0.1)  # type: ignore[union-attr]
        self.manual_backward(2.0 * (self.b * batch[0]).sum())
        self.clip_gradients(second, 0.5, "norm")
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([each], lr=1e-3) for each in (self.a, self.b)]


def test_backward_passes_of_others_lose_nothing() -> None:
    logger = RowLogger()
    build_trainer(callbacks=[PreClipNorm(every=1)], logger=logger).fit(TwoOptimizers(), rows())
    right = [factor * norm / math.sqrt(5.0) for norm in right_norms() for factor in (1.0, 2.0)]
    assert [value for _, value in logger.series("train/grad_norm")] == pytest.approx(right, rel=1e-6)
    assert [value for _, value in logger.series("train/clip_threshold")] == [0.5] * 16


def test_a_change_by_hand_is_seen_across_another_backward_pass() -> None:
    logger = RowLogger()
    with pytest.warns(ClipWarning, match="the gradients were changed"):
        build_trainer(callbacks=[PreClipNorm()], logger=logger).fit(TwoOptimizers("by hand"), rows())
    assert [step for step, _ in logger.series("train/grad_norm")] == list(range(2, 17, 2))


@pytest.mark.parametrize("how", ["by hand", "by value, imported early", "with a given norm"])
def test_changes_between_two_backward_passes_leave_the_norm_out(how: str) -> None:
    class Twice(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            for _ in range(2):
                self.manual_backward((self.a * batch[0]).sum() + 2.0 * (self.b * batch[0]).sum())
                self.clip(self, optimizer)
            optimizer.step()

    clip = {"by hand": halve, "by value, imported early": by_value_early, "with a given norm": by_given_norm}[
        how
    ]
    logger = RowLogger()
    with pytest.warns(ClipWarning, match="the gradients were changed"):
        build_trainer(callbacks=[PreClipNorm()], logger=logger).fit(Twice(clip), rows())
    assert logger.series("train/grad_norm") == []


def test_clips_within_a_backward_pass_leave_the_norm_out() -> None:
    """By a hook of each parameter, when the rest of the gradient is still to come."""

    class Hooked(Manual):
        def on_train_start(self) -> None:
            for each in (self.a, self.b):
                each.register_post_accumulate_grad_hook(lambda each: clip_grad_norm_([each], 0.1) and None)

    logger = RowLogger()
    with pytest.warns(ClipWarning, match="the gradients were changed"):
        build_trainer(callbacks=[PreClipNorm()], logger=logger).fit(Hooked(lambda *_: None), rows())
    assert logger.series("train/grad_norm") == []


@pytest.mark.parametrize("is_automatic", [True, False])
def test_a_clip_in_the_modules_hook_before_the_step(is_automatic: bool) -> None:
    """It comes after the callbacks' hook."""

    class HookClip(Automatic):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            clip_grad_norm_(self.parameters(), 0.5)

    class ManualHookClip(Manual):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            clip_grad_norm_(self.parameters(), 0.5)

    module = HookClip(by_torch, "never") if is_automatic else ManualHookClip(lambda *_: None)
    logger = RowLogger()
    build_trainer(callbacks=[PreClipNorm(every=1)], logger=logger).fit(module, rows())
    assert [value for _, value in logger.series("train/grad_norm")] == pytest.approx(right_norms(), rel=1e-6)
    clipped = [value for _, value in logger.series("train/grad_norm_clipped")]
    assert clipped == pytest.approx([0.5] * 8, rel=1e-5)
    assert [value for _, value in logger.series("train/clip_threshold")] == [0.5] * 8


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_a_clip_in_compiled_code() -> None:
    """Dynamo traced the wrappers, and what they tell was lost; as it did in `torch.compile(module)`."""
    logger = RowLogger()
    module = Manual(torch.compile(by_torch, backend="eager"))
    build_trainer(callbacks=[PreClipNorm(every=1)], logger=logger).fit(module, rows())
    assert [value for _, value in logger.series("train/grad_norm")] == pytest.approx(right_norms(), rel=1e-6)
    assert [value for _, value in logger.series("train/clip_threshold")] == [0.5] * 8


def test_a_project_that_guards_against_nan_itself_goes_on() -> None:
    """What reaches the step is judged, and nothing bad does here."""

    class Guarded(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward((self.a * batch[0]).sum() + 2.0 * (self.b * batch[0]).sum())
            if batch_idx == 3:
                self.a.grad[0] = math.nan  # type: ignore[index]
            if not torch.isfinite(clip_grad_norm_(self.parameters(), 0.5)):
                optimizer.zero_grad()
            optimizer.step()

    guard, module = FiniteGuard(), Guarded(by_torch)
    trainer = build_trainer(callbacks=[guard])
    trainer.fit(module, rows())
    assert (trainer.global_step, guard.flagged) == (8, 0)
    assert torch.isfinite(module.a).all()


def test_a_step_without_gradients_is_no_reason_to_deny_others() -> None:
    class Waiting(TwoOptimizers):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()  # type: ignore[misc]
            first.zero_grad()
            self.manual_backward((self.a * batch[0]).sum())
            first.step()
            second.step()

    logger = RowLogger()
    trainer = build_trainer(callbacks=[PreClipNorm()], logger=logger, max_epochs=10)
    with pytest.warns(ClipWarning, match="never received a gradient"):
        trainer.fit(Waiting(), rows())
    assert len(logger.series("train/grad_norm")) == 80


def test_one_of_two_optimizers_stepped_raw_is_spoken_of() -> None:
    class HalfRaw(TwoOptimizers):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            first, _ = self.optimizers()  # type: ignore[misc]
            raw: Any = self.optimizers(use_pl_optimizer=False)
            self.zero_grad()
            self.manual_backward((self.a * batch[0]).sum() + (self.b * batch[0]).sum())
            first.step()
            raw[1].step()

    with pytest.warns(UnwatchedWarning, match="no update of optimizer 1 was seen in the last 50 batches"):
        build_trainer(callbacks=[PreClipNorm()], max_epochs=10).fit(HalfRaw(), rows())


def test_gradients_that_are_kept_and_replaced_within_a_backward_pass() -> None:
    """With `create_graph` torch adds out of place, and here the gradient of the first pass is still alive."""
    kept: list[Tensor] = []

    class Graphs(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            for _ in range(2):
                self.manual_backward(
                    (self.a * batch[0]).square().sum() + (self.a * batch[0]).sum(), create_graph=True
                )
                kept.append(self.a.grad)  # type: ignore[arg-type]
            optimizer.step()
            self.zero_grad()

    logger = RowLogger()
    trainer = build_trainer(callbacks=[PreClipNorm(), RunJournal()], logger=logger)
    with pytest.warns(ClipWarning, match="never received"), pytest.warns(UserWarning, match="create_graph"):
        trainer.fit(Graphs(by_torch), rows())
    assert len(logger.series("train/grad_norm")) == 8
