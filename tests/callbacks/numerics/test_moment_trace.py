"""The moments that one spike leaves behind, by hand and as torch computes them."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andrea_callbacks import moment_trace

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
]


def test_the_seeds_exercise() -> None:
    """A gradient of norm 50 among 0.5."""
    trace = moment_trace(spike=50.0, typical=0.5, updates=10, beta1=0.9)
    assert trace.first_from_spike[0] == pytest.approx(5.0)
    assert trace.first_from_spike[10] == pytest.approx(1.743, abs=5e-4)
    assert trace.half_life_first == pytest.approx(6.58, abs=5e-3)
    assert trace.half_life_second == pytest.approx(692.8, abs=0.05)
    assert trace.first[0] == pytest.approx(5.45)  # 0.9 * 0.5 besides
    clipped = moment_trace(spike=50.0, typical=0.5, updates=10, max_norm=1.0)
    assert clipped.first_from_spike[0] == pytest.approx(0.1)
    assert clipped.share_of_first[0] == pytest.approx(0.1 / 0.55)
    assert trace.rate_factor[0] == pytest.approx(0.5 * math.sqrt(0.999) / math.sqrt(2.5 + 0.999 * 0.25))


@given(
    st.floats(0.1, 1e3),
    st.floats(0.01, 10.0),
    st.floats(0.0, 0.99),
    st.floats(0.5, 0.9999),
    st.integers(0, 30),
)
def test_trace_is_adam(spike: float, typical: float, beta1: float, beta2: float, updates: int) -> None:
    """Against the recurrence itself, started where it was steady."""
    trace = moment_trace(spike, typical, updates, beta1, beta2)
    first, second = typical, typical**2
    for k in range(updates + 1):
        gradient = typical if k else spike
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        assert trace.first[k] == pytest.approx(first)
        assert trace.second[k] == pytest.approx(second)


@pytest.mark.parametrize("bad", [{"beta1": 1.0}, {"beta2": -0.1}, {"updates": -1}, {"spike": -1.0}])
def test_trace_refuses(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="moment_trace: "):
        moment_trace(**({"spike": 1.0, "typical": 1.0, "updates": 1} | bad))
