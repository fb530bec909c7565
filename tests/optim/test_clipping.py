"""The clipper, in torch and compiled: norms, cache, coefficient, and what is folded into a fused step."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from andrea_callbacks.numerics.gradient_norm import optimizer_parameters
from andrea_pl import UserError
from andrea_pl.optim import Clipper, supports_skip_flag

KINDS = pytest.mark.parametrize("kind", ["torch", "extension"])
LOW = (torch.float32, torch.bfloat16, torch.float16)


def parameter(gradient: Tensor | None) -> nn.Parameter:
    shape = torch.zeros(1) if gradient is None else gradient
    made = nn.Parameter(torch.zeros(shape.shape, dtype=shape.dtype))
    made.grad = gradient
    return made


def sgd(*gradients: Tensor | None, fused: bool = False, lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD([parameter(each) for each in gradients], lr=lr, fused=fused)


def weights(optimizer: Any) -> list[Tensor]:
    return [each.detach().clone() for each in optimizer_parameters(optimizer)]


def exact_rows(gradients: list[Tensor]) -> tuple[list[float], list[int]]:
    squares = [float(each.double().square().sum()) for each in gradients]
    return [value**0.5 for value in squares], [int((~torch.isfinite(each)).sum()) for each in gradients]


@KINDS
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 32, 1023, 4099, 65536, 65541]), min_size=1, max_size=6),
    dtypes=st.lists(st.sampled_from([*LOW, torch.float64]), min_size=6, max_size=6),
    exponent=st.integers(-30, 18),
    bad=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([math.nan, math.inf, -math.inf])), max_size=3),
)
@settings(max_examples=60)
def test_rows_agree_with_float64(
    kind: Any, sizes: list[int], dtypes: list[torch.dtype], exponent: int, bad: list[tuple[int, float]]
) -> None:
    """Tails, empty tensors, mixed dtypes, magnitudes whose squares leave float32, NaN and Inf, counted."""
    generator = torch.Generator().manual_seed(sum(sizes))
    gradients = []
    for size, dtype in zip(sizes, dtypes, strict=False):
        limit = 0 if dtype == torch.float16 else exponent
        gradients.append((torch.randn(size, generator=generator) * 10.0**limit).to(dtype))
    for place, value in bad:
        if place < len(gradients) and len(gradients[place]):
            gradients[place][len(gradients[place]) // 2] = value
    norm = Clipper(kind).gradient_norm(sgd(*gradients))
    norms, counts = exact_rows(gradients)
    assert norm.nonfinite.tolist() == counts
    assert norm.per_parameter.tolist() == pytest.approx(norms, rel=1e-6, abs=0, nan_ok=True)
    total = math.sqrt(sum(value**2 for value in norms))
    assert float(norm.total) == pytest.approx(total, rel=1e-6, abs=0, nan_ok=True)


@pytest.mark.system
@KINDS
def test_one_large_tensor_and_many_small_ones(kind: Any) -> None:
    """120M elements, and 10,000 tensors; the same bits again, and for any number of threads."""
    clipper = Clipper(kind)
    generator = torch.Generator().manual_seed(3)
    large = torch.randn(120_000_000, generator=generator)
    small = [torch.randn(1 + place % 97, generator=generator) for place in range(10_000)]
    for gradients in ([large], small):
        exact = sum(float(p.double().square().sum()) for g in gradients for p in g.split(1 << 22)) ** 0.5
        optimizer = sgd(*gradients)
        rows = clipper.gradient_norm(optimizer).rows
        assert float(clipper.gradient_norm(optimizer).total) == pytest.approx(exact, rel=1e-6)
        torch.set_num_threads(2)
        again = Clipper(kind).gradient_norm(optimizer).rows
        torch.set_num_threads(1)
        assert kind == "torch" or torch.equal(rows, again)
        assert torch.equal(rows, Clipper(kind).gradient_norm(optimizer).rows)


@KINDS
@pytest.mark.parametrize("dtype", LOW)
def test_clips_to_the_bound(kind: Any, dtype: torch.dtype) -> None:
    """Optimizers of every kind apply the same coefficient; the fused one within its step."""
    gradients = [torch.tensor([3.0, 0.0], dtype=dtype), torch.tensor([[0.0], [4.0]], dtype=dtype)]
    for fused in (False, True):
        optimizer = sgd(*[each.clone() for each in gradients], fused=fused)
        clipper = Clipper(kind)
        coefficient = clipper.clip_gradients(optimizer, 0.5)
        assert float(coefficient) == pytest.approx(0.1)
        assert coefficient.dtype == torch.float64
        before = [each.grad for each in optimizer_parameters(optimizer)]
        assert torch.equal(before[0], gradients[0] if fused else (gradients[0].float() * 0.1).to(dtype))
        optimizer.step()
        moved = weights(optimizer)
        assert moved[0].tolist() == pytest.approx([-0.3, 0.0], rel=1e-3 if dtype == torch.float16 else 4e-3)
        assert moved[1].flatten().tolist() == pytest.approx([0.0, -0.4], rel=4e-3)


@KINDS
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bound", [5.0, 7.0, math.inf])
def test_within_the_bound_nothing_is_written(kind: Any, fused: bool, bound: float) -> None:
    optimizer = sgd(torch.tensor([3.0, 4.0]), fused=fused)
    gradient = optimizer_parameters(optimizer)[0].grad
    assert gradient is not None
    version = gradient._version
    assert float(Clipper(kind).clip_gradients(optimizer, bound)) == 1.0
    assert gradient._version == version
    assert getattr(optimizer, "grad_scale", None) is None


@KINDS
def test_huge_gradients_are_clipped_and_not_zeroed(kind: Any) -> None:
    """pytorch#46849: four times 1e20 have a norm of 2e20; beyond float32 the scale pass takes over."""
    for fused in (False, True):
        for value, bound in ((1e20, 1.0), (3e38, 1e-3)):
            optimizer = sgd(torch.full((4,), value), fused=fused)
            clipper = Clipper(kind)
            assert float(clipper.gradient_norm(optimizer).total) == pytest.approx(2 * value)
            clipper.clip_gradients(optimizer, bound)
            optimizer.step()
            assert weights(optimizer)[0].tolist() == pytest.approx([-bound / 2] * 4, rel=1e-3)


@KINDS
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_norm_clips_nothing(kind: Any, value: float) -> None:
    """pytorch#53843: neighbours are neither zeroed nor poisoned by the clip."""
    for fused in (False, True):
        optimizer = sgd(torch.tensor([1.0, value, 2.0]), torch.ones(2), fused=fused)
        assert float(Clipper(kind).clip_gradients(optimizer, 0.1)) == 1.0
        assert torch.equal(optimizer_parameters(optimizer)[1].grad, torch.ones(2))


@KINDS
def test_shared_and_grouped_parameters(kind: Any) -> None:
    """Megatron#7227: ones(4) in two groups has norm 2; transformers#614: 3 and 4 in two groups have 5."""
    tied = parameter(torch.ones(4))
    optimizer = torch.optim.SGD([{"params": [tied]}], lr=1.0)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [tied]})
    clipper = Clipper(kind)
    assert float(clipper.gradient_norm(optimizer).total) == 2.0
    clipper.clip_gradients(optimizer, 1.0)
    assert tied.grad is not None
    assert tied.grad.tolist() == [0.5] * 4
    one, two = parameter(torch.tensor([3.0])), parameter(torch.tensor([4.0]))
    grouped = torch.optim.SGD([{"params": [one]}, {"params": [two]}], lr=1.0)
    assert float(clipper.clip_gradients(grouped, 1.0)) == pytest.approx(0.2)
    assert [float(each.grad) for each in (one, two) if each.grad is not None] == pytest.approx([0.6, 0.8])


@KINDS
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_the_kernels_do_not_take_goes_through_torch(kind: Any) -> None:
    """MONAI research#426: layouts without plain storage, strides with gaps, float64, beside plain tensors."""
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 1, 2])).sum().backward()
    gaps = torch.randn(8, 8)[::2, 1::3]
    turned = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    plain = [gaps, turned, torch.randn(7, 3).t(), torch.randn(9, dtype=torch.float64), torch.randn(5)]
    optimizer = torch.optim.SGD([embedding.weight, *[parameter(each) for each in plain]], lr=1.0)
    for made, gradient in zip(optimizer_parameters(optimizer)[1:], plain, strict=True):
        made.grad = gradient
    clipper = Clipper(kind)
    kept = [each.clone() for each in plain]
    exact = math.sqrt(15 + sum(float(each.double().square().sum()) for each in plain))
    assert float(clipper.gradient_norm(optimizer).total) == pytest.approx(exact, rel=1e-6)
    coefficient = float(clipper.clip_gradients(optimizer, 0.5))
    for before, after in zip(kept, plain, strict=True):
        torch.testing.assert_close(after, before * coefficient)
    assert embedding.weight.grad is not None
    assert torch.allclose(embedding.weight.grad.to_dense()[1], torch.tensor(2.0 * coefficient))


def count_measures(clipper: Clipper, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original = clipper._norms._measure

    def counting(tensors: Any) -> Tensor:
        calls.append(len(tensors))
        return original(tensors)

    monkeypatch.setattr(clipper._norms, "_measure", counting)
    return calls


@KINDS
def test_computed_once_until_a_gradient_changes(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def backward() -> None:
        scaler.scale(layer(torch.ones(1, 3)).sum()).backward()

    def replace() -> None:
        layer.bias.grad = torch.ones(2)

    def drop() -> None:
        layer.bias.grad = None

    clipper = Clipper(kind)
    calls = count_measures(clipper, monkeypatch)
    backward()
    changes = [
        backward,
        lambda: (scaler.unscale_(optimizer), clipper.invalidate(optimizer)),  # nor does torch count this
        lambda: layer.weight.grad.mul_(2),
        lambda: torch._foreach_add_([layer.weight.grad], 1.0),
        lambda: layer.weight.grad.detach().add_(1.0),
        lambda: nn.utils.clip_grad_norm_(layer.parameters(), 0.1),
        replace,
        replace,
        drop,
        lambda: (clipper.clip_gradients(optimizer, 0.01), optimizer.step()),  # which writes gradients
        lambda: (optimizer.zero_grad(set_to_none=True), backward()),
        lambda: (optimizer.zero_grad(set_to_none=False), backward()),
    ]
    for change in [lambda: None, *changes]:
        change()
        first = clipper.gradient_norm(optimizer)
        seen = len(calls)
        assert clipper.gradient_norm(optimizer) is first
        assert len(calls) == seen
        exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in first.parameters))
        assert float(first.total) == pytest.approx(exact, rel=1e-6)
    assert len(calls) == 1 + len(changes)


@KINDS
def test_a_clip_by_scaling_changes_the_norm(kind: Any) -> None:
    """Clipped twice is clipped once: the second norm is that of what the first left."""
    optimizer = sgd(torch.tensor([3.0, 4.0]))
    clipper = Clipper(kind)
    assert float(clipper.clip_gradients(optimizer, 1.0)) == pytest.approx(0.2)
    assert float(clipper.gradient_norm(optimizer).total) == pytest.approx(1.0)
    assert float(clipper.clip_gradients(optimizer, 2.0)) == 1.0
    assert optimizer_parameters(optimizer)[0].grad.tolist() == pytest.approx([0.6, 0.8])


@KINDS
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_may_be_edited_after_the_clip(kind: Any, fused: bool) -> None:
    """A layer frozen, or noise added, between clip and step does not undo the clip of a fused optimizer."""
    optimizer = sgd(torch.tensor([3.0, 4.0]), torch.tensor([12.0]), fused=fused)
    Clipper(kind).clip_gradients(optimizer, 1.3)
    one, two = optimizer_parameters(optimizer)
    two.grad = None
    one.grad.add_(0.0)
    optimizer.step()
    assert one.tolist() == pytest.approx([-0.3, -0.4])
    assert two.tolist() == [0.0]


@KINDS
def test_nothing_stale_survives_an_exception(kind: Any) -> None:
    """A coefficient that never reached its step has no part in the next, by whatever way that comes."""
    for stepping in ("clipped", "unclipped"):
        optimizer = sgd(torch.tensor([30.0, 40.0]), fused=True)
        clipper = Clipper(kind)
        clipper.clip_gradients(optimizer, 1.0)
        assert float(optimizer.grad_scale) == 50.0
        # here an exception; the update is given up, and the next has gradients within the bound
        optimizer.zero_grad(set_to_none=True)
        optimizer_parameters(optimizer)[0].grad = torch.tensor([0.3, 0.4])
        if stepping == "clipped":
            clipper.clip_gradients(optimizer, 1.0)
        optimizer.step()
        assert weights(optimizer)[0].tolist() == pytest.approx([-0.3, -0.4])
        assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


@KINDS
def test_hold(kind: Any) -> None:
    """With a flag the device scales and holds the step by itself; the host reads nothing."""
    for flag, moved in ((0.0, [-0.6, -0.8]), (1.0, [0.0, 0.0])):
        optimizer = sgd(torch.tensor([3.0, 4.0]), fused=True)
        coefficient = Clipper(kind).clip_gradients(optimizer, 1.0, torch.tensor(flag))
        assert float(coefficient) == pytest.approx(0.2)
        optimizer.step()
        assert weights(optimizer)[0].tolist() == pytest.approx(moved)
        assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    adam = torch.optim.AdamW([parameter(torch.tensor([3.0, 4.0]))], fused=True)
    Clipper(kind).clip_gradients(adam, math.inf, torch.tensor(1.0))
    adam.step()
    state = adam.state[optimizer_parameters(adam)[0]]
    assert not state["exp_avg"].any()
    assert float(state["step"]) == 0.0
    assert float(state["exp_avg_sq"].sum()) == 0.0
    with pytest.raises(ValueError, match="cannot be made to skip"):
        Clipper(kind).clip_gradients(sgd(torch.ones(2)), 1.0, torch.tensor(0.0))


def test_who_can_be_held() -> None:
    made = [parameter(torch.ones(2))]
    assert supports_skip_flag(torch.optim.AdamW(made, fused=True))
    assert supports_skip_flag(torch.optim.SGD(made, lr=1.0, fused=True))
    assert not supports_skip_flag(torch.optim.AdamW(made))
    assert not supports_skip_flag(
        torch.optim.SGD([parameter(torch.ones(2, dtype=torch.float64))], lr=1.0, fused=True)
    )
    momentum = torch.optim.SGD(made, lr=1.0, momentum=0.9, fused=True)
    assert not supports_skip_flag(momentum)
    momentum.step()
    assert supports_skip_flag(momentum)


@KINDS
@pytest.mark.parametrize("fused", [False, True])
def test_what_is_left_to_the_step_can_be_done_now(kind: Any, fused: bool) -> None:
    optimizer = sgd(torch.tensor([3.0, 4.0]), fused=fused)
    clipper = Clipper(kind)
    clipper.clip_gradients(optimizer, 1.0)
    clipper.scale_now(optimizer)
    assert optimizer_parameters(optimizer)[0].grad.tolist() == pytest.approx([0.6, 0.8])
    optimizer.step()
    assert weights(optimizer)[0].tolist() == pytest.approx([-0.6, -0.8])


@KINDS
def test_without_a_bound_only_the_hold_is_set(kind: Any) -> None:
    """No divisor that a device would divide, and write, all gradients by."""
    optimizer = sgd(torch.tensor([3.0, 4.0]), fused=True)
    Clipper(kind).clip_gradients(optimizer, math.inf, torch.tensor(0.0))
    assert optimizer.grad_scale is None
    assert float(optimizer.found_inf) == 0.0


@KINDS
def test_copies_keep_the_kind(kind: Any) -> None:
    clipper = Clipper(kind)
    clipper.clip_gradients(sgd(torch.ones(2)), 1.0)
    for made in (copy.deepcopy(clipper), pickle.loads(pickle.dumps(clipper))):
        assert made.kind == kind
        assert float(made.gradient_norm(sgd(torch.tensor([3.0, 4.0]))).total) == 5.0


def test_unknown_kind() -> None:
    with pytest.raises(UserError, match="clipper must be one of auto, torch, extension, got 'cuda'"):
        Clipper("cuda")  # type: ignore[arg-type]


def test_nothing_to_measure() -> None:
    norm = Clipper("extension").gradient_norm(sgd(None))
    assert float(norm.total) == 0.0
    assert norm.parameters == ()
    assert float(Clipper("extension").clip_gradients(sgd(None), 1.0)) == 1.0


def some_parameters() -> list[nn.Parameter]:
    return [parameter(torch.tensor([3.0])), parameter(torch.tensor([0.0, 4.0])), parameter(None)]


ITERABLES = {
    "generator": lambda parameters: (each for each in parameters),
    "list": list,
    "tuple": tuple,
    "ParameterList": nn.ParameterList,
    "dict values": lambda parameters: dict(enumerate(parameters)).values(),
    "twice the same": lambda parameters: [*parameters, *parameters],
}


@KINDS
@pytest.mark.parametrize("name", ITERABLES)
def test_any_iterable_of_parameters(name: str, kind: Any) -> None:
    """A generator was an AttributeError; gradients 3 and 4 have norm 5 and are clipped to 1."""
    clipper = Clipper(kind)
    parameters = some_parameters()
    assert float(clipper.gradient_norm(ITERABLES[name](parameters)).total) == pytest.approx(5.0)
    coefficient = clipper.clip_gradients(ITERABLES[name](parameters), 1.0)
    assert float(coefficient) == pytest.approx(0.2)
    assert parameters[0].grad.tolist() == pytest.approx([0.6])
    assert parameters[1].grad.tolist() == pytest.approx([0.0, 0.8])
    assert float(clipper.clip_gradients(ITERABLES[name](parameters), math.inf)) == 1.0


@KINDS
def test_a_single_parameter(kind: Any) -> None:
    """One tensor is one parameter, and not an iterable of its rows."""
    one = parameter(torch.tensor([3.0, 4.0]))
    assert float(Clipper(kind).gradient_norm(one).total) == pytest.approx(5.0)
    Clipper(kind).clip_gradients(one, 2.5)
    assert one.grad.tolist() == pytest.approx([1.5, 2.0])


def test_parameters_whose_norm_is_not_finite_are_left_alone() -> None:
    one = parameter(torch.tensor([3.0, math.inf]))
    assert float(Clipper("torch").clip_gradients([one], 1.0)) == 1.0
    assert one.grad.tolist() == [3.0, math.inf]


def test_lightning_s_wrapper_of_an_optimizer() -> None:
    optimizer = sgd(torch.tensor([3.0, 4.0]), fused=True)
    wrapped = LightningOptimizer(optimizer)
    clipper = Clipper("torch")
    assert clipper.gradient_norm(wrapped) is clipper.gradient_norm(optimizer)
    clipper.clip_gradients(wrapped, 1.0)
    optimizer.step()
    assert weights(optimizer)[0].tolist() == pytest.approx([-0.6, -0.8])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: iter(()), "no parameter in this tuple_iterator; a generator"),
        (list, "no parameter in this list"),
        (lambda: 3, "wanted an optimizer or parameters .* got a int"),
        (lambda: nn.Linear(1, 1), r"module\.parameters\(\).* got a Linear"),
        (lambda: nn.Linear(1, 1).named_parameters(), "got a tuple in a generator"),
        (lambda: [{"params": []}], "got a dict in a list"),
    ],
)
def test_what_is_neither_is_refused(build: Any, message: str) -> None:
    for method in (Clipper("torch").gradient_norm, lambda each: Clipper("torch").clip_gradients(each, 1.0)):
        with pytest.raises(UserError, match=message):
            method(build())


def test_parameters_cannot_be_held() -> None:
    with pytest.raises(ValueError, match="no step to skip"):
        Clipper("torch").clip_gradients(some_parameters(), 1.0, torch.ones(()))


@pytest.mark.parametrize("max_norm", [-1.0, 0.0, float("nan")])
def test_thresholds_that_would_flip_or_lose_gradients(max_norm: float) -> None:
    """pytorch#31367: a negative max_norm flipped the signs."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    for owner in ([parameter], torch.optim.SGD([parameter], lr=1.0)):
        with pytest.raises(UserError, match="max_norm must be more than 0"):
            Clipper("torch").clip_gradients(owner, max_norm)
    assert parameter.grad.tolist() == [1.0, 1.0]
