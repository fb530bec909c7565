"""How TensorBoard shows a run: related curves in one chart, and options beside final metrics."""

from collections.abc import Mapping
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from andrea_callbacks.hooks.packages import is_kind
from andrea_callbacks.hooks.protocols import HasHyperparameters, NamesSources
from andrea_callbacks.hooks.reports import finalize_updates
from andrea_callbacks.hooks.scalars import without_module

Scalar = int | float | str | bool


class TensorBoardLayout(Callback):
    """Lays out custom scalars, and records options with the run's final metrics, in TensorBoard loggers.

    The charts show the loss in training and validation; the norm before and after clipping and the
    threshold; and, if the datamodule names its sources, their losses and weights. The options are those of
    module and datamodule (`hyperparameters`, or Lightning's `hparams`), of the first optimizer, of the
    trainer, and the argument `hyperparameters`. The metrics are all that the run logged, under `final/`.

    Args:
        hyperparameters: More options to show, by name.
        loss: Names of the scalars in the chart of losses.
        norms: Names of the scalars in the chart of norms.
    """

    def __init__(
        self,
        hyperparameters: dict[str, Scalar] | None = None,
        loss: list[str] | None = None,
        norms: list[str] | None = None,
    ) -> None:
        super().__init__()
        self.hyperparameters = dict(hyperparameters or {})
        self.loss = ["train/loss", "val/loss"] if loss is None else loss
        names = ["train/grad_norm", "train/grad_norm_clipped", "train/clip_threshold"]
        self.norms = names if norms is None else norms

    def __getstate__(self) -> dict[str, Any]:
        """Leave the module out of pickles and copies."""
        return without_module(self.__dict__)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lay out the scalars."""
        layout: dict[str, dict[str, list[Any]]] = {
            "update": {"loss": ["Multiline", self.loss], "norm": ["Multiline", self.norms]}
        }
        datamodule = cast(Any, trainer).datamodule
        names = list(datamodule.source_names) if isinstance(datamodule, NamesSources) else []
        if names:
            layout["sources"] = {
                figure: ["Multiline", [f"data/{name}/{figure}" for name in names]]
                for figure in ("loss", "weight", "reward")
            }
        for logger in _loggers(trainer):
            logger.experiment.add_custom_scalars(layout)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record options and final metrics."""
        finalize_updates(pl_module)
        options = self._options(trainer, pl_module)
        metrics = {
            f"final/{name.replace('/', '_')}": float(value)
            for name, value in trainer.callback_metrics.items()
            if bool(torch.isfinite(torch.as_tensor(value)).all())
        }
        for logger in _loggers(trainer):
            logger.log_hyperparams(options, metrics or None, step=trainer.global_step)

    def _options(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Scalar]:
        options: dict[str, Any] = {}
        for owner in (pl_module, cast(Any, trainer).datamodule):
            own = owner.hyperparameters if isinstance(owner, HasHyperparameters) else None
            given = own if isinstance(own, Mapping) else getattr(owner, "hparams", None)
            if isinstance(given, Mapping):
                options |= dict(cast("Mapping[str, Any]", given))
        if trainer.optimizers:
            group = trainer.optimizers[0].param_groups[0]
            options["optimizer"] = type(trainer.optimizers[0]).__name__
            rate = group.get("initial_lr", group.get("lr"))
            if rate is not None:  # Adafactor may set its own
                options["lr"] = float(rate)
            for key in ("weight_decay", "momentum", "betas", "eps"):
                if key in group:
                    options[key] = group[key] if isinstance(group[key], float) else str(group[key])
        options |= {
            "precision": str(trainer.precision),
            "ranks": trainer.world_size,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
        }
        if trainer.gradient_clip_val is not None:
            options["gradient_clip_val"] = float(trainer.gradient_clip_val)
        options |= self.hyperparameters
        return {key: value for key, value in options.items() if isinstance(value, (int, float, str, bool))}


def _loggers(trainer: pl.Trainer) -> list[TensorBoardLogger]:
    if not trainer.is_global_zero:
        return []
    return [cast(TensorBoardLogger, each) for each in trainer.loggers if is_kind(each, TensorBoardLogger)]
