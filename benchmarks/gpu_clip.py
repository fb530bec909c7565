"""The clip stage on a CUDA device: right, how fast, and without waiting. Under four minutes on one GPU.

    python benchmarks/gpu_clip.py [--rehearse]

1. builds the extension for the device;
2. checks every kernel against float64 on fresh random data, whose seed is printed;
3. trains a few updates in which any wait of the host for the device is an error;
4. times, on gradients of 12M, 98M and 1B parameters and with a flushed cache:

    torch    torch.nn.utils.clip_grad_norm_, foreach
    ours     squared_norms, clip_figures, scale_: three kernels
    norm     squared_norms and clip_figures alone
    step     fused AdamW, nothing clipped
    folded   the norm, and its coefficient folded into fused AdamW

and prints medians, what they are of the byte floor at the bandwidth of a copy, and the host's time for a
call. `--rehearse` goes through all of it on a CPU and small tensors, to show that the script itself works.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from andrea_pl import (
    ClipSingleDeviceStrategy,
    LanguageModule,
    RoPELanguageModel,
    TextDataModule,
    TextSource,
    TransformerConfig,
)
from andrea_pl.optim import Clipper
from andrea_pl.optim.extension import load_extension
from pairs import describe

SHAPES = {
    "12M": TransformerConfig(vocab_size=2305, block_size=1024, d_model=384, n_heads=12, n_layers=6),
    "98M": TransformerConfig(vocab_size=8449, block_size=1024, d_model=768, n_heads=12, n_layers=12),
    "1B": TransformerConfig(vocab_size=32768, block_size=1024, d_model=2048, n_heads=16, n_layers=18),
}
REHEARSAL = {"10k": TransformerConfig(vocab_size=64, block_size=16, d_model=32, n_heads=2, n_layers=1)}
PASSES = {"torch": 3, "ours": 3, "norm": 1, "step": 7, "folded": 9}
"""Reads and writes of the gradients' bytes that a side cannot do without."""
MAX_NORM, NORM = 1.0, 3.0


class Clock:
    """Times work on the device, and the host's part of it."""

    def __init__(self, device: torch.device, flush_bytes: int) -> None:
        self.device = device
        self.flush = torch.zeros(flush_bytes // 4, device=device)

    def seconds(self, work: Callable[[], Any]) -> tuple[float, float]:
        """Return the seconds on the device and on the host, with a cache that holds nothing of it."""
        self.flush.add_(1.0)
        if self.device.type != "cuda":
            start = time.perf_counter()
            work()
            spent = time.perf_counter() - start
            return spent, spent
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start = time.perf_counter()
        begin.record()
        work()
        end.record()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3, host

    def bandwidth(self) -> float:
        """Return the bytes a second that a copy reads and writes."""
        target = torch.empty_like(self.flush)
        spent = [self.seconds(lambda: target.copy_(self.flush))[0] for _ in range(20)]
        return 8 * self.flush.numel() / statistics.median(spent[5:])


def check_kernels(device: torch.device, seed: int) -> int:
    """Compare rows, figures and scaled values with float64 and return how many comparisons were made."""
    generator = torch.Generator(device).manual_seed(seed)
    numbers = random.Random(seed)
    operators = torch.ops.andrea_clip
    checks = 0

    def expect(is_right: bool, what: str) -> None:
        nonlocal checks
        checks += 1
        if not is_right:
            sys.exit(f"wrong: {what} (seed {seed})")

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for trial in range(12):
            sizes = [numbers.choice([1, 7, 255, 16383, 16384, 16385, 100_003]) for _ in range(trial * 30 + 1)]
            offset = trial % 4
            whole = [
                torch.randn(size + offset, generator=generator, device=device).to(dtype) for size in sizes
            ]
            tensors = [each[offset:] for each in whole]
            if trial % 3 == 2:
                tensors[-1][-1] = float("nan") if trial % 2 else float("inf")
            rows = operators.squared_norms(tensors)
            exact = torch.stack([each.double().square().sum() for each in tensors])
            bad = torch.stack([(~torch.isfinite(each)).sum() for each in tensors]).double()
            what = f"{dtype}, {len(sizes)} tensors, off by {offset}"
            expect(torch.allclose(rows[:, 0], exact, rtol=2e-6, atol=0, equal_nan=True), f"sums of {what}")
            expect(torch.equal(rows[:, 1], bad), f"counts of {what}")
            expect(
                torch.equal(rows.nan_to_num(), operators.squared_norms(tensors).nan_to_num()),
                f"bits of {what}",
            )
            figures, controls = operators.clip_figures(rows, 0.5)
            norm = exact.sum().sqrt()
            finite = bool(torch.isfinite(norm))
            coefficient = min(1.0, 0.5 / float(norm)) if finite else 1.0
            expect(not finite or abs(float(figures[0] / norm) - 1) < 1e-6, f"norm of {what}")
            expect(abs(float(figures[1]) / coefficient - 1) < 1e-6, f"coefficient of {what}")
            expect(float(controls[1]) == (0.0 if finite else 1.0), f"hold of {what}")
            expected = [(each.float() * figures[1].float()).to(dtype) for each in tensors]
            operators.scale_(tensors, figures[1].clone())
            same = [
                torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(tensors, expected, strict=True)
            ]
            expect(all(same), f"scaled values of {what}")
    return checks


class NoWaiting(pl.Callback):
    """Makes a wait of the host for the device an error, from the fourth update on."""

    def __init__(self) -> None:
        self.watched = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Forbid waiting."""
        if trainer.global_step >= 3 and torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error")
            self.watched += 1

    def on_train_batch_end(self, *_: Any) -> None:
        """Allow it again."""
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


def train_without_waiting(device: torch.device) -> int:
    """Train an epoch on padded windows of several micro-batches and return how many updates were watched."""
    shape = TransformerConfig(vocab_size=256, block_size=64, d_model=128, n_heads=4, n_layers=2)
    numbers = random.Random(0)
    documents = [[numbers.randrange(256) for _ in range(numbers.randrange(2, 120))] for _ in range(300)]
    data = TextDataModule(
        [TextSource(name="random", kind="tokens", documents=documents)],
        vocab_size=256,
        block_size=64,
        sequences_per_update=32,
        micro_batch_tokens=512,
        val_fraction=0.0,
    )
    watching = NoWaiting()
    module = LanguageModule(shape, lr=1e-3, schedule="constant", max_norm=0.5)
    trainer = pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        strategy=ClipSingleDeviceStrategy(clipper="extension"),
        precision="bf16-mixed",
        max_epochs=1,
        callbacks=[watching],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    if module.updates_applied != trainer.global_step:
        sys.exit(f"{module.updates_applied} of {trainer.global_step} updates were applied")
    return watching.watched


def time_shape(name: str, shape: TransformerConfig, clock: Clock, bandwidth: float, rounds: int) -> None:
    """Time all sides in turns and print."""
    with torch.device("meta"):
        sizes = [each.shape for each in RoPELanguageModel(shape).parameters()]
    count = sum(size.numel() for size in sizes)
    device = clock.device
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 26 * count:
        print(f"\n{name}: left out, {count:,} parameters need {26 * count / 1e9:.0f} GB")
        return
    parameters = [torch.nn.Parameter(torch.randn(size, device=device) * 0.02) for size in sizes]
    averaged = [torch.randn(size, device=device) * (NORM / count**0.5) for size in sizes]
    gradients = [torch.empty_like(each) for each in averaged]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    clipper, operators = Clipper("extension"), torch.ops.andrea_clip
    hold = torch.zeros((), device=device)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient

    def ours(scales: bool) -> None:
        figures, _ = operators.clip_figures(operators.squared_norms(gradients), MAX_NORM)
        if scales:
            operators.scale_(gradients, figures[1])

    def folded() -> None:
        clipper.clip_gradients(optimizer, MAX_NORM, hold)
        optimizer.step()

    sides: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=True),
        "ours": lambda: ours(True),
        "norm": lambda: ours(False),
        "step": optimizer.step,
        "folded": folded,
    }
    device_seconds: dict[str, list[float]] = {side: [] for side in sides}
    host_seconds: dict[str, list[float]] = {side: [] for side in sides}
    order = list(sides)
    for turn in range(rounds + 3):
        for side in order[turn % len(order) :] + order[: turn % len(order)]:
            torch._foreach_copy_(gradients, averaged)
            spent, host = clock.seconds(sides[side])
            if turn >= 3:
                device_seconds[side].append(spent)
                host_seconds[side].append(host)
    print(f"\n{name}: {count:,} parameters in {len(sizes)} tensors")
    for side, seconds in device_seconds.items():
        median = statistics.median(seconds)
        moved, host = PASSES[side] * 4 * count, statistics.median(host_seconds[side])
        print(
            f"  {side:7s} {1e6 * median:10.1f} us  {moved / median / 1e9:7.0f} GB/s  "
            f"{median * bandwidth / moved:5.2f} of the floor  host {1e6 * host:8.1f} us"
        )
    print(f"  torch / ours: {_ratio(device_seconds, 'torch', 'ours')}")
    print(f"  folded / step: {_ratio(device_seconds, 'folded', 'step')}")


def _ratio(seconds: dict[str, list[float]], over: str, under: str) -> str:
    pairs: Sequence[tuple[float, float]] = list(zip(seconds[over], seconds[under], strict=True))
    return describe([a / b for a, b in pairs])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with small tensors")
    rehearse = parser.parse_args().rehearse
    if not rehearse and not torch.cuda.is_available():
        sys.exit("no CUDA device; --rehearse goes through the script on a CPU")
    begin = time.perf_counter()
    device = torch.device("cpu" if rehearse else "cuda:0")
    print(f"torch {torch.__version__}, {'CPU' if rehearse else torch.cuda.get_device_name(device)}")
    load_extension(device)
    print(f"extension ready after {time.perf_counter() - begin:.1f} s")
    seed = int(time.time())
    print(f"{check_kernels(device, seed)} comparisons with float64 are right, seed {seed}")
    watched = train_without_waiting(device)
    print(
        f"{watched} updates made without a wait of the host" if watched else "waits are not watched on a CPU"
    )
    clock = Clock(device, (4 << 20) if rehearse else (512 << 20))
    bandwidth = clock.bandwidth()
    print(f"a copy moves {bandwidth / 1e9:.0f} GB/s")
    for name, shape in (REHEARSAL if rehearse else SHAPES).items():
        time_shape(name, shape, clock, bandwidth, rounds=5 if rehearse else 20)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"\n{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
