"""What a strategy needs to measure and clip gradients for module, callbacks and Lightning alike."""

from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from andrea_callbacks.numerics.gradient_norm import GradientNorm
from andrea_pl.optim.clipping import Clipper, ClipperKind, Gradients


class ClipHook(Strategy):
    """Mixin, before a strategy of Lightning's, that gives it `gradient_norm` and `clip_gradients`.

    A `TokenWeightedModule` and the callbacks find the two by name. In any other module Lightning's own
    `gradient_clip_val` goes the same way, with what that adds: it works with fused optimizers, under every
    precision, and leaves gradients alone whose norm is not finite.

    Args:
        clipper: See `Clipper`.
        options: Those of the strategy behind the mixin.
    """

    def __init__(self, clipper: ClipperKind = "auto", **options: Any) -> None:
        super().__init__(**options)
        self.clipper = Clipper(clipper)

    def __repr__(self) -> str:
        # pytorch_lightning's Trainer quotes this where it refuses the strategy
        return (
            f"<{type(self).__name__}, which needs a Trainer of lightning.pytorch, not of pytorch_lightning: "
            "import lightning.pytorch as pl>"
        )

    def gradient_norm(self, optimizer: Gradients) -> GradientNorm:
        """Return norms and non-finite counts of gradients; see `Clipper.gradient_norm`."""
        return self.clipper.gradient_norm(optimizer)

    def clip_gradients(self, optimizer: Gradients, max_norm: float, skip: Tensor | None = None) -> Tensor:
        """Clip gradients and return the coefficient; see `Clipper.clip_gradients`."""
        return self.clipper.clip_gradients(optimizer, max_norm, skip)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Build the extension before training starts, and take Lightning's clip over."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if trainer.world_size > 1:
            self.clipper.agree_on_extension(self.root_device)
        else:
            self.clipper.has_extension(self.root_device)
        plugin = cast(Any, self.precision_plugin)
        plugin.clip_gradients = _LightningClip(self, plugin)
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None:
            scaler.unscale_ = _Unscale(self, scaler.unscale_)

    @override
    def teardown(self) -> None:
        """Give back what was taken over; plugin and scaler may serve another trainer."""
        plugin = self.precision_plugin
        vars(plugin).pop("clip_gradients", None)
        vars(getattr(plugin, "scaler", None) or plugin).pop("unscale_", None)
        super().teardown()


class _LightningClip:
    """Stands in for `clip_gradients` of the precision plugin, which Lightning calls to clip.

    The plugin itself stays: a GradScaler's state in a checkpoint is found by the plugin's class.
    """

    def __init__(self, hook: ClipHook, plugin: Any) -> None:
        self.hook = hook
        self.plugin = plugin
        self.original = type(plugin).clip_gradients

    def __call__(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if clip_val <= 0:
            return
        raw = _raw(optimizer)
        if gradient_clip_algorithm != GradClipAlgorithmType.NORM:
            self.hook.clipper.scale_now(raw)
            self.original(self.plugin, optimizer, clip_val, gradient_clip_algorithm)
            return
        scaler = getattr(self.plugin, "scaler", None)
        if scaler is not None and getattr(raw, "_step_supports_amp_scaling", False):
            scaler.unscale_(raw)  # which Lightning leaves to a fused optimizer's step
        with torch.autocast(self.hook.root_device.type, enabled=False):
            self.hook.clip_gradients(raw, clip_val)


class _Unscale:
    """Stands in for a GradScaler's `unscale_`, which writes gradients without torch counting it."""

    def __init__(self, hook: ClipHook, original: Any) -> None:
        self.hook = hook
        self.original = original

    def __call__(self, optimizer: Optimizer) -> None:
        self.original(optimizer)
        self.hook.clipper.invalidate(_raw(optimizer))


def _raw(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer behind Lightning's wrapper, on which attributes would be lost."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
