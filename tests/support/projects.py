"""Projects that know nothing of ours, and all callbacks at once to watch them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.demos import transformer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from andrea_callbacks import (
    CoherenceGate,
    EpochSummary,
    FiniteGuard,
    MomentMonitor,
    PreClipNorm,
    RunJournal,
    SourceMonitor,
    SpikeForensics,
    TensorBoardLayout,
    Throughput,
    UpdateLog,
)
from tests.support.toy import INF, NAN, build_trainer


def say_something(module: Any, prompts: list[str], most: int, generator: torch.Generator) -> list[str]:
    """Write a text that depends on the generator; draw from the global one and change the mode too."""
    module.eval()
    torch.rand(3)
    say = "the loss of the model fell in every epoch while its norm was small"
    words = say.split()
    draws = torch.randint(len(words), (most,), generator=generator).tolist()
    return [" ".join(words[at] for at in draws) for _ in prompts]


BUILDERS: dict[str, Callable[..., pl.Callback]] = {
    "PreClipNorm": lambda **options: PreClipNorm(**{"every": 2} | options),
    "FiniteGuard": lambda **options: FiniteGuard(**{"state_every": 2} | options),
    "SpikeForensics": lambda **options: SpikeForensics(**options),
    "MomentMonitor": lambda **options: MomentMonitor(**{"every": 2} | options),
    "CoherenceGate": lambda **options: CoherenceGate(
        **{"every": 2, "start": 0, "max_new_tokens": 20, "generate": say_something} | options
    ),
    "Throughput": lambda **options: Throughput(**{"every": 2} | options),
    "RunJournal": lambda **options: RunJournal(**{"every": 2} | options),
    "UpdateLog": lambda **options: UpdateLog(**options),
    "EpochSummary": lambda **options: EpochSummary(**options),
    "SourceMonitor": lambda **options: SourceMonitor(**options),
    "TensorBoardLayout": lambda **options: TensorBoardLayout(),
}


def everything() -> list[pl.Callback]:
    """Return one of each callback."""
    return [build() for build in BUILDERS.values()]


class TextRows(torch.utils.data.Dataset[Tensor]):
    """Rows for the boring models, the same in every run."""

    def __init__(self, count: int = 64) -> None:
        self.rows = torch.randn(count, 32, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class DemoWords(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets for Lightning's demo transformer."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = (torch.arange(11) * (1 + index % 7) + index) % 50
        return row[:-1], row[1:]


class DocumentedGAN(pl.LightningModule):
    """Two optimizers in turns, as Lightning's page on manual optimization shows a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator_network = nn.Linear(4, 32)
        self.discriminator = nn.Linear(32, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        g_opt, d_opt = self.optimizers()  # type: ignore[misc]
        real, fake = torch.ones(len(batch), 1), torch.zeros(len(batch), 1)
        g_x = self.generator_network(torch.randn(len(batch), 4))
        errors = F.binary_cross_entropy_with_logits(self.discriminator(batch), real)
        errors = errors + F.binary_cross_entropy_with_logits(self.discriminator(g_x.detach()), fake)
        d_opt.zero_grad()
        self.manual_backward(errors)
        d_opt.step()
        deceived = F.binary_cross_entropy_with_logits(self.discriminator(g_x), real)
        g_opt.zero_grad()
        self.manual_backward(deceived)
        g_opt.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator_network.parameters(), lr=1e-3),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-3),
        ]


class DocumentedAccumulation(BoringModel):
    """Steps every second batch, as Lightning's page on manual optimization shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.step(batch) / 2
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()  # type: ignore[union-attr]
            optimizer.zero_grad()  # type: ignore[union-attr]


class BoringAdam(BoringModel):
    """The boring model under AdamW, without a scheduler."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def scaler_plugin(scale: float = 1024.0) -> MixedPrecision:
    """Return 16-mixed with a GradScaler on the CPU, which Lightning itself turns into bf16-mixed."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))


def demo_transformer() -> pl.LightningModule:
    torch.manual_seed(3)
    return transformer.LightningTransformer(vocab_size=50)


def seeded(build: Callable[[], pl.LightningModule]) -> Callable[[], pl.LightningModule]:
    def built() -> pl.LightningModule:
        torch.manual_seed(3)
        return build()

    return built


PROJECTS: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], dict[str, Any]]]] = {
    "transformer": (demo_transformer, dict),
    "transformer accumulating and clipping": (
        demo_transformer,
        lambda: {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0},
    ),
    "boring": (seeded(BoringModel), dict),
    "boring adam": (seeded(BoringAdam), dict),
    "boring accumulating and clipping": (
        seeded(BoringModel),
        lambda: {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0},
    ),
    "boring 16-mixed": (seeded(BoringAdam), lambda: {"plugins": [scaler_plugin()]}),
    "manual": (seeded(ManualOptimBoringModel), dict),
    "manual accumulating": (seeded(DocumentedAccumulation), dict),
    "manual two optimizers": (seeded(DocumentedGAN), dict),
}


def loader_of(name: str) -> DataLoader[Any]:
    """Return the training data of a project, in a fixed order."""
    if "transformer" in name:
        return DataLoader(DemoWords(), batch_size=4)
    return DataLoader(TextRows(), batch_size=2)


class Norms(pl.Callback):
    """Compute the norm of every optimizer step independently, in float64."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.after: list[float] = []

    @staticmethod
    def measure(parameters: Any) -> float:
        return math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(self.measure(optimizer.param_groups[0]["params"]))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step > len(self.after):
            self.after.append(self.measure(pl_module.parameters()))


def train(name: str, callbacks: list[Any], **options: Any) -> pl.LightningModule:
    """Train a project for 16 batches."""
    build, own = PROJECTS[name]
    module = build()
    Path("data").mkdir(exist_ok=True)
    torch.manual_seed(0)
    trainer = build_trainer(
        callbacks=callbacks, **({"limit_train_batches": 16, "limit_val_batches": 0} | own() | options)
    )
    trainer.fit(module, loader_of(name))
    return module


class Foreign(pl.LightningModule):
    """Automatic optimization, dropout, a scheduler; a batch with a 9 in it has a bad loss or gradient."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.kind = kind
        self.layers = nn.Sequential(nn.Linear(32, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))

    def losses(self, batch: Tensor) -> Tensor:
        out = self.layers(batch)[:, 0].square()
        bad = (batch == 9).any(1)
        if bool(bad.any()) and self.kind == "loss":
            return torch.where(bad, NAN, out)
        if bool(bad.any()):
            out.register_hook(lambda gradient: torch.where(bad & (gradient != 0), INF, gradient))
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.losses(batch).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda index: 1 / (1 + index))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def foreign_batches(bad: set[int], count: int = 112) -> list[Tensor]:
    rows = torch.randn(count, 4, 32, generator=torch.Generator().manual_seed(8))
    for number in bad:
        rows[number - 1, 1, 3] = 9.0
    return list(rows)


class Given(pl.LightningModule):
    """Gradients as the batches say, in one direction each."""

    def __init__(self, build: Any = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.v = nn.Parameter(torch.ones(2))
        self.build = build

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * batch[:4]).sum() + (self.v * batch[4:]).sum()

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.w], "name": "matrices"}, {"params": [self.v]}]
        return torch.optim.AdamW(groups, lr=1e-3) if self.build is None else self.build(groups)


def gradients(spike_at: int | None = None, count: int = 60) -> list[Tensor]:
    rows = torch.randn(count, 6, generator=torch.Generator().manual_seed(2)) * 0.1 + 0.5
    if spike_at is not None:
        rows[spike_at - 1] *= 100.0
    return list(rows)
