"""Valid tokens per second of `andrea fit` against loops written by hand, update by update in one run.

    python benchmarks/training.py [--pairs 20] [--warmup 3] [--threads 2]

Three sides train models of the ANDREA-12M shape on the same sequences, one update after the other:
32 sequences of up to 256 tokens of the `python` sources.

    fit      Trainer.fit with TextDataModule, all default callbacks, the bar, TensorBoard; everything between
             two requests for a window counts
    seed     the loop that a tutorial writes: batches of 8 in random order, each padded to its longest, logits
             everywhere, .item() a batch, gradients divided in a loop, clip_grad_norm_, default AdamW
    same     a plain loop over the very micro-batches of `fit`, with its loss path and fused AdamW

Printed are medians, and the median of the ratios of pairs with its 95 % bootstrap interval.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F

from andrea_callbacks import UpdateProgressBar
from andrea_pl import LanguageModule, RoPELanguageModel, TextDataModule, TextSource, TransformerConfig, Window
from andrea_pl.data.windows.loaders import TextWindowLoader
from pairs import describe

SHAPE = TransformerConfig(vocab_size=2305, block_size=256, d_model=384, n_heads=12, n_layers=6)
SEQUENCES, BATCH = 32, 8


class SeedLoop:
    """One update as the first seed's section 8.1 writes it."""

    def __init__(self, model: RoPELanguageModel) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        self.padding: list[float] = []

    def update(self, loader: TextWindowLoader, numbers: np.ndarray) -> None:
        """Train on the sequences that `numbers` names."""
        self.model.train()
        tokens = places = 0
        order = np.random.default_rng(int(numbers[0])).permutation(numbers)
        for start in range(0, len(order), BATCH):
            items = [loader.reader.dataset[int(number)] for number in order[start : start + BATCH]]
            batch = loader.reader.collator(items)
            labels = batch["labels"]
            count = int((labels != -100).sum().item())
            logits = self.model(batch["input_ids"], batch["valid_mask"])
            loss = F.cross_entropy(
                logits.reshape(-1, logits.size(-1)), labels.reshape(-1), ignore_index=-100, reduction="sum"
            )
            if not torch.isfinite(loss).item():
                raise RuntimeError("the loss is not finite")
            loss.backward()
            loss.detach().item()
            tokens += count
            places += labels.numel()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(tokens)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        norm.item()
        self.padding.append(1 - tokens / places)


class SameLoop:
    """One update over given micro-batches, with the loss path and the optimizer of `fit`."""

    def __init__(self, module: LanguageModule) -> None:
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, fused=True)

    def update(self, window: Window) -> None:
        """Train on one window."""
        self.module.train()
        tokens = sum(batch["num_tokens"] for batch in window)
        for batch in window:
            (self.module.loss_sum(batch) / tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Interleaved:
    """The loader of `fit`, which runs the other sides between two windows and takes the time of each."""

    def __init__(
        self, inner: TextWindowLoader, others: dict[str, Callable[[Window, np.ndarray], None]]
    ) -> None:
        self.inner = inner
        self.others = others
        self.seconds: dict[str, list[float]] = {name: [] for name in ("fit", *others)}
        self.tokens: list[int] = []
        self.padding: list[float] = []

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Window]:
        windows = iter(self.inner)
        for numbers in self.inner.window_sampler.plan(0, 0, len(self.inner)):
            start = time.perf_counter()
            window = next(windows)
            yield window
            self.seconds["fit"].append(time.perf_counter() - start)
            self.run_others(window, numbers)

    def run_others(self, window: Window, numbers: np.ndarray) -> None:
        """Let the other sides make the same update, in turns."""
        self.tokens.append(sum(batch["num_tokens"] for batch in window))
        self.padding.append(1 - self.tokens[-1] / sum(batch["labels"].numel() for batch in window))
        names = list(self.others)
        for name in names if len(self.tokens) % 2 else reversed(names):
            start = time.perf_counter()
            self.others[name](window, numbers)
            self.seconds[name].append(time.perf_counter() - start)


class BenchmarkData(TextDataModule):
    """The text data module, its loader interleaved with the other sides."""

    others: dict[str, Callable[[Window, np.ndarray], None]]
    interleaved: Interleaved

    def train_dataloader(self) -> Any:
        """Return the interleaved loader."""
        self.interleaved = Interleaved(super().train_dataloader(), self.others)
        return self.interleaved


def ratio_line(name: str, ours: list[float], theirs: list[float]) -> str:
    """Return the median ratio of pairs and its bootstrap interval."""
    ratios = [there / here for here, there in zip(ours, theirs, strict=True)]
    return f"fit / {name}, tokens per second: {describe(ratios)}"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    sources = [
        TextSource(name=part, kind="python", part=part) for part in ("docstrings", "topics", "readmes")
    ]
    data = BenchmarkData(
        sources, vocab_size=2305, block_size=256, sequences_per_update=SEQUENCES, val_fraction=0.0
    )
    torch.manual_seed(0)
    module, same, seed = LanguageModule(SHAPE), LanguageModule(SHAPE), RoPELanguageModel(SHAPE)
    same.load_state_dict(module.state_dict())
    seed.load_state_dict(module.network.state_dict())
    seed_loop, same_loop = SeedLoop(seed), SameLoop(same)
    data.others = {
        "seed": lambda _, numbers: seed_loop.update(data.interleaved.inner, numbers),
        "same": lambda window, _: same_loop.update(window),
    }
    with tempfile.TemporaryDirectory() as folder:
        logger = pl.loggers.TensorBoardLogger(Path(folder))
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=options.warmup + options.pairs + 1,
            logger=logger,
            callbacks=[UpdateProgressBar()],
            enable_checkpointing=False,
            log_every_n_steps=1,
        )
        trainer.fit(module, datamodule=data)
    runs = data.interleaved
    kept = slice(options.warmup, options.warmup + options.pairs)
    print(
        f"\n{module.network.count_parameters():,} parameters, {options.threads} threads, torch "
        f"{torch.__version__}"
    )
    for name, seconds in runs.seconds.items():
        rates = [count / spent for count, spent in zip(runs.tokens[kept], seconds[kept], strict=True)]
        print(f"{name:5s} median {statistics.median(rates):8.0f} valid tokens/s")
    print(
        f"padding: seed {statistics.median(seed_loop.padding[kept]):.1%}, fit "
        f"{statistics.median(runs.padding[kept]):.1%} (attention)"
    )
    for name in data.others:
        print(ratio_line(name, runs.seconds["fit"][kept], runs.seconds[name][kept]))


if __name__ == "__main__":
    main()
