"""Runs whose every part is compared: their data, their models, and where two states differ first."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
)

from andrea_pl import (
    Curriculum,
    DurableCheckpoint,
    DynamicPaddingCollator,
    LanguageModule,
    TextDataModule,
    TextSource,
    TokenizedDataset,
    TransformerConfig,
    Ucb1,
    Window,
)
from tests.support.toy import ListLoader, build_trainer, window

NAMES = ("prose", "lists", "answers")


def sources(count: int = 40, **options: Any) -> list[TextSource]:
    """Return three sources: random tokens, one token over and over, and short rows."""
    draw = torch.Generator().manual_seed(9)
    documents = {
        "prose": [torch.randint(1, 32, (9,), generator=draw).tolist() for _ in range(count)],
        "lists": [[3 + number % 3] * 8 for number in range(count)],
        "answers": [torch.randint(1, 32, (4,), generator=draw).tolist() for _ in range(count)],
    }
    return [TextSource(name=name, kind="tokens", documents=documents[name], **options) for name in NAMES]


EPOCH = 6


def data(workers: int = 0) -> TextDataModule:
    """Return three sources under a bandit, windows of four micro-batches, documents held out."""
    return TextDataModule(
        sources(),
        vocab_size=32,
        block_size=16,
        sequences_per_update=8,
        micro_batch_tokens=64,
        micro_batch_sequences=2,
        val_fraction=0.2,
        num_workers=workers,
        curriculum=Curriculum(mixture=Ucb1(), phases=[3, 5], updates_per_epoch=EPOCH),
    )


def module(schedule: Any = "cosine") -> LanguageModule:
    shape = TransformerConfig(vocab_size=32, block_size=16, d_model=16, n_heads=2, n_layers=1, dropout=0.1)
    return LanguageModule(shape, lr=1e-2, warmup_updates=4, schedule=schedule)


class Draws(pl.Callback):
    """Draws from every generator in every update, so that each state matters."""

    def __init__(self) -> None:
        self.draws: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.draws.append(random.random() + np.random.rand() + float(torch.rand(())))

    def state_dict(self) -> dict[str, Any]:
        return {"draws": list(self.draws)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.draws = list(state_dict["draws"])


def difference(ours: Any, theirs: Any, place: str = "") -> str | None:
    """Return where two nested values differ first, bit for bit, None if they do not."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        same = ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        return None if same else place
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return f"{place}: {ours.keys() ^ theirs.keys()}"
        parts: Iterator[Any] = ((key, ours[key], theirs[key]) for key in ours)
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)) and len(ours) == len(theirs):
        parts = ((number, *pair) for number, pair in enumerate(zip(ours, theirs, strict=True)))
    else:
        same = ours == theirs or (ours != ours and theirs != theirs)
        return None if same else f"{place}: {ours!r} != {theirs!r}"
    found = (difference(here, there, f"{place}/{key}") for key, here, there in parts)
    return next((each for each in found if each is not None), None)


def text_windows(count: int) -> list[Window]:
    collate = DynamicPaddingCollator(0)
    made = []
    for number in range(count):
        tokens = torch.randint(1, 30, (4, 9), generator=torch.Generator().manual_seed(number))
        places = {"source_id": number // 5 % 2, "document_id": number, "offset": 0}
        items = [{"input_ids": row[:-1], "labels": row[1:], **places} for row in tokens]
        made.append(Window([collate(items[:2]), collate(items[2:])]))
    return made


UPDATES = 10


class Windows(ListLoader):
    """Ten windows of different tokens, which can be gone on with."""

    def __init__(self) -> None:
        super().__init__([window([number % 2, 1], [number % 3 % 2]) for number in range(UPDATES)])
        self.delivered = 0

    def __iter__(self) -> Any:
        start = 0 if self.delivered == UPDATES else self.delivered
        for number in range(start, UPDATES):
            self.delivered = number + 1
            yield self.batches[number]

    def state_dict(self) -> dict[str, Any]:
        return {"delivered": self.delivered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.delivered = state["delivered"]


SHAPE = TransformerConfig(vocab_size=300, block_size=64, d_model=16, n_heads=2, n_layers=1)


def data_module(path: Path, cache: Path) -> TextDataModule:
    return TextDataModule(
        [TextSource(name="readmes", paths=[str(path)])],
        vocab_size=300,
        block_size=64,
        sequences_per_update=4,
        val_fraction=0.1,
        cache_dir=str(cache),
    )


def train(path: Path, cache: Path, steps: int, ckpt_path: str | None = None) -> tuple[Any, LanguageModule]:
    """Train from Python up to an update, and return the trainer and the module."""
    torch.manual_seed(7)
    module = LanguageModule(SHAPE, schedule="constant")
    saving = DurableCheckpoint(every=2, dirpath=str(cache.parent / "checkpoints"))
    trainer = build_trainer(callbacks=[saving], max_steps=steps, max_epochs=-1, enable_checkpointing=True)
    data = data_module(path, cache)
    if ckpt_path is not None and not path.exists():
        data.keep_text_of(torch.load(ckpt_path, weights_only=True), ckpt_path)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer, module


def token_data(count: int = 12, **options: Any) -> TextDataModule:
    """Return documents of token ids of several lengths, three an update."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 40, (3 + n % 7,), generator=generator).tolist() for n in range(count)]
    defaults: dict[str, Any] = {
        "vocab_size": 40,
        "block_size": 8,
        "sequences_per_update": 3,
        "val_fraction": 0.0,
    }
    return TextDataModule([TextSource(name="t", kind="tokens", documents=rows)], **(defaults | options))


def micro_batch(**changes: Any) -> dict[str, Any]:
    dataset = TokenizedDataset([[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]], 8)
    return {**DynamicPaddingCollator(0)([dataset[n] for n in range(3)]), **changes}


def tokens() -> dict[str, torch.Tensor]:
    rows = torch.tensor([[1, 2, 3, 4, 5], [3, 4, 5, 6, 7]])
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def language(**options: Any) -> LanguageModule:
    torch.manual_seed(3)
    return LanguageModule(SHAPE, **options)


class Rates(pl.Callback):
    """Keeps the rate of every update."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def take_report(self, trainer: Any, report: Any) -> None:
        self.seen.append(report["lr"])


class Saves(pl.Callback):
    """Saves after every update, or after one of them, or in another hook."""

    def __init__(self, folder: Path, hook: str = "on_train_batch_end", at: int | None = None) -> None:
        self.folder = folder
        self.at = at
        setattr(self, hook, self.save)

    def save(self, trainer: Any, *_: Any, **__: Any) -> None:
        if self.at in (None, trainer.global_step):
            trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")


def rates(
    module: Any, windows: Any, path: Path | None = None, validation: Any = None, **options: Any
) -> list[float]:
    """Train, from a checkpoint where one is given, and return the rate of every update."""
    found = Rates()
    callbacks = [found, *options.pop("callbacks", [])]
    saves = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    trainer = build_trainer(callbacks=callbacks, enable_checkpointing=saves, **options)
    loader = ListLoader(windows) if isinstance(windows, list) else windows
    trainer.fit(module, loader, validation, ckpt_path=path)
    return found.seen
