"""Counts the tokens of each source in an update."""

import torch
from torch import Tensor

from andrea_callbacks.forensics.sample_identity import field
from andrea_callbacks.hooks.update_window import UpdateWindow

MOST_SOURCES = 256
"""Sources counted separately; all others share the last entry."""


def tokens_of_sources(window: UpdateWindow, like: Tensor) -> Tensor:
    """Return (MOST_SOURCES,) tokens of each source in the window, zeros if batches do not name sources."""
    tokens = like.new_zeros(MOST_SOURCES)
    for micro_batch in window.micro_batches:
        sources, mask = field(micro_batch, "source_id"), field(micro_batch, "valid_mask")
        if not isinstance(sources, Tensor) or sources.ndim != 1 or sources.is_floating_point():
            continue
        is_text = sources >= 0  # fillers have no source
        weights = torch.ones_like(sources)
        if (
            isinstance(mask, Tensor)
            and not mask.is_floating_point()
            and mask.ndim > 1
            and len(mask) == len(sources)
        ):
            weights = (mask != 0).flatten(1).sum(1)
        places = sources.clamp(0, MOST_SOURCES - 1).to(tokens.device, torch.int64)
        tokens.index_add_(0, places, (weights * is_text).to(tokens))
    return tokens
