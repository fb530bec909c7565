"""What all callbacks together cost, when nothing happens.

    python benchmarks/watching.py [--pairs 26] [--warmup 3] [--threads 2]

Two runs of `Trainer.fit` train the ANDREA-12M shape on the same windows, 32 sequences of up to 256 tokens of
the `python` sources, in turns, update by update: one with every callback and TensorBoard, one with none.

    own     seconds in the callbacks' hooks, over those of the update, in the sum over all pairs
    pairs   the ratio of the two runs' updates, median and 95 % bootstrap interval
    sample  seconds of one sample of CoherenceGate, which it takes every 100 updates and not in these pairs

The hooks' seconds hold the writing of scalars and journal. With the default 26 pairs every record that
callbacks make each 25 updates is in them.
"""

import argparse
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from andrea_callbacks import (
    CoherenceGate,
    EpochSummary,
    FiniteGuard,
    MomentMonitor,
    PreClipNorm,
    RunJournal,
    SpikeForensics,
    TensorBoardLayout,
    Throughput,
    UpdateLog,
)
from andrea_pl import LanguageModule, TextDataModule, TextSource, TransformerConfig, Window
from pairs import describe

SHAPE = TransformerConfig(vocab_size=2305, block_size=256, d_model=384, n_heads=12, n_layers=6)
SEQUENCES = 32


class HookClock:
    """Takes the time spent in callbacks, the outermost hook alone."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.by_class: dict[str, float] = {}
        self._depth = 0

    def watch(self, callback: Callback) -> None:
        """Wrap every hook of a callback."""
        for name in dir(callback):
            if name.startswith("on_") or name in ("take_report", "take_event"):
                setattr(callback, name, self._timed(type(callback).__name__, getattr(callback, name)))

    def _timed(self, kind: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            self._depth += 1
            try:
                return hook(*arguments, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    spent = time.perf_counter() - start
                    self.seconds += spent
                    self.by_class[kind] = self.by_class.get(kind, 0.0) + spent

        return timed


class Turns:
    """Lets two threads work in turns."""

    def __init__(self) -> None:
        self._mine = [threading.Semaphore(1), threading.Semaphore(0)]

    def take(self, side: int) -> None:
        """Wait for a side's turn."""
        self._mine[side].acquire()

    def give(self, side: int) -> None:
        """Let the other side go on."""
        self._mine[1 - side].release()


class TurnLoader:
    """Yields windows when it is its side's turn, and takes the time until the next is asked for."""

    def __init__(self, windows: list[Window], side: int, turns: Turns, clock: HookClock | None) -> None:
        self.windows = windows
        self.side = side
        self.turns = turns
        self.clock = clock
        self.seconds: list[float] = []
        self.own: list[float] = []

    def __len__(self) -> int:
        return len(self.windows)

    def __iter__(self) -> Iterator[Window]:
        for window in self.windows:
            self.turns.take(self.side)
            before = 0.0 if self.clock is None else self.clock.seconds
            start = time.perf_counter()
            yield window
            self.seconds.append(time.perf_counter() - start)
            self.own.append(0.0 if self.clock is None else self.clock.seconds - before)
            self.turns.give(self.side)


class Bare(LanguageModule):
    """A module that adds no callbacks of its own."""

    def configure_callbacks(self) -> list[Callback]:
        """Return none."""
        return []


def windows_of(count: int) -> tuple[list[Window], TextDataModule]:
    """Return windows of the `python` sources, and the data module that they came from."""
    sources = [
        TextSource(name=part, kind="python", part=part) for part in ("docstrings", "topics", "readmes")
    ]
    data = TextDataModule(
        sources, vocab_size=2305, block_size=256, sequences_per_update=SEQUENCES, val_fraction=0.0
    )
    data.prepare_data()
    data.setup()
    loader = data.train_dataloader()
    windows = iter(loader)
    return [next(windows) for _ in range(count)], data


def every_callback(data: TextDataModule) -> list[Callback]:
    """Return all callbacks with their defaults."""
    gate = CoherenceGate(known=data.known_words())
    watching = [PreClipNorm(), FiniteGuard(), SpikeForensics(), MomentMonitor(), gate, Throughput()]
    return [*watching, RunJournal(), UpdateLog(), EpochSummary(), TensorBoardLayout()]


def train(loader: TurnLoader, callbacks: list[Callback], folder: Path) -> LanguageModule:
    """Train one side."""
    torch.manual_seed(0)
    module = Bare(SHAPE)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=TensorBoardLogger(folder) if callbacks else False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return module


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=26)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    windows, data = windows_of(options.warmup + options.pairs + 1)  # the last is not timed
    clock, turns = HookClock(), Turns()
    callbacks = every_callback(data)
    for each in callbacks:
        clock.watch(each)
    sides = [TurnLoader(windows, 0, turns, clock), TurnLoader(windows, 1, turns, None)]
    modules: list[LanguageModule] = []
    with tempfile.TemporaryDirectory() as folder:
        other = threading.Thread(target=train, args=(sides[1], [], Path(folder)))
        other.start()
        modules.append(train(sides[0], callbacks, Path(folder)))
        turns.give(0)
        other.join()
    kept = slice(options.warmup, None)
    watched, own, bare = sides[0].seconds[kept], sides[0].own[kept], sides[1].seconds[kept]
    print(f"{modules[0].network.count_parameters():,} parameters, {options.threads} threads")
    print(
        f"update: with callbacks {statistics.median(watched):.3f} s, without {statistics.median(bare):.3f} s"
    )
    share = 100 * statistics.median(own) / statistics.median(watched)
    print(f"own     {100 * sum(own) / sum(watched):.2f} % of the update, median {share:.2f} %")
    for kind, spent in sorted(clock.by_class.items(), key=lambda pair: -pair[1]):
        print(f"          {kind}: {100 * spent / sum(sides[0].seconds):.3f} %")
    ratios = [with_them / without for with_them, without in zip(watched, bare, strict=True)]
    print(f"pairs   with / without: {describe(ratios)}")
    gate = callbacks[4]
    module = modules[0]
    module.tokenizer = data.tokenizer
    start = time.perf_counter()
    module.generate(gate.prompts, gate.max_new_tokens, torch.Generator().manual_seed(0))  # type: ignore[attr-defined]
    spent = time.perf_counter() - start
    print(f"sample  {spent:.2f} s, {100 * spent / 100 / statistics.median(watched):.2f} % of 100 updates")


if __name__ == "__main__":
    main()
