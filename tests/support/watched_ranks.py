"""Run by test_ranks.py, on one process or two: trains with all callbacks, and writes what came out.

usage: watched_ranks.py RANKS FOLDER
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from andrea_callbacks import FiniteGuard, NonFiniteError, PreClipNorm, SpikeForensics
from andrea_pl import (
    ClipModelParallelStrategy,
    DynamicPaddingCollator,
    LanguageModule,
    TransformerConfig,
    Window,
)
from tests.support.projects import everything
from tests.support.toy import ListLoader, build_trainer

RANKS, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
SHAPE = TransformerConfig(vocab_size=40, block_size=16, d_model=16, n_heads=2, n_layers=2)
SPIKE, UPDATES, PLANTED, POISON = 45, 48, 5, 39
LR = 1e-2

warnings.simplefilter("ignore")


class Poisonable(LanguageModule):
    """Fails on sequences with the token POISON."""

    def predict_labels(self, micro_batch: Any) -> Any:
        logits, labels, rows = super().predict_labels(micro_batch)
        bad = (micro_batch["input_ids"] == POISON).any(1)[rows]
        return torch.where(bad[:, None], float("nan"), logits), labels, rows


def windows(rank: int, poisoned: bool) -> list[Window]:
    """Return this rank's share of eight sequences an update; number 5 of one update is corrupted."""
    generator, collate, made = torch.Generator().manual_seed(1), DynamicPaddingCollator(0), []
    texts = [torch.randint(1, 39, (9 + number,), generator=generator) for number in range(7)]
    texts.append(torch.randint(1, 39, (9,), generator=generator))
    wrong = torch.randint(1, 39, (15,), generator=generator)
    for update in range(1, UPDATES + 1):
        items = []
        for number, text in enumerate(texts):
            if update == SPIKE and number == PLANTED:
                text = torch.cat([wrong[:3], torch.tensor([POISON]), wrong[3:]]) if poisoned else wrong
            place = {"source_id": number % 2, "document_id": 50 + number, "offset": 0}
            items.append({"input_ids": text[:-1], "labels": text[1:], **place})
        mine = items[rank::RANKS]
        half = len(mine) // 2
        made.append(Window([collate(mine[:half]), collate(mine[half:])]))
    return made


def strategy_of(kind: str) -> Any:
    if kind == "fsdp2":
        return ClipModelParallelStrategy(clipper="torch", process_group_backend="gloo")
    return "auto" if RANKS == 1 else DDPStrategy(process_group_backend="gloo")


def language(kind: str, poisoned: bool = False, watched: bool = True) -> dict[str, Any]:
    """Train our module; the reports of rank zero, and every rank's weights."""
    folder = FOLDER / f"{kind}-{poisoned}-{watched}"
    torch.manual_seed(0)
    module = Poisonable(SHAPE, lr=LR, schedule="constant", betas=(0.9, 0.95), on_nonfinite="skip")
    spikes, guard = SpikeForensics(folder=str(folder)), FiniteGuard(folder=str(folder))
    others = [each for each in everything() if not isinstance(each, (SpikeForensics, FiniteGuard))]
    trainer = build_trainer(
        callbacks=[spikes, guard, *others] if watched else [],
        devices=RANKS,
        strategy=strategy_of(kind),
        default_root_dir=FOLDER / "root",
    )
    trainer.fit(module, ListLoader(windows(trainer.global_rank, poisoned)))
    trainer.strategy.barrier()
    reports = {
        path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/report.json"))
    }
    return {
        "weights": [whole(each) for each in module.parameters()],
        "reports": reports,
        "spikes": spikes.spikes,
        "flagged": guard.flagged,
        "outcomes": (module.updates_applied, module.updates_skipped),
    }


def whole(parameter: Tensor) -> Tensor:
    given = parameter.detach()
    return given.full_tensor() if hasattr(given, "full_tensor") else given.clone()  # type: ignore[operator]


class Rows(pl.LightningModule):
    """Somebody else's model, automatic optimization; a row with a 9 has a bad loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(8, 2)

    def row_losses(self, batch: Tensor) -> Tensor:
        losses = self.layer(batch).square().sum(1)
        return torch.where((batch == 9).any(1), float("nan"), losses)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.row_losses(batch).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def automatic(policy: Any) -> dict[str, Any]:
    """A NaN on the last rank alone, under Lightning's own optimization."""
    folder = FOLDER / f"automatic-{policy}"
    guard = FiniteGuard(
        policy=policy, folder=str(folder), replay=lambda module, batch: module.row_losses(batch)
    )
    trainer = build_trainer(
        callbacks=[guard, PreClipNorm()],
        devices=RANKS,
        strategy=strategy_of("ddp"),
        default_root_dir=FOLDER / "root",
    )
    rank = trainer.global_rank
    batches = list(torch.randn(8, 2, 8, generator=torch.Generator().manual_seed(rank)))
    if rank == RANKS - 1:
        batches[3][1, 2] = 9.0
    module, error = Rows(), ""
    try:
        trainer.fit(module, ListLoader(batches))
    except NonFiniteError as caught:
        error = str(caught)
    path = folder / "update-000004-nonfinite" / "report.json"
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return {
        "weights": [each.detach().clone() for each in module.parameters()],
        "flagged": guard.flagged,
        "error": error,
        "last_epoch": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        "report": json.loads(path.read_text()),
    }


def lopsided() -> dict[str, Any]:
    """Only rank zero's batches say their source, and the last rank's replay fails."""
    folder = FOLDER / "lopsided"

    def replay(module: Any, batch: dict[str, Tensor]) -> Tensor:
        if trainer.global_rank == RANKS - 1:
            raise ValueError("this rank cannot")
        return module.row_losses(batch["x"])

    class Keyed(Rows):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.row_losses(batch["x"]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-5)

    spikes = SpikeForensics(replay=replay, folder=str(folder))
    trainer = build_trainer(
        callbacks=[spikes], devices=RANKS, strategy=strategy_of("ddp"), default_root_dir=FOLDER / "root"
    )
    rank = trainer.global_rank
    batches = []
    for number in range(40):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * rank + number))
        batch = {"x": x * (40.0 if number == 34 and rank == 0 else 1.0)}
        batches.append(batch | ({"source_id": torch.zeros(2, dtype=torch.int64)} if rank == 0 else {}))
    trainer.fit(Keyed(), ListLoader(batches))
    trainer.strategy.barrier()
    report = json.loads((folder / "update-000035-spike" / "report.json").read_text())
    return {"spikes": spikes.spikes, "report": report}


SCENARIOS = {
    "lopsided": lopsided,
    "spike": lambda: language("ddp"),
    "unwatched": lambda: language("ddp", watched=False),
    "poisoned": lambda: language("ddp", poisoned=True),
    "skip": lambda: automatic("skip"),
    "raise": lambda: automatic("raise"),
    "fsdp2": lambda: language("fsdp2"),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    names = [name for name in SCENARIOS if RANKS > 1 or name != "fsdp2"]
    results = {name: SCENARIOS[name]() for name in names}
    rank = torch.distributed.get_rank() if RANKS > 1 else 0
    torch.save(results, FOLDER / f"rank{rank}.pt")
