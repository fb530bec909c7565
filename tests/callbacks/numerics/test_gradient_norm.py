"""The norm against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from andrea_callbacks import gradient_norm
from andrea_callbacks.numerics.gradient_norm import ROW, optimizer_parameters


def with_gradient(gradient: Tensor | None) -> nn.Parameter:
    shape = (1,) if gradient is None else gradient.shape
    dtype = torch.float32 if gradient is None else gradient.dtype
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta").new_empty(shape, device="cpu"))
    parameter.grad = gradient
    return parameter


def exact(*gradients: Tensor) -> float:
    return sum(float(each.double().square().sum()) for each in gradients) ** 0.5


@given(
    sizes=st.lists(st.sampled_from([0, 1, 3, ROW - 1, ROW, ROW + 1, 3 * ROW + 7]), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    exponent=st.integers(-30, 18),
)
@settings(max_examples=60)
@pytest.mark.guarantee("the norm agrees with float64")
def test_agrees_with_float64(sizes: list[int], dtype: torch.dtype, exponent: int) -> None:
    """Tails, empty tensors, and magnitudes whose squares leave float32."""
    generator = torch.Generator().manual_seed(sum(sizes))
    limit = 0 if dtype == torch.float16 else exponent
    gradients = [(torch.randn(size, generator=generator) * 10.0**limit).to(dtype) for size in sizes]
    norm = gradient_norm([with_gradient(each) for each in gradients]).total
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(exact(*gradients), rel=1e-6, abs=0)


@pytest.mark.system
def test_large_tensor() -> None:
    """120M elements, where torch's own float32 norm is 1.3 % off."""
    gradient = torch.randn(120_000_000, generator=torch.Generator().manual_seed(0))
    expected = sum(float(part.double().square().sum()) for part in gradient.split(1 << 22)) ** 0.5
    assert float(gradient_norm([with_gradient(gradient)]).total) == pytest.approx(expected, rel=1e-6)


def test_half_precision_of_a_hundred() -> None:
    """fairscale#1092: a million times 100 in float16 is 100000."""
    assert float(
        gradient_norm([with_gradient(torch.full((1_000_000,), 100.0, dtype=torch.float16))]).total
    ) == pytest.approx(100_000.0, rel=1e-6)


@pytest.mark.guarantee("the norm agrees with float64")
def test_mixed_none_empty_zero_and_listed_twice() -> None:
    first = with_gradient(torch.full((9,), 1.0))
    second = with_gradient(torch.full((4,), 2.0, dtype=torch.bfloat16))
    others = [with_gradient(None), with_gradient(torch.zeros(0)), with_gradient(torch.zeros(5))]
    assert float(gradient_norm([first, second, *others, first]).total) == 5.0
    assert float(gradient_norm([]).total) == 0.0
    assert float(gradient_norm(others).total) == 0.0


def test_sparse_rows_add_up() -> None:
    """pytorch#4829: sqrt(3 * 4 + 3 * 1)."""
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 1, 2])).sum().backward()
    assert float(gradient_norm(embedding.parameters()).total) == pytest.approx(3.872983, abs=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_unusual_layouts_fall_back() -> None:
    """MONAI research#426: tensors without plain storage have the same norm."""
    dense = torch.tensor([[3.0, 0.0], [0.0, 4.0]])

    class Holder:
        def __init__(self, grad: Tensor) -> None:
            self.grad = grad

    for gradient in (
        dense.to_sparse_csr(),
        dense.to_sparse(),
        dense.to_mkldnn(),
        dense.expand(1, 2, 2),
        dense.t(),
    ):
        assert float(gradient_norm([Holder(gradient)]).total) == pytest.approx(5.0)  # type: ignore[list-item]


def test_non_contiguous_and_complex() -> None:
    gradient = torch.randn(7, 11).t()
    assert float(gradient_norm([with_gradient(gradient)]).total) == pytest.approx(exact(gradient), rel=1e-7)
    strided = torch.randn(8, 8)[::2, 1::3]
    assert float(gradient_norm([with_gradient(strided)]).total) == pytest.approx(exact(strided), rel=1e-7)
    turned = torch.tensor([3.0 + 4.0j])
    assert float(gradient_norm([with_gradient(turned)]).total) == pytest.approx(5.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite(value: float) -> None:
    norm = gradient_norm([with_gradient(torch.tensor([1.0, value])), with_gradient(torch.ones(3))]).total
    assert not torch.isfinite(norm)


def test_autocast_has_no_influence() -> None:
    gradient = torch.randn(5000)
    with torch.autocast("cpu", torch.bfloat16):
        norm = gradient_norm([with_gradient(gradient)]).total
    assert float(norm) == pytest.approx(exact(gradient), rel=1e-7)


def test_first_nonfinite_names_the_parameter() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert gradient_norm(module.parameters()).first_nonfinite(module) is None
    module[1].bias.grad[0] = float("inf")
    assert gradient_norm(module.parameters()).first_nonfinite(module) == "1.bias"


def test_optimizer_parameters_once_each() -> None:
    one, two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [one]}, {"params": [two]}], lr=1.0)
    optimizer.param_groups.append({**optimizer.param_groups[0]})
    assert optimizer_parameters(optimizer) == [one, two]
