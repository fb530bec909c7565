"""Measures how much of a text repeats itself."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

STRETCH = 1024
"""Length, in tokens, of the stretches in which repeats count."""
MOST_STRETCHES = 2048
"""Maximum number of stretches; a longer text is sampled evenly."""
LEAST_TOKENS = 3


def repetition(tokens: NDArray[Any]) -> float:
    """Return the share of trigrams that occurred before within the same stretch of a thousand tokens.

    Prose repeats about a tenth of its trigrams at this distance, lists and templates two or three times as
    much.

    Args:
        tokens: (T,) ids of a text, document after document.

    Returns:
        A share from 0 to 1; 0 for fewer than three tokens.
    """
    width = min(STRETCH, len(tokens))
    if width < LEAST_TOKENS:
        return 0.0
    starts = np.arange(len(tokens) // width) * width
    starts = starts[:: -(-len(starts) // MOST_STRETCHES)]
    rows = np.stack([np.asarray(tokens[start : start + width]) for start in starts]).astype(np.uint64)
    trigrams = (rows[:, :-2] << np.uint64(42)) ^ (rows[:, 1:-1] << np.uint64(21)) ^ rows[:, 2:]
    trigrams.sort(axis=1)
    return float((trigrams[:, 1:] == trigrams[:, :-1]).sum()) / trigrams.size
