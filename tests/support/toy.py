"""Toy U, a unigram model whose gradients are known by hand, and what it takes to train it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from andrea_pl import (
    TokenWeightedModule,
    Window,
)

A, B = [0], [1, 1, 1]
"""The labels of two micro-batches, of one token and of three."""

NAN, INF = float("nan"), float("inf")


class ListLoader:
    """A sized loader of ready batches."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class ToyU(TokenWeightedModule):
    """Vocabulary 2, logits = b everywhere; a micro-batch is labels, or a pair (labels, factor)."""

    def __init__(
        self,
        build: Callable[[Any], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], Any] | None = None,
        smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.b = nn.Parameter(torch.zeros(2))
        self.build = build or (lambda parameters: torch.optim.SGD(parameters, lr=1.0))
        self.scheduler = scheduler
        self.smoothing = smoothing

    def count_tokens(self, micro_batch: Any) -> int:
        labels = micro_batch[0] if isinstance(micro_batch, tuple) else micro_batch
        return int((labels != -100).sum())

    def loss_sum(self, micro_batch: Any) -> Tensor:
        labels, factor = micro_batch if isinstance(micro_batch, tuple) else (micro_batch, 1.0)
        flat = labels.flatten()
        loss = F.cross_entropy(
            self.b.expand(len(flat), 2),
            flat,
            reduction="sum",
            ignore_index=-100,
            label_smoothing=self.smoothing,
        )
        return loss * factor

    def configure_optimizers(self) -> Any:
        optimizer = self.build(self.parameters())
        if self.scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"},
        }


class Recorder(pl.Callback):
    """Keeps what a callback can see: the gradient before clipping, the weights after, and the reports."""

    def __init__(self) -> None:
        self.gradients: list[list[Tensor | None]] = []
        self.weights: list[Tensor] = []
        self.reports: list[dict[str, Any]] = []
        self.steps: list[int] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append([None if p.grad is None else p.grad.clone() for p in pl_module.parameters()])

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.weights.append(torch.cat([p.detach().flatten().clone() for p in pl_module.parameters()]))
        self.reports.append(dict(pl_module.update_report))
        self.steps.append(trainer.global_step)


class RowLogger(pl.loggers.logger.Logger):
    """A logger that keeps its rows."""

    def __init__(self, name: str = "rows") -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((step, metrics))

    def series(self, name: str) -> list[tuple[int, float]]:
        return [(step, row[name]) for step, row in self.rows if name in row]


def build_trainer(**options: Any) -> pl.Trainer:
    """Return a silent trainer on the CPU that writes nothing unless told to."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    if "max_steps" not in options:
        defaults["max_epochs"] = 1
    return pl.Trainer(**(defaults | options))


def fit(
    module: pl.LightningModule, batches: Sequence[Any] | Any, **options: Any
) -> tuple[pl.Trainer, Recorder]:
    """Train on ready batches and return the trainer and what could be seen."""
    recorder = Recorder()
    callbacks = [recorder, *options.pop("callbacks", [])]
    trainer = build_trainer(callbacks=callbacks, **options)
    loader = ListLoader(batches) if isinstance(batches, list) else batches
    trainer.fit(module, loader, **({"ckpt_path": None}))
    return trainer, recorder


def labels(*rows: Sequence[int]) -> list[Tensor]:
    """Return one micro-batch of labels a row."""
    return [torch.tensor(list(row)) for row in rows]


def window(*rows: Sequence[int]) -> Window:
    """Return a window of micro-batches of labels."""
    return Window(labels(*rows))


def halving(optimizer: Any) -> Any:
    """Return a schedule of 1 / (k + 1)."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda index: 1 / (index + 1))


def micro_batches(count: int) -> DataLoader[Any]:
    """Return a DataLoader of micro-batches of one label."""
    return DataLoader(list(torch.zeros(count, 1, dtype=torch.int64)), batch_size=1)


def scaler_plugin(scale: float) -> MixedPrecision:
    """Return 16-mixed with a GradScaler on the CPU."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))
