"""A cache of attention's keys and values, so that a new token costs only one row.

B batch, S new tokens, H heads, K head width, C capacity.
"""

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of every layer, filled from the left.

    Args:
        n_layers: Number of layers.
        capacity: Maximum number of tokens, C.
    """

    def __init__(self, n_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: list[Tensor | None] = [None] * n_layers
        self._values: list[Tensor | None] = [None] * n_layers

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, H, S, K) for one layer and return all that the layer has, (B, H, length + S, K)."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            shape = (*key.shape[:2], self.capacity, key.shape[3])
            keys, values = torch.empty(shape, dtype=key.dtype, device=key.device), value.new_empty(shape)
            self._keys[layer], self._values[layer] = keys, values
        end = self.length + key.shape[2]
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, tokens: int) -> None:
        """Advance by the tokens that every layer has now stored."""
        self.length += tokens
