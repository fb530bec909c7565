"""Does SpikeForensics find a corrupted sequence, and keep still without one?

    python benchmarks/spikes.py [--runs 200] [--workers 2] [--seed 0]

Small models learn three kinds of text that take turns, as ANDREA's sources did: phases of 7, 14, 21, 28 or 42
updates, in which one has 80 % of the sequences and the others have a floor of 10 %. In half of the runs one
sequence of one window is corrupted: random tokens, one token repeated, or labels that belong to another text.
Printed are three figures:

    named    of the corrupted windows that were flagged, those whose report names the corrupted sequence first
    flagged  of the corrupted windows whose norm is over 5 times the median of its mixture, those flagged
    false    of the updates of clean runs, those flagged
"""

import argparse
import json
import logging
import random
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch

from andrea_callbacks import SpikeForensics
from andrea_callbacks.forensics.detector import Mixture, mixture_of
from andrea_pl import DynamicPaddingCollator, LanguageModule, TransformerConfig, Window

VOCABULARY, LENGTH, SEQUENCES, UPDATES = 48, 32, 16, 140
KINDS = ("random", "repeated", "swapped")
PLANTED_ID = 999_999
SHAPE = TransformerConfig(vocab_size=VOCABULARY, block_size=LENGTH, d_model=32, n_heads=2, n_layers=2)
PHASES = (7, 14, 21, 28, 42)
WEIGHTS = (8, 1, 1)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run."""

    kind: str
    """Of the corruption; empty for a clean run."""
    updates: int
    flagged: int
    """Clean updates that were flagged."""
    ratio: float
    """Norm of the corrupted window over the median of its mixture; 0 where that was never seen."""
    is_flagged: bool
    is_named: bool


class Norms(pl.Callback):
    """Keeps norms and mixtures."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.mixtures: list[Mixture] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Keep those of an update."""
        _, pl_module, _, batch, *_ = arguments
        self.norms.append(float(pl_module.update_report["grad_norm"]))
        shares: dict[str, float] = {}
        for micro_batch in batch:
            tokens = micro_batch["valid_mask"].sum(1).tolist()
            for source, count in zip(micro_batch["source_id"].tolist(), tokens, strict=True):
                shares[f"source {source}"] = shares.get(f"source {source}", 0) + count
        self.mixtures.append(mixture_of(shares))


class Loader:
    """A sized loader of ready windows."""

    def __init__(self, windows: list[Window]) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __iter__(self) -> Any:
        return iter(self.windows)


def sequence(source: int, rng: random.Random) -> list[int]:
    """Return tokens of one kind of text: a walk with few turns, a list of like items, or counting."""
    length = rng.randint(LENGTH // 2, LENGTH) + 1
    if source == 0:
        tokens = [rng.randrange(1, 16)]
        while len(tokens) < length:
            tokens.append((tokens[-1] * 3 + rng.choice((1, 2))) % 15 + 1)
        return tokens
    if source == 1:
        first = rng.randrange(17, 31)
        return ([16, first, first + 1, 16, first] * length)[:length]
    first, stride = rng.randrange(32, 48), rng.choice((1, 2))
    return [32 + (first - 32 + stride * place) % 16 for place in range(length)]


def corrupted(tokens: list[int], kind: str, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return inputs and labels of a sequence that something went wrong with."""
    if kind == "random":
        tokens = [rng.randrange(1, VOCABULARY) for _ in tokens]
    if kind == "repeated":
        tokens = [rng.randrange(1, VOCABULARY)] * len(tokens)
    labels = tokens[1:]
    if kind == "swapped":
        labels = [1 + (token * 7 + 5) % (VOCABULARY - 1) for token in labels]
    return tokens[:-1], labels


def windows_of(rng: random.Random, planted: int | None, kind: str) -> list[Window]:
    """Return the windows of a run, in phases; one sequence of window `planted` (from 1) is corrupted."""
    collate, windows = DynamicPaddingCollator(0), list[Window]()
    while len(windows) < UPDATES:
        weights = rng.sample(WEIGHTS, 3)
        for _ in range(rng.choice(PHASES)):
            number = len(windows) + 1
            items = []
            for row in range(SEQUENCES):
                source = rng.choices(range(3), weights)[0]
                tokens = sequence(source, rng)
                inputs, labels = tokens[:-1], tokens[1:]
                document = 100 * number + row
                if number == planted and row == planted % SEQUENCES:
                    inputs, labels = corrupted(tokens, kind, rng)
                    document = PLANTED_ID
                items.append(
                    {
                        "input_ids": torch.tensor(inputs),
                        "labels": torch.tensor(labels),
                        "source_id": source,
                        "document_id": document,
                        "offset": 0,
                    }
                )
            half = SEQUENCES // 2
            windows.append(Window([collate(items[:half]), collate(items[half:])]))
    return windows[:UPDATES]


@cache
def pretrained() -> dict[str, torch.Tensor]:
    """Return the weights of a model that has learnt all three kinds, with which every run starts."""
    torch.manual_seed(0)
    module = LanguageModule(SHAPE, lr=5e-3, schedule="cosine", warmup_updates=20, betas=(0.9, 0.95))
    rng = random.Random(0)
    trainer = quiet_trainer([])
    trainer.fit(module, Loader([window for _ in range(4) for window in windows_of(rng, None, "")]))
    return module.state_dict()


def quiet_trainer(callbacks: list[pl.Callback]) -> pl.Trainer:
    """Return a trainer for one epoch that says and writes nothing."""
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )


def run_once(seed: int, kind: str, updates: int = UPDATES) -> Outcome:
    """Train one model, and compare what was planted with what was found."""
    weights = pretrained()
    torch.manual_seed(seed)
    rng = random.Random(seed)
    planted = rng.randrange(60, updates) if kind else None
    module = LanguageModule(SHAPE, lr=1e-3, schedule="constant", betas=(0.9, 0.95))
    module.load_state_dict(weights)
    norms = Norms()
    with tempfile.TemporaryDirectory() as folder:
        spikes = SpikeForensics(folder=folder, max_reports=updates)
        trainer = quiet_trainer([spikes, norms])
        trainer.fit(module, Loader(windows_of(rng, planted, kind)[:updates]))
        reports = [json.loads(path.read_text()) for path in Path(folder).glob("*/report.json")]
    found = [each for each in reports if each["update"] == planted]
    named = bool(found) and found[0]["attribution"]["sequences"][0]["identity"].get("document") == PLANTED_ID
    ratio = 0.0
    if planted is not None:
        at = planted - 1
        like = [
            norm
            for place, norm in enumerate(norms.norms[:at])
            if norms.mixtures[place] == norms.mixtures[at] and place >= at - 100
        ]
        ratio = norms.norms[at] / median(like) if len(like) >= 3 else 0.0
    return Outcome(
        kind=kind,
        updates=updates,
        flagged=len(reports) - len(found),
        ratio=ratio,
        is_flagged=bool(found),
        is_named=named,
    )


def quieten() -> None:
    """Prepare a worker process."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="corrupted runs, and as many clean ones")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.perf_counter()
    jobs = [(options.seed + number, KINDS[number % 3]) for number in range(options.runs)]
    jobs += [(options.seed + 100_000 + number, "") for number in range(options.runs)]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn"), initializer=quieten) as pool:
        outcomes = list(pool.map(run_once, *zip(*jobs, strict=True)))
    planted = [each for each in outcomes if each.kind]
    flagged = [each for each in planted if each.is_flagged]
    large = [each for each in planted if each.ratio > 5]
    clean = [each for each in outcomes if not each.kind]
    named = sum(each.is_named for each in flagged)
    seen = sum(each.is_flagged for each in large)
    false, updates = sum(each.flagged for each in clean), sum(each.updates for each in clean)
    ratios = sorted(each.ratio for each in planted)
    print(
        f"{len(planted)} corrupted runs and {len(clean)} clean ones of {UPDATES} updates, seed {options.seed}"
    )
    print(
        f"norm of the corrupted window over the median: median {median(ratios):.2f}, largest {ratios[-1]:.1f}"
    )
    print(f"named    {named} of {len(flagged)} flagged: {100 * named / max(len(flagged), 1):.1f} %")
    print(f"flagged  {seen} of {len(large)} over 5 times the median: {100 * seen / max(len(large), 1):.1f} %")
    print(f"false    {false} of {updates} clean updates: {100 * false / max(updates, 1):.2f} %")
    for kind in KINDS:
        of_kind = [each for each in planted if each.kind == kind]
        print(
            f"  {kind}: {sum(each.is_flagged for each in of_kind)} of {len(of_kind)} flagged, "
            f"median ratio {median([each.ratio for each in of_kind]):.2f}"
        )
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
