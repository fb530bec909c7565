"""The update stage on a CPU (clip, step, zero_grad) against a loop written by hand, and against memory.

    python benchmarks/clip.py [--pairs 15] [--threads 2] [--no-growth]

On gradients of language models of the ANDREA shapes, whose norm is about three times the bound:

    hand     each gradient divided by the tokens, clip_grad_norm_, default AdamW, zero_grad
    ours     Clipper("extension"), its coefficient folded into fused AdamW, zero_grad
    torch    the same with Clipper("torch")
    step     fused AdamW and zero_grad alone, nothing clipped

All sides take turns, with caches that a 256 MB buffer has flushed. The floor is what `ours` must move, one
read of the gradients and four reads and four writes of the step, at the bandwidth that a C loop reaches
between the turns (its 90th percentile). Printed are medians of pairs with their 95 % bootstrap intervals.
Last come 120M and 480M parameters in turns, for the time per parameter.
"""

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from andrea_pl import RoPELanguageModel, TransformerConfig
from andrea_pl.optim import Clipper
from pairs import describe

TOKENS, MAX_NORM, NORM = 8192.0, 1.0, 3.0
SHAPES = {
    "12M": TransformerConfig(vocab_size=2305, block_size=1024, d_model=384, n_heads=12, n_layers=6),
    "120M": TransformerConfig(vocab_size=8449, block_size=1024, d_model=768, n_heads=12, n_layers=15),
    "480M": TransformerConfig(vocab_size=8449, block_size=1024, d_model=1536, n_heads=12, n_layers=16),
}
WARM_UP_SECONDS = 4.0
FLUSH = torch.zeros(64 << 20)

PROBE = r"""
#include <cstdint>
#include <thread>
#include <vector>
template <class Work> static void split(int threads, int64_t n, Work work) {
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) pool.emplace_back([=] { work(n / threads * t, n / threads * (t + 1)); });
  for (auto& thread : pool) thread.join();
}
extern "C" float read_all(int threads, const float* x, int64_t n) {
  std::vector<float> sums(16 * threads);
  split(threads, n, [&, x](int64_t begin, int64_t end) {
    float lane[4][16] = {};
    const int64_t part = (end - begin) / 64 * 16;
    for (int64_t i = 0; i < part; i += 16)
      for (int s = 0; s < 4; ++s)
        for (int j = 0; j < 16; ++j) lane[s][j] += x[begin + s * part + i + j];
    float total = 0;
    for (auto& lanes : lane) for (float each : lanes) total += each;
    sums[16 * (begin * threads / n)] = total;
  });
  return sums[0];
}
extern "C" void update_all(int threads, float* a, float* b, float* c, float* d, int64_t n) {
  split(threads, n, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) { a[i] *= 1.0001f; b[i] *= 0.9999f; c[i] += 1.0f; d[i] -= 1.0f; }
  });
}
"""


class Bandwidth:
    """What memory gives to plain loops, in bytes a second: one read, and four reads with four writes."""

    def __init__(self, threads: int, elements: int = 32 << 20) -> None:
        self.threads = threads
        # staggered, so that four streams do not fall into the same cache sets
        self.arrays = [torch.ones(elements + 5024 * place)[5024 * place :] for place in range(4)]
        self.reads: list[float] = []
        self.updates: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "probe.cpp", Path(folder) / "probe.so"
            source.write_text(PROBE, encoding="utf-8")
            options = ["-O3", "-march=native", "-ffast-math", "-std=c++17", "-shared", "-fPIC", "-pthread"]
            subprocess.run(["g++", *options, str(source), "-o", str(library)], check=True)
            self.library = ctypes.CDLL(str(library))
        self.library.read_all.restype = ctypes.c_float

    def measure(self) -> None:
        """Take one sample of each."""
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in self.arrays]
        count = ctypes.c_int64(len(self.arrays[0]))
        start = time.perf_counter()
        self.library.read_all(self.threads, pointers[0], count)
        middle = time.perf_counter()
        self.library.update_all(self.threads, *pointers, count)
        end = time.perf_counter()
        self.reads.append(4 * count.value / (middle - start))
        self.updates.append(32 * count.value / (end - middle))

    def clear(self) -> None:
        """Forget all samples."""
        self.reads.clear()
        self.updates.clear()

    def floor(self, parameters: int) -> float:
        """Return the seconds in which one read and a step's eight passes over the parameters can be done."""
        read, update = (float(np.percentile(each, 90)) for each in (self.reads, self.updates))
        return 4 * parameters / read + 32 * parameters / update


class Stage:
    """Parameters of one side, its optimizer, and how it makes an update."""

    def __init__(self, start: list[Tensor], fused: bool, clip: Callable[["Stage"], None]) -> None:
        self.parameters = [torch.nn.Parameter(each.clone()) for each in start]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=3e-4, weight_decay=0.1, fused=fused)
        self.clip = clip
        self.seconds: list[float] = []

    def update(self, gradients: list[Tensor]) -> None:
        """Take the time of clip, step and zero_grad."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        start = time.perf_counter()
        self.clip(self)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.seconds.append(time.perf_counter() - start)


def by_hand(stage: Stage) -> None:
    """Divide and clip as a tutorial does."""
    for parameter in stage.parameters:
        parameter.grad.div_(TOKENS)
    torch.nn.utils.clip_grad_norm_(stage.parameters, MAX_NORM)


def with_clipper(clipper: Clipper) -> Callable[[Stage], None]:
    """Return the clip through a clipper."""
    return lambda stage: (clipper.clip_gradients(stage.optimizer, MAX_NORM), None)[1]


class Case:
    """A shape, its gradients, and the sides that make updates of it."""

    def __init__(self, name: str, sides: tuple[str, ...]) -> None:
        with torch.device("meta"):
            shapes = [each.shape for each in RoPELanguageModel(SHAPES[name]).parameters()]
        self.name, self.tensors = name, len(shapes)
        self.count = sum(shape.numel() for shape in shapes)
        torch.manual_seed(0)
        weights = [torch.randn(shape) * 0.02 for shape in shapes]
        self.averaged = [torch.randn(shape) * (NORM / self.count**0.5) for shape in shapes]
        self.gradients = [each.clone() for each in self.averaged]
        clips: dict[str, Callable[[Stage], None]] = {
            "ours": with_clipper(Clipper("extension")),
            "hand": by_hand,
            "torch": with_clipper(Clipper("torch")),
            "step": lambda _: None,
        }
        self.stages = {side: Stage(weights, side != "hand", clips[side]) for side in sides}

    def update(self, side: str) -> None:
        """Let a side make an update of fresh gradients."""
        torch._foreach_copy_(self.gradients, self.averaged)
        if side == "hand":
            torch._foreach_mul_(self.gradients, TOKENS)  # sums over tokens, which it still has to divide
        FLUSH.add_(1.0)
        self.stages[side].update(self.gradients)


def measure(cases: list[Case], bandwidth: Bandwidth, pairs: int) -> None:
    """Let all sides of all cases take turns, after a warm-up that does not count."""
    turns = [(case, side) for case in cases for side in case.stages]
    begin = time.perf_counter()
    rounds = 0
    while rounds < pairs:
        for case, side in turns[rounds % len(turns) :] + turns[: rounds % len(turns)]:
            bandwidth.measure()
            case.update(side)
        rounds += 1
        if time.perf_counter() - begin < WARM_UP_SECONDS:
            rounds = 0
            bandwidth.clear()
            for case, side in turns:
                case.stages[side].seconds.clear()


def report(case: Case, bandwidth: Bandwidth) -> None:
    """Print medians and ratios of one shape."""
    seconds = {side: stage.seconds for side, stage in case.stages.items()}
    floor = bandwidth.floor(case.count)
    speeds = [float(np.percentile(each, 90)) / 1e9 for each in (bandwidth.reads, bandwidth.updates)]
    print(f"\n{case.name}: {case.count:,} parameters in {case.tensors} tensors")
    print(f"  memory: {speeds[0]:.1f} GB/s read, {speeds[1]:.1f} GB/s read and written")
    print(f"  floor {1e3 * floor:8.1f} ms")
    for side, values in seconds.items():
        print(f"  {side:5s} {1e3 * statistics.median(values):8.1f} ms")
    print(f"  ours / floor: {describe([each / floor for each in seconds['ours']])}")
    for side in ("ours", "torch"):
        ratios = [h / o for h, o in zip(seconds["hand"], seconds[side], strict=True)]
        print(f"  hand / {side}: {describe(ratios)}")
        added = [(o - s) / s for o, s in zip(seconds[side], seconds["step"], strict=True)]
        print(f"  added to a fused step by {side}: {describe(added)}")


def report_growth(small: Case, large: Case) -> None:
    """Print how the time per parameter grows."""
    each = [[s / case.count for s in case.stages["ours"].seconds] for case in (small, large)]
    for case, values in zip((small, large), each, strict=True):
        print(f"\n{case.name}: {case.count:,} parameters, ours {1e9 * statistics.median(values):.3f} ns each")
    growth = [there / here for here, there in zip(*each, strict=True)]
    print(f"time per parameter, {large.name} / {small.name}: {describe(growth)}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-growth", action="store_true", help="leave out 480M, which takes 14 GB")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads")
    bandwidth = Bandwidth(options.threads)
    for name in ("12M", "120M"):
        case = Case(name, ("ours", "hand", "torch", "step"))
        measure([case], bandwidth, options.pairs)
        report(case, bandwidth)
        bandwidth.clear()
    if not options.no_growth:
        small, large = Case("120M", ("ours",)), Case("480M", ("ours",))
        measure([small, large], bandwidth, options.pairs)
        report_growth(small, large)


if __name__ == "__main__":
    main()
