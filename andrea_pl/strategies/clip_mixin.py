"""The mixin by which a strategy measures and clips gradients for module, callbacks and Lightning."""

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
    """Mixin for Lightning's strategies that adds `gradient_norm` and `clip_gradients`.

    A `TokenWeightedModule` and the callbacks find these two by name. In any other module they also replace
    Lightning's `gradient_clip_val`, which then works with fused optimizers and under every precision, and
    does not change gradients whose norm is not finite.

    Args:
        clipper: See `Clipper`.
        options: Options of the strategy after the mixin.
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
        """Build the extension before training starts, and replace Lightning's clip."""
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
        """Restore what was replaced, since plugin and scaler may be used by another trainer."""
        plugin = self.precision_plugin
        vars(plugin).pop("clip_gradients", None)
        vars(getattr(plugin, "scaler", None) or plugin).pop("unscale_", None)
        super().teardown()


class _LightningClip:
    """Replaces `clip_gradients` of the precision plugin, which Lightning calls to clip.

    The plugin itself stays, since its class is the key of the GradScaler's state in checkpoints.
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
    """Replaces a GradScaler's `unscale_`, which writes gradients without torch counting it."""

    def __init__(self, hook: ClipHook, original: Any) -> None:
        self.hook = hook
        self.original = original

    def __call__(self, optimizer: Optimizer) -> None:
        self.original(optimizer)
        self.hook.clipper.invalidate(_raw(optimizer))


def _raw(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside Lightning's wrapper. Attributes set on the wrapper would be lost."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
