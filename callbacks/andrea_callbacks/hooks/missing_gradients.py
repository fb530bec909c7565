"""Finds trainable parameters that never received a gradient."""

from collections.abc import Iterable

import lightning.pytorch as pl
from torch import Tensor


class MissingGradients:
    """Follows a module's trainable parameters until each has received a gradient."""

    def __init__(self) -> None:
        self._received: set[str] = set()
        self._lacking: list[tuple[str, Tensor]] = []

    @property
    def names(self) -> list[str]:
        """Names of the parameters without a gradient so far."""
        return [name for name, _ in self._lacking]

    def begin(self, module: pl.LightningModule) -> None:
        """Look up the parameters of a fit."""
        self._lacking = [
            (name, each)
            for name, each in module.named_parameters()
            if each.requires_grad and name not in self._received
        ]

    def note(self) -> None:
        """Record which parameters have a gradient now."""
        if self._lacking:
            self._received |= {name for name, each in self._lacking if each.grad is not None}
            self._lacking = [(name, each) for name, each in self._lacking if each.grad is None]

    def clear(self) -> None:
        """Release the module."""
        self._lacking.clear()

    def received(self) -> list[str]:
        """Return the names of the parameters that received one, for a checkpoint."""
        return sorted(self._received)

    def restore(self, received: Iterable[str]) -> None:
        """Continue from a checkpoint."""
        self._received = set(received)
