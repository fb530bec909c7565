"""The clip hook on one device."""

from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

from andrea_pl.errors import UserError
from andrea_pl.optim.clipping import ClipperKind
from andrea_pl.strategies.clip_mixin import ClipHook


class ClipSingleDeviceStrategy(ClipHook, SingleDeviceStrategy):
    """One device, with the clip hook; registered as `clip_single_device`.

    Args:
        clipper: See `Clipper`.
        device: The device; None uses the trainer's.
        options: Options of Lightning's SingleDeviceStrategy.
    """

    strategy_name = "clip_single_device"

    def __init__(
        self, clipper: ClipperKind = "auto", device: str | torch.device | None = None, **options: Any
    ) -> None:
        super().__init__(clipper=clipper, device="cpu" if device is None else device, **options)
        self._is_device_given = device is not None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices that the trainer chose; the trainer uses this attribute."""
        return [self.root_device] if self._is_device_given else None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise UserError(
                f"{type(self).__name__} trains on one device and the trainer has {len(devices)}: use "
                "trainer.devices: 1, or trainer.strategy: clip_ddp"
            )
        self._root_device = devices[0]


StrategyRegistry.register(
    ClipSingleDeviceStrategy.strategy_name,
    ClipSingleDeviceStrategy,
    description="One device, with the clip hook",
)
