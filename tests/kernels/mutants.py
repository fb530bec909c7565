"""Breaks the kernels in many small ways and sees whether the checks notice.

usage: python -m tests.kernels.mutants [NAME …]   prints what killed each; exit code 1 if any lives
"""

import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.kernels.builds import HERE, SOURCES, build_library, build_sanitized

KERNELS = "clip_kernels.cuh"

MUTANTS = {
    "no first barrier": ("  __syncthreads();\n  double total", "  double total"),
    "no second barrier": ("  __syncthreads();  // before the next call", "  // before the next call"),
    "half a warp is added": ("distance = kWarp / 2;", "distance = kWarp / 4;"),
    "half a warp's mask": ("__shfl_down_sync(0xffffffffu,", "__shfl_down_sync(0x0000ffffu,"),
    "a thread leaves early": (
        "  squares = block_sum(squares);\n  double nonfinite = 0.0;",
        "  if (threadIdx.x == 77) return;\n  squares = block_sum(squares);\n  double nonfinite = 0.0;",
    ),
    "one warp too many is read": ("warp < kThreads / kWarp; ++warp", "warp <= kThreads / kWarp; ++warp"),
    "one warp too few is read": ("warp < kThreads / kWarp; ++warp", "warp < kThreads / kWarp - 1; ++warp"),
    "alignment is taken for granted": (
        "const bool is_aligned = reinterpret_cast<uintptr_t>(chunk.data) % sizeof(Pack<T>) == 0;",
        "const bool is_aligned = true;",
    ),
    "the tail is left out": ("if (tail < chunk.count) {", "if (tail < chunk.count - 1) {"),
    "the tail is one too long": ("if (tail < chunk.count) {", "if (tail <= chunk.count) {"),
    "the last chunk is whole": (
        "left < kChunk ? static_cast<int>(left) : kChunk, low",
        "left < kChunk ? kChunk : kChunk, low",
    ),
    "the search is strict": (
        "if (table.first_chunk[middle] <= chunk)",
        "if (table.first_chunk[middle] < chunk)",
    ),
    "offsets have 32 bits": (
        "static_cast<int64_t>(chunk - table.first_chunk[low]) * kChunk",
        "static_cast<int32_t>(static_cast<uint32_t>(chunk - table.first_chunk[low]) * kChunk)",
    ),
    "packs are read twice": (
        "  for (; i < packs; i += kThreads) {",
        "  for (i = threadIdx.x; i < packs; i += kThreads) {",
    ),
    "large sums stay in float32": (
        "if (!(squares >= kSmallestExactSum && squares <= kLargestExactSum))",
        "if (!(squares >= kSmallestExactSum))",
    ),
    "small sums stay in float32": (
        "if (!(squares >= kSmallestExactSum && squares <= kLargestExactSum))",
        "if (!(squares <= kLargestExactSum))",
    ),
    "only NaN is counted": ("if (!isfinite(x)) bad += 1.0;", "if (x != x) bad += 1.0;"),
    "launches share slots": (
        "sums[table.chunks_before + static_cast<int>(blockIdx.x)] = {",
        "sums[blockIdx.x] = {",
    ),
    "launches share tensors": ("first[table.tensors_before + chunk.tensor] =", "first[chunk.tensor] ="),
    "a tensor takes its neighbour's first sum": ("i < end; i += kThreads) {", "i <= end; i += kThreads) {"),
    "the last tensor has no end": (
        "first && blockIdx.x + 1 < gridDim.x ? first[blockIdx.x + 1] : count",
        "first && blockIdx.x + 1 < gridDim.x ? first[blockIdx.x + 1] : count - 1",
    ),
    "every thread writes the figures": ("  if (threadIdx.x != 0) return;\n", "  squares += threadIdx.x;\n"),
    "the bound is not looked at": ("isfinite(norm) && norm > max_norm", "isfinite(norm)"),
    "a bad norm clips": ("isfinite(norm) && norm > max_norm", "!(norm <= max_norm)"),
    "coefficient for divisor": (
        "static_cast<float>(ratio < kLargestFloat ? ratio : kLargestFloat)",
        "static_cast<float>(figures[1])",
    ),
    "nothing is held": (
        "isfinite(static_cast<float>(norm)) && isfinite(static_cast<float>(ratio)) ? 0.0f : 1.0f",
        "isfinite(static_cast<float>(norm)) || isfinite(static_cast<float>(ratio)) ? 0.0f : 1.0f",
    ),
    "the scale is one chunk off": ("gridDim.x - 1 - blockIdx.x", "gridDim.x - blockIdx.x"),
    "nothing is written back": ("for_each_pack<true, kPacks", "for_each_pack<false, kPacks"),
    "half precision is rounded twice": (
        "void assign(half& target, float value) { target = __float2half(value); }",
        "void assign(half& target, float value) {"
        " target = __float2half(__half2float(__float2half(2 * value)) / 2); }",
    ),
}


def verdict(name: str, old: str, new: str) -> str:
    """Return what killed a mutant, or an empty text if nothing did."""
    text = (SOURCES / KERNELS).read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise SystemExit(f"{name}: its place is {text.count(old)} times in {KERNELS}; write it anew")
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        (folder / KERNELS).write_text(text.replace(old, new), encoding="utf-8")
        checks = [sys.executable, str(HERE / "checks.py"), str(build_library(folder, folder))]
        found = _failure(checks)
        return found or _failure([str(build_sanitized(folder, folder))])


def _failure(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode == 0:
        return ""
    seen = done.stdout + done.stderr
    for pattern in (
        r"Error: (.*)",
        r"(AddressSanitizer: [\w-]+)",
        r"runtime error: (.*)",
        r"(\d+ checks, \d+ failed)",
    ):
        matched = re.findall(pattern, seen)
        if matched:
            return str(matched[-1])[:60]
    return f"exit code {done.returncode}"


def main(names: list[str]) -> int:
    """Try all mutants, or those named."""
    with tempfile.TemporaryDirectory() as folder:
        whole = subprocess.run(
            [sys.executable, str(HERE / "checks.py"), str(build_library(Path(folder)))],
            capture_output=True,
            text=True,
            check=True,
        )
        sanitized = subprocess.run(
            [str(build_sanitized(Path(folder)))], capture_output=True, text=True, check=True
        )
    chosen = names or list(MUTANTS)
    with ThreadPoolExecutor(2) as pool:
        verdicts = list(pool.map(lambda name: verdict(name, *MUTANTS[name]), chosen))
    for name, found in zip(chosen, verdicts, strict=True):
        print(f"{name:42} {found or 'LIVES'}")
    print(f"unbroken: {whole.stdout.strip()}; under ASan and UBSan {sanitized.stdout.strip()}")
    print(f"{sum(map(bool, verdicts))} of {len(chosen)} mutants killed")
    return not all(verdicts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
