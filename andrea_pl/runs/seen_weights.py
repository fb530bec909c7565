"""Tells whether the module has the training weights, or others that a callback put in place."""

import lightning.pytorch as pl
from torch import Tensor

from andrea_callbacks.numerics.gradient_norm import is_sharded
from andrea_pl.runs.fingerprint import fingerprint


class SeenWeights:
    """Fingerprints of the weights that a run trained and saved."""

    def __init__(self) -> None:
        self._trained: dict[str, int] | None = None
        self._saved: dict[str, int] | None = None
        self._written: dict[str, int] | None = None

    def begin_validation(self, module: pl.LightningModule) -> None:
        """Remember the training weights before a callback replaces them."""
        self._trained = fingerprint(module)

    def end_validation(self) -> None:
        """Drop the training weights' fingerprint: they are restored."""
        self._trained = None

    @property
    def is_within_validation(self) -> bool:
        """Whether a validation has begun since the last update."""
        return self._trained is not None

    def is_replaced(self, module: pl.LightningModule) -> bool:
        """Return whether the module has other weights than the training weights."""
        return self._trained is not None and fingerprint(module) != self._trained

    def note_saved(self, module: pl.LightningModule) -> None:
        """Remember the module's weights as those of the newest checkpoint."""
        self._saved = fingerprint(module)

    def note_written(self, module: pl.LightningModule, state: dict[str, Tensor]) -> None:
        """Remember the weights in a checkpoint's `state_dict`."""
        self._written = fingerprint(module, state)

    def note_end(self, module: pl.LightningModule) -> tuple[bool, bool]:
        """Remember a run's final weights.

        Returns:
            Whether they differ from the newest checkpoint's training weights, and whether that file holds
            them all the same because another callback put them into it.
        """
        ended = fingerprint(module)
        is_replaced = self._saved is not None and ended != self._saved
        self._saved = ended
        is_whole = not any(map(is_sharded, module.parameters()))
        return is_replaced, is_whole and ended == self._written
