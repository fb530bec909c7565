"""What the kernels of `csrc/clip_kernels.cuh` must do, checked through the shim on a CPU against float64.

usage: checks.py LIBRARY   prints the checks that fail and how many there were; exit code 1 if any failed
"""

import ctypes
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (
    [1],
    [3],
    [5, 1, 2],
    [4, 8, 16],
    [127, 16383, 16384, 16385, 1],
    [40000, 7, 33000],
    [3 * 16384 + 5],
    [9973] * 5,
    [1] * 40,
)
GUARD = 7.0
LARGEST = torch.finfo(torch.float32).max
Check = tuple[str, bool]


@dataclass(frozen=True)
class Result:
    """What one run of the three kernels wrote."""

    sums: Tensor
    rows: Tensor
    norm: float
    coefficient: float
    divisor: float
    held: float


class Kernels:
    """The library made of harness.cpp."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.andrea_message.restype = ctypes.c_char_p
        self._library.andrea_chunk_size.restype = ctypes.c_int64
        self.chunk = int(self._library.andrea_chunk_size())

    def clip(
        self,
        tensors: Sequence[Tensor],
        max_norm: float = math.inf,
        scales: bool = False,
        seed: int = 1,
        capacity: int = 200,
    ) -> Result:
        """Run partial sums, final reductions and, if asked for, the scaling."""
        count = len(tensors)
        pointers = (ctypes.c_void_p * count)(*[each.data_ptr() for each in tensors])
        sizes = (ctypes.c_int64 * count)(*[each.numel() for each in tensors])
        chunks = sum(-(-each.numel() // self.chunk) for each in tensors)
        sums, rows = (torch.full((size, 2), math.nan, dtype=torch.float64) for size in (chunks, count))
        first = torch.full((count,), -1, dtype=torch.int32)
        figures = torch.full((2,), math.nan, dtype=torch.float64)
        controls = torch.full((2,), math.nan)
        done = self._library.andrea_clip(
            DTYPES.index(tensors[0].dtype),
            ctypes.c_int64(count),
            pointers,
            sizes,
            capacity,
            ctypes.c_double(max_norm),
            int(scales),
            ctypes.c_uint64(seed),
            *[ctypes.c_void_p(each.data_ptr()) for each in (sums, first, rows, figures, controls)],
        )
        if done:
            raise RuntimeError(self._library.andrea_message().decode())
        return Result(sums, rows, *figures.tolist(), *controls.tolist())

    def find(self, numel: int, chunk: int) -> tuple[int, int]:
        """Return offset and number of elements of a chunk."""
        offset, count = ctypes.c_int64(), ctypes.c_int64()
        self._library.andrea_find(ctypes.c_int64(numel), chunk, ctypes.byref(offset), ctypes.byref(count))
        return offset.value, count.value


def guarded(values: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Return a copy that starts `offset` elements off a 16-byte boundary, and the memory around it."""
    memory = torch.full((len(values) + offset + 64,), GUARD, dtype=values.dtype)
    view = memory[offset : offset + len(values)]
    view.copy_(values)
    return view, memory


def close(found: float, expected: float, bound: float) -> bool:
    """Compare relatively; NaN and infinities must be the same."""
    if not math.isfinite(expected):
        return found == expected or (math.isnan(found) and math.isnan(expected))
    return abs(found - expected) <= bound * abs(expected)


def against_float64(
    kernels: Kernels, name: str, tensors: list[Tensor], bound: float, seed: int
) -> Iterator[Check]:
    """Check rows, norm, coefficient and controls, and that scaled values are right to the last bit."""
    offset = seed % 4
    views = [guarded(each, offset) for each in tensors]
    values = [view for view, _ in views]
    result = kernels.clip(values, bound, scales=True, seed=seed)
    squares = [float(each.double().square().sum()) for each in tensors]
    counts = [int((~torch.isfinite(each)).sum()) for each in tensors]
    norm = math.sqrt(sum(squares)) if not any(map(math.isnan, squares)) else math.nan
    clips = math.isfinite(norm) and norm > bound
    yield (
        f"{name}: sums of squares",
        all(map(close, result.rows[:, 0].tolist(), squares, [2e-6] * len(squares))),
    )
    yield f"{name}: non-finite counts", result.rows[:, 1].tolist() == counts
    yield f"{name}: norm", close(result.norm, norm, 1e-6)
    yield f"{name}: coefficient", close(result.coefficient, bound / norm if clips else 1.0, 1e-6)
    divisor = norm / bound if clips else 1.0
    yield f"{name}: divisor", close(result.divisor, min(divisor, LARGEST), 2e-6)
    yield f"{name}: held", result.held == (0.0 if norm < LARGEST and divisor < LARGEST else 1.0)
    factor = torch.tensor(result.coefficient, dtype=torch.float64).float()
    scaled = [(each.float() * factor).to(each.dtype) for each in tensors]
    same = [
        torch.equal(view.view(torch.uint8), each.view(torch.uint8))
        or bool(
            (torch.isnan(view) == torch.isnan(each)).all()
            and torch.equal(view.nan_to_num(0), each.nan_to_num(0))
        )
        for view, each in zip(values, scaled, strict=True)
    ]
    yield f"{name}: scaled values", all(same)
    around = [
        bool((memory[:offset] == GUARD).all() and (memory[offset + len(view) :] == GUARD).all())
        for view, memory in views
    ]
    yield f"{name}: nothing written around", all(around)


def all_checks(kernels: Kernels) -> Iterator[Check]:
    """Run everything."""
    random = torch.Generator().manual_seed(20)
    for dtype in DTYPES:
        for place, sizes in enumerate(SIZES):
            for offset in range(4):
                tensors = [torch.randn(size, generator=random).to(dtype) for size in sizes]
                name = f"{dtype}, shape {place}, off by {offset}"
                yield from against_float64(kernels, name, tensors, 0.5, 4 * place + offset)
        yield from special_values(kernels, dtype, random)
        yield from determinism(kernels, dtype, random)
        yield from within_the_bound(kernels, dtype)
    yield from every_pattern(kernels)
    yield from sizes_beyond_32_bits(kernels)


def special_values(kernels: Kernels, dtype: torch.dtype, random: torch.Generator) -> Iterator[Check]:
    """Check NaN and Inf anywhere, and magnitudes whose squares float32 cannot hold."""
    places = (0, 8191, 16384, 19999)
    for value in (math.nan, math.inf, -math.inf):
        for place in places:
            tensors = [torch.randn(size, generator=random).to(dtype) for size in (100, 20000)]
            tensors[1][place] = value
            yield from against_float64(kernels, f"{dtype}, {value} at {place}", tensors, 0.5, place)
    everything = torch.full((17000,), math.nan, dtype=dtype)
    yield from against_float64(kernels, f"{dtype}, nothing but NaN", [everything, everything], 0.5, 3)
    both = torch.tensor([1.0, math.inf, -math.inf, 2.0], dtype=dtype)
    yield from against_float64(kernels, f"{dtype}, both infinities", [both], 0.5, 2)
    magnitudes = (6e-8, 1e-3, 6e4) if dtype == torch.float16 else (1e-38, 1e-30, 1e-20, 1e10, 1e20, 1e30)
    for magnitude in magnitudes:
        for size in (3, 20001):
            tensors = [(torch.rand(size, generator=random) * magnitude).to(dtype)]
            name = f"{dtype}, {size} of {magnitude:g}"
            yield from against_float64(kernels, name, tensors, magnitude, size)
            beside = [*tensors, torch.zeros(20000, dtype=dtype)]
            yield from against_float64(kernels, f"{name} beside zeros", beside, magnitude / 100, size)
    if dtype != torch.float16:
        huge = torch.full((16,), 3e38, dtype=dtype)
        yield from against_float64(kernels, f"{dtype}, a norm beyond float32", [huge], 1.0, 1)
        yield from against_float64(kernels, f"{dtype}, a divisor beyond float32", [huge[:1]], 1e-3, 1)


def determinism(kernels: Kernels, dtype: torch.dtype, random: torch.Generator) -> Iterator[Check]:
    """Check that schedule, alignment and launches leave every bit alone."""
    tensors = [torch.randn(size, generator=random).to(dtype) for size in (5, 70000, 33, 16384, 9, 2, 20001)]
    once = kernels.clip(tensors, 0.5, seed=1)

    def is_same(other: Result) -> bool:
        figures = (other.norm, other.coefficient, other.divisor, other.held)
        mine = (once.norm, once.coefficient, once.divisor, once.held)
        return torch.equal(once.sums, other.sums) and torch.equal(once.rows, other.rows) and figures == mine

    for seed in range(2, 8):
        yield f"{dtype}, schedule {seed}", is_same(kernels.clip(tensors, 0.5, seed=seed))
    for capacity in (1, 2, 3, 6):
        yield f"{dtype}, launches of {capacity}", is_same(kernels.clip(tensors, 0.5, capacity=capacity))
    for offset in (1, 2, 3):
        views = [guarded(each, offset)[0] for each in tensors]
        yield f"{dtype}, all off by {offset}", is_same(kernels.clip(views, 0.5))
    for capacity in (1, 3):
        one, other = ([each.clone() for each in tensors] for _ in range(2))
        kernels.clip(one, 0.5, scales=True)
        kernels.clip(other, 0.5, scales=True, capacity=capacity, seed=9)
        yield f"{dtype}, scaled in launches of {capacity}", all(map(torch.equal, one, other))


def within_the_bound(kernels: Kernels, dtype: torch.dtype) -> Iterator[Check]:
    """Check that a norm at or under the bound changes nothing."""
    for bound in (5.0, 5.1, math.inf):
        tensor = torch.tensor([3.0, 4.0], dtype=dtype)
        result = kernels.clip([tensor], bound, scales=True)
        yield f"{dtype}, bound {bound}: coefficient", (result.coefficient, result.divisor) == (1.0, 1.0)
        yield f"{dtype}, bound {bound}: values", tensor.tolist() == [3.0, 4.0]


def every_pattern(kernels: Kernels) -> Iterator[Check]:
    """Check sums and scaling of every 16-bit number."""
    for dtype in DTYPES[1:]:
        patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
        yield from against_float64(kernels, f"{dtype}, every pattern", [patterns], 1.0, 4)
        finite = patterns[torch.isfinite(patterns)]
        bound = 0.37 * float(finite.double().square().sum().sqrt())
        yield from against_float64(kernels, f"{dtype}, every finite pattern", [finite], bound, 4)


def sizes_beyond_32_bits(kernels: Kernels) -> Iterator[Check]:
    """Check where chunks of a very large tensor begin."""
    for numel in (5_000_000_000, 30_000_000_000_000):
        for chunk in (0, 131071, 131072, 131073, 200_000, (numel - 1) // kernels.chunk):
            offset = chunk * kernels.chunk
            expected = (offset, min(kernels.chunk, numel - offset))
            yield f"chunk {chunk} of {numel}", kernels.find(numel, chunk) == expected


def main(library: str) -> int:
    """Print what failed."""
    torch.set_num_threads(1)
    results = list(all_checks(Kernels(Path(library))))
    failed = [name for name, is_right in results if not is_right]
    print("\n".join(failed[:5]))
    print(f"{len(results)} checks, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
