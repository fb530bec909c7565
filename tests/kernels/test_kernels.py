"""The CUDA kernels, executed on the CPU by the shim, under sanitizers, and compiled by nvcc."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from andrea_pl.optim.extension import SOURCES, build_extension
from tests.kernels.builds import HERE, build_library, build_sanitized
from tests.kernels.checks import Kernels, all_checks
from tests.kernels.mutants import MUTANTS, verdict

pytestmark = pytest.mark.system

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed: the CUDA toolkit has it")


@pytest.mark.system
def test_against_float64(tmp_path: Path) -> None:
    """Tails, misalignment, guards, NaN, Inf, magnitudes, launches and schedules: see checks.py."""
    results = list(all_checks(Kernels(build_library(tmp_path))))
    assert [name for name, is_right in results if not is_right] == []
    assert len(results) >= 700


@pytest.mark.system
def test_under_sanitizers(tmp_path: Path) -> None:
    """Buffers of exact size: no byte beyond them, no misaligned access, no overflow."""
    done = subprocess.run([build_sanitized(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "72 checks, 0 failed\n"), done.stderr


@pytest.mark.system
def test_checks_notice() -> None:
    """One of the mutants; mutants.py tries them all."""
    assert verdict("no second barrier", *MUTANTS["no second barrier"])


def test_mutants_apply() -> None:
    text = (SOURCES / "clip_kernels.cuh").read_text(encoding="utf-8")
    assert [name for name, (old, _) in MUTANTS.items() if text.count(old) != 1] == []
    assert len(MUTANTS) >= 15


@pytest.mark.system
@needs_nvcc
@pytest.mark.parametrize("architecture", ["80", "90", "100"])
def test_registers_and_stack(architecture: str, tmp_path: Path) -> None:
    """ptxas spills nothing and needs no stack; four blocks of 256 threads have room for their registers."""
    options = ["-std=c++20", "-O3", "-cubin", f"-arch=sm_{architecture}", "-Xptxas=-v"]
    done = subprocess.run(
        [NVCC, *options, f"-I{SOURCES}", HERE / "instances.cu", "-o", tmp_path / "kernels.cubin"],
        capture_output=True,
        text=True,
        check=True,
    )
    entries = re.findall(r"Compiling entry function '(\w+)'", done.stderr)
    assert sorted(re.sub(r".*?\d\d(k_grad_\w+?)(I|E).*", r"\1", each) for each in entries) == [
        "k_grad_norm_final",
        *["k_grad_norm_partial"] * 3,
        *["k_grad_scale"] * 3,
    ]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", done.stderr)
    assert frames == [("0", "0")] * 7
    registers = [int(each) for each in re.findall(r"Used (\d+) registers", done.stderr)]
    assert len(registers) == 7
    assert max(registers) <= 64


@pytest.mark.system
@needs_nvcc
def test_the_binding_compiles() -> None:
    """The operators' CUDA side builds against the headers of any torch, a CPU build included."""
    library = build_extension("sm_90")
    assert library == build_extension("9.0") == build_extension("90")
    symbols = library.read_bytes()
    for kernel in (b"k_grad_norm_partial", b"k_grad_norm_final", b"k_grad_scale"):
        assert kernel in symbols
