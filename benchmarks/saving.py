"""What writing a checkpoint durably costs, against Lightning's own save, which waits for no disk.

    python benchmarks/saving.py [--pairs 15] [--megabytes 100] [--folder FOLDER]

Both write the same checkpoint, weights and two moments of them, in turns and into the same folder. Ours ends
when the disk has the file, its manifest and both names; Lightning's when the kernel has it. Printed are
medians, the median of the ratios of pairs with its 95 % bootstrap interval, and for each side the peak of
memory beside the checkpoint, measured in a process of its own.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO

from andrea_pl import DurableCheckpointIO
from pairs import describe

SIDES: dict[str, type[CheckpointIO]] = {"lightning": TorchCheckpointIO, "durable": DurableCheckpointIO}


def build_checkpoint(megabytes: int) -> dict[str, Any]:
    """Return a checkpoint of so many megabytes, in layers of different sizes, the largest a third of it."""
    draw = torch.Generator().manual_seed(0)
    elements = megabytes * 250_000 // 3
    sizes = [elements // 3, *[elements // 36] * 24]
    weights = {f"layer.{place}": torch.randn(size, generator=draw) for place, size in enumerate(sizes)}
    moments = {
        place: {name: torch.randn(size, generator=draw) for name in ("exp_avg", "exp_avg_sq")}
        for place, size in enumerate(sizes)
    }
    return {"global_step": 1, "state_dict": weights, "optimizer_states": [{"state": moments}]}


def time_pairs(pairs: int, megabytes: int, folder: Path) -> None:
    """Save in turns, and print seconds and ratio."""
    checkpoint = build_checkpoint(megabytes)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(pairs + 1):
        for side in sorted(SIDES, reverse=number % 2 == 1):
            began = time.perf_counter()
            SIDES[side]().save_checkpoint(checkpoint, folder / f"{side}.ckpt")
            if number:  # the first pair warms up
                seconds[side].append(time.perf_counter() - began)
    size = (folder / "durable.ckpt").stat().st_size / 1e6
    for side, values in seconds.items():
        print(f"{side:9} {median(values):.3f} s for {size:.0f} MB")
    ratios = [ours / theirs for ours, theirs in zip(seconds["durable"], seconds["lightning"], strict=True)]
    print(f"durable / lightning: {describe(ratios)}")


def measure_memory(side: str, megabytes: int, folder: Path) -> None:
    """Print by how much one save raises this process's peak, in megabytes."""
    checkpoint = build_checkpoint(megabytes)
    SIDES[side]().save_checkpoint({"global_step": 0}, folder / "small.ckpt")
    before = start_peak()
    SIDES[side]().save_checkpoint(checkpoint, folder / "memory.ckpt")
    print((resident("VmHWM") - before) / 1e6)


def start_peak() -> int:
    """Forget the peak of this process's memory so far (Linux), and return what it has now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(figure: str) -> int:
    """Return a figure of this process's resident memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{figure}:"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="where files are written; the working folder if left out")
    parser.add_argument("--memory-of", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as place:
        if options.memory_of:
            measure_memory(options.memory_of, options.megabytes, Path(place))
            return
        time_pairs(options.pairs, options.megabytes, Path(place))
        for side in SIDES:
            command = [sys.executable, __file__, "--memory-of", side, "--megabytes", str(options.megabytes)]
            extra = subprocess.run(
                [*command, "--folder", place], check=True, capture_output=True, text=True
            ).stdout
            print(f"{side:9} {float(extra):.1f} MB beside the checkpoint")


if __name__ == "__main__":
    main()
