"""Statistics of paired measurements: medians and their bootstrap intervals."""

from collections.abc import Sequence

import numpy as np


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of paired values and its 95 % bootstrap interval (Efron, 1979)."""
    array = np.array(values)
    draws = np.random.default_rng(0).choice(array, (4000, len(array)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(array)), float(low), float(high)


def describe(values: Sequence[float]) -> str:
    """Return `median [low, high], n pairs`."""
    median, low, high = median_interval(values)
    return f"{median:.3f} [{low:.3f}, {high:.3f}], {len(values)} pairs"
