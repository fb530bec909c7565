"""Run by test_ranks.py, on one process or two: trains, and writes what each rank saw.

usage: two_ranks.py RANKS FOLDER
"""

import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from andrea_callbacks.numerics.host_transfer import late_reading
from andrea_pl import (
    ClipDDPStrategy,
    ClipModelParallelStrategy,
    ClipSingleDeviceStrategy,
    Curriculum,
    DurableCheckpoint,
    LanguageModule,
    NonFiniteError,
    TextDataModule,
    TextSource,
    TransformerConfig,
    Ucb1,
    UserError,
    Window,
    WindowLoader,
)
from andrea_pl.optim import ExtensionError
from andrea_pl.optim import clipping as clipping_module
from andrea_pl.runs.manifest import newest_valid
from andrea_pl.runs.signals import StoppedBySignal
from tests.support.toy import NAN, A, B, ListLoader, Recorder, RowLogger, ToyU, build_trainer, window
from tests.support.unequal_ranks import SCENARIOS as UNEQUAL

RANKS, FOLDER = int(sys.argv[1]), Path(sys.argv[2])

warnings.simplefilter("ignore")


class Reductions(pl.Callback):
    """Count gradient reductions."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if RANKS == 1:
            return
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def counting(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations here
            self.count += 1
            return allreduce_hook(state, bucket)

        trainer.strategy.model.register_comm_hook(None, counting)


def trainer_of(**options: Any) -> pl.Trainer:
    """Return a trainer on this many ranks."""
    if RANKS > 1:
        options = {**options, "devices": RANKS, "strategy": DDPStrategy(process_group_backend="gloo")}
    return build_trainer(**options)


def toy(per_rank: list[list[Any]], **options: Any) -> dict[str, Any]:
    """Train Toy U on the windows of each rank."""
    recorder, counter = Recorder(), Reductions()
    logger = RowLogger()
    trainer = trainer_of(callbacks=[recorder, counter], logger=logger)
    module = ToyU(**options)
    error = None
    try:
        trainer.fit(module, ListLoader(per_rank[trainer.global_rank]))
    except NonFiniteError as caught:
        error = str(caught)
    return {
        "gradients": [each[0] for each in recorder.gradients],
        "weights": recorder.weights,
        "norms": [float(report.get("grad_norm", NAN)) for report in recorder.reports],
        "losses": [float(report.get("loss", NAN)) for report in recorder.reports],
        "outcomes": [report["outcome"] for report in recorder.reports],
        "reductions": counter.count,
        "error": error,
        "final": module.b.detach().clone(),
        "rows": [step for step, row in logger.rows if "train/loss" in row],
    }


def language() -> dict[str, Any]:
    """Train and validate a small model on a text data module."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(2, 30, (90,), generator=generator).tolist()
    rows = [torch.randint(0, 50, (size,), generator=generator).tolist() for size in sizes]
    data = TextDataModule(
        [
            TextSource(name="t", kind="tokens", documents=rows[:70]),
            TextSource(name="v", kind="tokens", documents=rows[70:], split="val"),
        ],
        vocab_size=50,
        block_size=16,
        sequences_per_update=16,
        micro_batch_tokens=40,
    )
    torch.manual_seed(2)
    shape = TransformerConfig(vocab_size=50, block_size=16, d_model=16, n_heads=2, n_layers=1)
    module = LanguageModule(shape, lr=3e-3, max_norm=0.5).double()
    recorder = Recorder()
    windows: list[list[tuple[int, int]]] = []
    exact: list[float] = []

    class Seen(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            windows.append(
                [
                    pair
                    for part in batch
                    for pair in zip(part["document_id"].tolist(), part["offset"].tolist(), strict=True)
                    if pair[0] >= 0
                ]
            )

        def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.latest = pl_module.evaluation

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            exact.append(float(pl_module.evaluation.mean.compute()["loss"]))

    trainer = trainer_of(callbacks=[recorder, Seen()], val_check_interval=1.0, max_epochs=2)
    trainer.fit(module, datamodule=data)
    return {
        "windows": windows,
        "weights": recorder.weights,
        "norms": [float(report["grad_norm"]) for report in recorder.reports],
        "tokens": [report["tokens"] for report in recorder.reports],
        "validation": exact,
        "micro_batches": [],
    }


def bandit() -> dict[str, Any]:
    """Train on three sources under a bandit, whose losses the ranks must add up."""
    generator = torch.Generator().manual_seed(4)
    sources: list[TextSource] = []
    for number, name in enumerate(("prose", "lists", "answers")):
        sizes = torch.randint(3, 8 + 4 * number, (30,), generator=generator).tolist()
        rows = [torch.randint(0, 10 + 20 * number, (size,), generator=generator).tolist() for size in sizes]
        sources.append(TextSource(name=name, kind="tokens", documents=rows))
    data = TextDataModule(
        sources,
        vocab_size=50,
        block_size=16,
        sequences_per_update=7,
        micro_batch_tokens=40,
        val_fraction=0.0,
        curriculum=Curriculum(mixture=Ucb1(), phases=[3, 5], min_clip_coefficient=0.0, updates_per_epoch=20),
    )
    torch.manual_seed(2)
    shape = TransformerConfig(vocab_size=50, block_size=16, d_model=16, n_heads=2, n_layers=1)
    module = LanguageModule(shape, lr=1e-2, schedule="constant").double()
    windows: list[list[int]] = []
    figures: list[tuple[Any, ...]] = []

    class Seen(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            windows.append([each for part in batch for each in part["document_id"].tolist() if each >= 0])

        def take_report(self, trainer: Any, report: Any) -> None:
            weights = tuple(data.source_figures(report["update"])["weight"].values())
            figures.append((report["source_losses"], report["source_tokens"], weights))

    trainer_of(callbacks=[Seen()], max_steps=40, max_epochs=-1).fit(module, datamodule=data)
    return {"windows": windows, "figures": figures}


def resumed() -> dict[str, Any]:
    """Stop by a signal that one rank alone gets, resume, and compare with a run that nobody stops.

    Dropout draws from each rank's own generator, so that both must come back.
    """
    documents = [[1 + number % 40, 2, 3 + number % 7, 4, 5][: 2 + number % 4] for number in range(60)]
    folder = FOLDER / "resumed"
    weights: list[list[Tensor]] = []
    stops: list[Any] = []

    class Told(pl.Callback):
        def __init__(self, at: int, in_validation: bool) -> None:
            self.at = at
            self.in_validation = in_validation

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            is_one = trainer.global_rank == RANKS - 1 and not self.in_validation
            if trainer.global_step + 1 == self.at and is_one:
                signal.raise_signal(signal.SIGTERM)

        def on_validation_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step == self.at and trainer.global_rank == 0 and self.in_validation:
                signal.raise_signal(signal.SIGTERM)

    class Differs(pl.Callback):
        """A metric that falls on one rank and rises on the other, as without sync_dist."""

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            sign = 1 if trainer.global_rank else -1
            pl_module.log("metric", float(sign * trainer.global_step), batch_size=1)

    def train(place: str, told: int = 0, resume: Path | None = None, in_validation: bool = False) -> None:
        data = TextDataModule(
            [TextSource(name="all", kind="tokens", documents=documents)],
            vocab_size=50,
            block_size=16,
            sequences_per_update=6,
            micro_batch_tokens=20,
            val_fraction=0.1,
        )
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        torch.manual_seed(5 if resume is None else 77 + rank)
        shape = TransformerConfig(
            vocab_size=50, block_size=16, d_model=16, n_heads=2, n_layers=1, dropout=0.2
        )
        module = LanguageModule(shape, lr=1e-2, schedule="constant")
        saving = DurableCheckpoint(every=4, monitor="metric", dirpath=str(folder / place))
        options = {
            "max_steps": 20,
            "max_epochs": -1,
            "val_check_interval": 5,
            "check_val_every_n_epoch": None,
        }
        trainer = trainer_of(
            callbacks=[Differs(), Told(told, in_validation), saving], enable_checkpointing=True, **options
        )
        try:
            trainer.fit(module, datamodule=data, ckpt_path=resume)
        except StoppedBySignal as stop:
            stops.append((stop.code, stop.update))
            return
        weights.append([each.detach().clone() for each in module.parameters()])

    train("straight")
    train("stopped", told=10)
    train("again", told=15, resume=newest_valid(folder / "stopped").path, in_validation=True)
    train("rest", resume=newest_valid(folder / "again").path)
    kept = torch.load(newest_valid(folder / "stopped").path, weights_only=True)
    return {"weights": weights, "stops": stops, "random": kept["andrea_resume"]["random"]}


def sharded_loader() -> dict[str, Any]:
    """Train through a WindowLoader over a sharded DataLoader, then over one that is not."""
    values = [torch.tensor([number % 2]) for number in range(8)]
    recorder = Recorder()
    trainer = trainer_of(callbacks=[recorder])
    rank = trainer.global_rank
    sampler = DistributedSampler(values, num_replicas=RANKS, rank=rank, shuffle=False) if RANKS > 1 else None
    trainer.fit(ToyU(), WindowLoader(DataLoader(values, batch_size=1, sampler=sampler), 4 // RANKS))
    refusal = None
    try:
        trainer_of().fit(ToyU(), WindowLoader(ListLoader(values), 2))
    except ValueError as error:
        refusal = str(error)
    return {
        "weights": recorder.weights,
        "tokens": [r["tokens"] for r in recorder.reports],
        "refusal": refusal,
    }


class Sharded(ToyU):
    """Toy U whose parameter is shared out among ranks, one element each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.unigram = torch.nn.Linear(1, 2, bias=False)
        torch.nn.init.zeros_(self.unigram.weight)
        del self.b

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.unigram, mesh=self.device_mesh["data_parallel"])

    def loss_sum(self, micro_batch: Any) -> torch.Tensor:
        self.b = self.unigram(torch.ones(1, 1)).squeeze(0)
        return super().loss_sum(micro_batch)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor, wherever it lies."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


class GradientsAfterBackward(pl.Callback):
    """Notes how many parameters have a gradient after each backward pass; FSDP2 gives it by exchange."""

    def __init__(self) -> None:
        self.present: list[int] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.present.append(sum(each.grad is not None for each in pl_module.parameters()))


def clip_strategy(kind: str, clipper: str) -> Any:
    if RANKS == 1:
        return ClipSingleDeviceStrategy(clipper=clipper)
    if kind == "fsdp2":
        return ClipModelParallelStrategy(clipper=clipper, process_group_backend="gloo")
    return ClipDDPStrategy(clipper=clipper, process_group_backend="gloo", static_graph=kind == "static")


def clipping(kind: str, build: Any, clipper: str = "extension", updates: int = 10) -> dict[str, Any]:
    """Train a small language model on windows of two micro-batches a rank, clipped most of the time."""
    generator = torch.Generator().manual_seed(5)
    starts = torch.randint(0, 19, (updates, 2, 2, 3), generator=generator)
    rows = (starts[..., None] + torch.arange(9)) % 19

    def window_of(step: int, rank: int) -> Window:
        parts = rows[step].flatten(0, 1) if RANKS == 1 else rows[step, rank]
        return Window(
            [
                {"input_ids": part[:, :-1], "labels": part[:, 1:], "num_tokens": part[:, 1:].numel()}
                for part in parts
            ]
        )

    torch.manual_seed(6)
    shape = TransformerConfig(vocab_size=19, block_size=8, d_model=16, n_heads=2, n_layers=2)
    module = LanguageModule(shape, optimizer=build, schedule="constant", max_norm=0.9)
    reports: list[dict[str, Any]] = []

    class Reports(pl.Callback):
        def take_report(self, trainer: Any, report: Any) -> None:
            reports.append(dict(report))

    logger, gradients = RowLogger(), GradientsAfterBackward()
    trainer = build_trainer(
        devices=RANKS,
        strategy=clip_strategy(kind, clipper),
        callbacks=[Reports(), gradients],
        logger=logger,
        max_steps=updates,
        max_epochs=1,
    )
    windows = [window_of(step, trainer.global_rank) for step in range(updates)]
    trainer.fit(module, ListLoader(windows))
    return {
        "norms": [float(each["grad_norm"]) for each in reports],
        "coefficients": [float(each["clip_coefficient"]) for each in reports],
        "losses": [float(each["loss"]) for each in reports],
        "types": sorted({type(each["grad_norm"]).__name__ for each in reports}),
        "weights": [whole(each).double() for each in module.parameters()],
        "sharded": sum(hasattr(each, "full_tensor") for each in module.parameters()),
        "present": gradients.present,
        "logged": logger.series("train/grad_norm"),
    }


def sharded_toy(per_rank: list[list[Any]], **options: Any) -> dict[str, Any]:
    """Train the sharded Toy U."""
    module = Sharded(build=adamw, **options)
    outcomes: list[str] = []

    class Outcomes(pl.Callback):
        def take_report(self, trainer: Any, report: Any) -> None:
            outcomes.append(report["outcome"])

    trainer = build_trainer(
        devices=RANKS, strategy=clip_strategy("fsdp2", "extension"), callbacks=[Outcomes()]
    )
    error = None
    try:
        trainer.fit(module, ListLoader(per_rank[trainer.global_rank]))
    except NonFiniteError as caught:
        error = str(caught)
    return {"outcomes": outcomes, "weight": whole(module.unigram.weight).flatten(), "error": error}


class Foreign(pl.LightningModule):
    """Automatic optimization in a project that knows nothing of ours."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(4, 2).double()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def automatic(static_graph: bool) -> dict[str, Any]:
    """Accumulate two batches of each rank, and clip by Lightning's own option."""
    generator = torch.Generator().manual_seed(8)
    batches = torch.randn(6, 2, 3, 4, generator=generator).double()
    strategy = ClipDDPStrategy(process_group_backend="gloo", static_graph=static_graph)
    trainer = build_trainer(
        devices=RANKS,
        strategy=strategy if RANKS > 1 else ClipSingleDeviceStrategy(),
        accumulate_grad_batches=2 * (3 - RANKS),
        gradient_clip_val=0.5,
    )
    # one rank sees what both see, one after the other; there the mean over ranks becomes one over batches
    rows = batches.flatten(0, 1) if RANKS == 1 else batches[:, trainer.global_rank]
    module = Foreign()
    trainer.fit(module, ListLoader(list(rows)))
    return {"weights": [each.detach().clone() for each in module.parameters()]}


def refused(strategy: Any, build: Any = None, **options: Any) -> dict[str, Any]:
    """Return the message with which a combination is refused."""
    try:
        build_trainer(devices=RANKS, strategy=strategy, **options).fit(
            Sharded(build=build), ListLoader([window(A)])
        )
    except UserError as error:
        return {"error": str(error)}
    return {"error": ""}


class Breaks(Sharded):
    """Catches an exception between the micro-batches of its second update, and goes on."""

    def loss_sum(self, micro_batch: Any) -> torch.Tensor:
        if self.trainer.global_step == 1 and self.is_second:
            raise ValueError("broken")
        self.is_second = True
        return super().loss_sum(micro_batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.is_second = False
        try:
            return super().training_step(batch, batch_idx)
        except ValueError as error:
            if "broken" not in str(error):
                raise
            return None


def broken() -> dict[str, Any]:
    """Return the message with which a window after a broken one is refused under FSDP2."""
    trainer = build_trainer(devices=RANKS, strategy=clip_strategy("fsdp2", "torch"))
    try:
        trainer.fit(Breaks(build=adamw), ListLoader([window(A, B)] * 3))
    except UserError as error:
        return {"error": str(error)}
    return {"error": ""}


def lacking(clipper: str) -> dict[str, Any]:
    """Train where the extension cannot be had on rank 1."""

    def load(device: torch.device) -> None:
        if RANKS > 1 and torch.distributed.get_rank() == 1:
            raise ExtensionError("no compiler on rank 1")

    original, clipping_module.load_extension = clipping_module.load_extension, load
    strategy = ClipDDPStrategy(clipper=clipper, process_group_backend="gloo")
    error = ""
    try:
        build_trainer(devices=RANKS, strategy=strategy).fit(ToyU(), ListLoader([window(A)]))
    except ExtensionError as caught:
        error = str(caught)
    finally:
        clipping_module.load_extension = original
    return {"error": error, "uses": strategy.clipper._extended}


def deferred(scenario: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Have the CPU judge updates by itself, as an accelerator does."""
    with late_reading():
        return scenario()


def checkpointed() -> dict[str, Any]:
    """Save under FSDP2, go on from there, and from a file that numbers parameters as other strategies do."""
    path = FOLDER / "sharded.ckpt"

    def fit(updates: int, **options: Any) -> tuple[pl.Trainer, LanguageModule]:
        torch.manual_seed(6)
        shape = TransformerConfig(vocab_size=19, block_size=8, d_model=16, n_heads=2, n_layers=1)
        module = LanguageModule(shape, schedule="constant", lr=1e-2)
        trainer = build_trainer(
            devices=RANKS, strategy=clip_strategy("fsdp2", "torch"), max_steps=updates, max_epochs=-1
        )
        rows = (torch.arange(4)[:, None] + torch.arange(9)) % 19
        batch = {"input_ids": rows[:, :-1], "labels": rows[:, 1:], "num_tokens": 32}
        trainer.fit(module, ListLoader([Window([batch])] * 4), **options)
        return trainer, module

    straight = fit(4)[1]
    trainer, _ = fit(2)
    trainer.save_checkpoint(path)
    resumed, module = fit(4, ckpt_path=path)
    alone = LanguageModule.load_from_checkpoint(path) if path.is_file() else None
    kept = torch.load(path, weights_only=True)
    numbers = iter(range(100))
    for group in kept["optimizer_states"][0]["param_groups"]:
        group["params"] = [next(numbers) for _ in group["params"]]
    if resumed.global_rank == 0:
        torch.save(kept, FOLDER / "other.ckpt")
    resumed.strategy.barrier()
    error = ""
    try:
        fit(4, ckpt_path=FOLDER / "other.ckpt")
    except UserError as caught:
        error = str(caught)
    return {
        "step": resumed.global_step,
        "straight": [whole(each) for each in straight.parameters()],
        "resumed": [whole(each) for each in module.parameters()],
        "saved": [] if alone is None else [each.detach() for each in alone.parameters()],
        "error": error,
    }


def scaled() -> Any:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def fused_sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, fused=True)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=3e-3, fused=True)


bad = Window([(torch.tensor(A), NAN)])
SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "one each": lambda: toy([[window(A)] * 3, [window(B)] * 3], max_norm=None),
    "uneven": lambda: toy([[window(A, B)], [window([0, 1], [-100])]], max_norm=None),
    "ignored": lambda: toy([[window(A)], [window([-100])]], max_norm=None),
    "empty": lambda: toy([[window([-100]), window(A)], [window([-100]), window(B)]]),
    "nan skip": lambda: toy([[window(A), window(A)], [bad, window(B)]], on_nonfinite="skip"),
    "nan raise": lambda: toy([[window(A), window(A)], [window(B), bad]]),
    "many": lambda: toy([[window(A, A, A, A)] * 2, [window(B, B, B, B)] * 2], max_norm=None),
    "language": language,
    "bandit": bandit,
    "resumed": resumed,
    "sharded loader": sharded_loader,
    "ddp sgd": lambda: clipping("ddp", sgd),
    "ddp adamw": lambda: clipping("ddp", adamw),
    "ddp adamw torch": lambda: clipping("ddp", adamw, clipper="torch"),
    "static adamw": lambda: clipping("static", adamw),
    "automatic": lambda: automatic(static_graph=False),
    "automatic static": lambda: automatic(static_graph=True),
    "fsdp2 sgd": lambda: clipping("fsdp2", sgd),
    "fsdp2 adamw": lambda: clipping("fsdp2", adamw),
    "fsdp2 adamw torch": lambda: clipping("fsdp2", adamw, clipper="torch"),
    "fsdp2 nan skip": lambda: sharded_toy([[window(A)] * 2, [bad, window(B)]], on_nonfinite="skip"),
    "fsdp2 nan raise": lambda: sharded_toy([[window(A)] * 2, [window(B), bad]]),
    "deferred ddp adamw": lambda: deferred(lambda: clipping("ddp", adamw)),
    "deferred fsdp2 adamw": lambda: deferred(lambda: clipping("fsdp2", adamw)),
    "deferred fsdp2 nan skip": lambda: deferred(SCENARIOS["fsdp2 nan skip"]),
    "deferred fsdp2 nan raise": lambda: deferred(SCENARIOS["fsdp2 nan raise"]),
    "broken": broken,
    "checkpoint": checkpointed,
    "auto lacking": lambda: lacking("auto"),
    "extension lacking": lambda: lacking("extension"),
    "fsdp2 fused sgd": lambda: refused(clip_strategy("fsdp2", "torch"), build=fused_sgd),
    "tensor parallel": lambda: refused(ModelParallelStrategy(process_group_backend="gloo")),
    "fsdp2 scaler": lambda: refused(clip_strategy("fsdp2", "torch"), plugins=[scaled()]),
}
WAITED_FOR = ("streams", "streams, second epoch", "an empty stream", "an empty second epoch")
SCENARIOS |= {f"unequal {name}": scenario for name, scenario in UNEQUAL.items()}
SCENARIOS |= {f"deferred unequal {name}": lambda name=name: deferred(UNEQUAL[name]) for name in WAITED_FOR}
ON_TWO_ALONE = {
    *(f"unequal {name}" for name in UNEQUAL),
    *(f"deferred unequal {name}" for name in WAITED_FOR),
    *(f"{prefix}fsdp2 nan {policy}" for prefix in ("", "deferred ") for policy in ("skip", "raise")),
    *(
        "broken",
        "checkpoint",
        "auto lacking",
        "extension lacking",
        "fsdp2 fused sgd",
        "tensor parallel",
        "fsdp2 scaler",
    ),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = [name for name in SCENARIOS if RANKS > 1 or name not in ON_TWO_ALONE]
    results = {name: SCENARIOS[name]() for name in wanted}
    rank = torch.distributed.get_rank() if RANKS > 1 else 0
    torch.save(results, FOLDER / f"rank{rank}.pt")
