"""Saves and restores the states of all random generators of a process."""

import random
import sys
from typing import Any, cast

import torch

ACCELERATORS = ("cuda", "xpu", "mps")


class RandomState:
    """The states of all generators that a network may use: Python's, NumPy's and torch's.

    Args:
        device: Device whose generator is included besides the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        self._device: Any = None
        if device.type in ACCELERATORS:
            self._device = torch.get_device_module(device)
            self._of_device = self._device.get_rng_state()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        """Restore these states."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._device is not None:
            self._device.set_rng_state(self._of_device)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def state_dict(self) -> dict[str, Any]:
        """Return the states as tensors, numbers and lists, for a checkpoint."""
        version, words, gauss = self._python
        state: dict[str, Any] = {"python": [version, list(words), gauss], "torch": self._torch}
        if self._device is not None:
            state["device"] = self._of_device
        if self._numpy is not None:
            kind, keys, *rest = self._numpy
            state["numpy"] = [str(kind), cast("list[int]", keys.tolist()), *rest]
        return state

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], device: torch.device) -> "RandomState":
        """Return the states from a `state_dict`.

        Generators missing in it, because it was taken on another kind of device or before NumPy was imported,
        keep their current state.
        """
        made = cls(device)
        version, words, gauss = state["python"]
        made._python = (version, tuple(words), gauss)
        made._torch = state["torch"].cpu()
        if made._device is not None and "device" in state:
            made._of_device = state["device"].cpu()
        if made._numpy is not None and "numpy" in state:
            kind, keys, *rest = state["numpy"]
            made._numpy = (kind, sys.modules["numpy"].array(keys, dtype="uint32"), *rest)
        return made
