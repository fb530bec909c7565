"""What mixing sources costs: planning windows, against an update; preparing text, against `tokenizers` alone.

    bash benchmarks/corpora.sh
    python benchmarks/mixing.py [--updates 15] [--pairs 5] [--threads 2] [--corpora FOLDER]

sampling     planning a window, delivering it, and telling the bandit what became of it, with three corpora as
             sources and with sixteen; against the update of the ANDREA-12M shape that it is part of (32
             sequences of up to 256 tokens, Trainer.fit)
preparation  `prepare` of the corpora, from JSONL to stores, in an empty cache; against `tokenizers` learning
             merges from the same training texts and encoding all texts, which are in memory already

Printed are medians, and the median of the ratios of pairs with its 95 % bootstrap interval.
"""

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from andrea_pl import Curriculum, LanguageModule, TextDataModule, TextSource, TransformerConfig, Ucb1
from andrea_pl.data.mixing.curriculum import CurriculumSampler
from andrea_pl.data.mixing.plan import Numbers, Pool
from andrea_pl.data.sources.documents import Problems
from andrea_pl.data.store.encoding import digest
from andrea_pl.data.store.tokenizer import END_OF_DOCUMENT
from pairs import describe

NAMES = ("novels", "documentation", "questions")
VOCABULARY = 2305
SHAPE = TransformerConfig(vocab_size=VOCABULARY, block_size=256, d_model=384, n_heads=12, n_layers=6)


def build_data(corpora: Path, cache: Path) -> TextDataModule:
    """Return the corpora under ANDREA's bandit."""
    return TextDataModule(
        [TextSource(name=name, paths=[str(corpora / f"{name}.jsonl")], min_weight=0.1) for name in NAMES],
        vocab_size=VOCABULARY,
        block_size=256,
        sequences_per_update=32,
        curriculum=Curriculum(mixture=Ucb1(reward_scale=1000.0), updates_per_epoch=1000),
        cache_dir=str(cache),
    )


class Stopwatch:
    """Adds up the time of all sampler calls within an update."""

    def __init__(self, sampler: CurriculumSampler) -> None:
        self.seconds: list[float] = []
        self._sum = 0.0
        self._plan, self._deliver, self._observe = sampler.plan, sampler.deliver, sampler.observe
        sampler.plan = self.plan  # type: ignore[method-assign]
        sampler.deliver = self.deliver  # type: ignore[method-assign]
        sampler.observe = self.observe  # type: ignore[method-assign]

    def plan(self, *arguments: Any) -> Iterator[Numbers]:
        """Plan, and take the time between a window's request and its return."""
        windows = self._plan(*arguments)
        while True:
            began = time.perf_counter()
            window = next(windows, None)
            self._sum += time.perf_counter() - began
            if window is None:
                return
            yield window

    def deliver(self) -> None:
        """Deliver."""
        began = time.perf_counter()
        self._deliver()
        self._sum += time.perf_counter() - began

    def observe(self, *arguments: Any, **options: Any) -> None:
        """Observe, which is an update's last."""
        began = time.perf_counter()
        self._observe(*arguments, **options)
        self.seconds.append(self._sum + time.perf_counter() - began)
        self._sum = 0.0


class Updates(pl.Callback):
    """Takes the time from one update's end to the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())


class TimedData(TextDataModule):
    """The data module with a stopwatch in its sampler."""

    watch: Stopwatch

    def train_dataloader(self) -> Any:
        """Return the loader."""
        loader = super().train_dataloader()
        self.watch = Stopwatch(loader.window_sampler)  # type: ignore[arg-type]
        return loader


def time_sampling(corpora: Path, cache: Path, updates: int) -> None:
    """Print what planning takes of an update."""
    data = build_data(corpora, cache)
    data.__class__ = TimedData
    torch.manual_seed(0)
    ends = Updates()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=updates + 3,
        logger=False,
        callbacks=[ends],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(LanguageModule(SHAPE), datamodule=data)
    whole = [after - before for before, after in zip(ends.ends[2:], ends.ends[3:], strict=False)]
    own = data.watch.seconds[3 : 3 + len(whole)]  # type: ignore[attr-defined]
    shares = [mine / all_ for mine, all_ in zip(own, whole, strict=True)]
    print(f"update {median(whole):.3f} s, of it sampling {median(own) * 1e6:.0f} us")
    print(f"sampling / update, in percent: {describe([100 * share for share in shares])}")
    many = [
        Pool(name=f"source{number}", first=number * 10_000, count=10_000, tokens=1_000_000, min_weight=0.01)
        for number in range(16)
    ]
    sampler = CurriculumSampler(many, Curriculum(mixture=Ucb1(reward_scale=1000.0)), 32)
    watch = Stopwatch(sampler)
    for update, _ in enumerate(sampler.plan(0, 0, 2000), start=1):
        sampler.deliver()
        sampler.observe(update, dict.fromkeys(range(16), 5.0 - update / 1e4))
    typical, average = median(watch.seconds) * 1e6, sum(watch.seconds) / len(watch.seconds) * 1e6
    print(f"with sixteen sources: {typical:.0f} us, on average {average:.0f} us")


def tokenizers_alone(train: list[str], texts: list[str]) -> float:
    """Return the seconds that `tokenizers` takes to learn merges and encode."""
    began = time.perf_counter()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(train, trainer)
    tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return time.perf_counter() - began


def time_preparation(corpora: Path, pairs: int) -> None:
    """Print what preparing takes against `tokenizers` alone."""
    data = build_data(corpora, Path("unused"))
    preparation = data.preparation
    documents = [
        (source, document) for source in preparation.sources for document in source.read(Problems("raise"))
    ]
    texts = [document.text for _, document in documents]
    train = [
        document.text
        for source, document in documents
        if preparation.split_of(source, digest(document.content)) == "train"
    ]
    ratios, ours, theirs = [], [], []
    for number in range(pairs):
        for side in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
            if side == "theirs":
                theirs.append(tokenizers_alone(train, texts))
                continue
            with tempfile.TemporaryDirectory() as cache:
                began = time.perf_counter()
                build_data(corpora, Path(cache)).prepare_data()
                ours.append(time.perf_counter() - began)
        ratios.append(ours[-1] / theirs[-1])
    size = sum(len(text.encode()) for text in texts)
    print(
        f"{size / 1e6:.1f} MB of text: prepare {median(ours):.1f} s, tokenizers alone {median(theirs):.1f} s"
    )
    print(f"prepare / tokenizers alone: {describe(ratios)}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=15)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--corpora", type=Path, default=Path("~/.cache/andrea_pl/corpora").expanduser())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    time_preparation(options.corpora, options.pairs)
    with tempfile.TemporaryDirectory() as cache:
        time_sampling(options.corpora, Path(cache), options.updates)


if __name__ == "__main__":
    main()
