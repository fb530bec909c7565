"""Compiles the kernels for a CPU: a library for `checks.py`, and a program under the sanitizers."""

import subprocess
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "andrea_pl" / "csrc"
COMPILE = ["g++", "-std=c++20", "-O1"]
WARN = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
SANITIZE = ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def build_library(folder: Path, sources: Path = SOURCES) -> Path:
    """Return the library made of harness.cpp and the kernels in `sources`."""
    return _compile("harness.cpp", folder / "kernels.so", sources, ["-shared", "-fPIC"])


def build_sanitized(folder: Path, sources: Path = SOURCES) -> Path:
    """Return the program made of sanitized.cpp and the kernels in `sources`."""
    return _compile("sanitized.cpp", folder / "sanitized", sources, SANITIZE)


def _compile(source: str, output: Path, sources: Path, options: list[str]) -> Path:
    warnings = WARN if sources == SOURCES else ["-w"]
    command = [*COMPILE, *warnings, *options, f"-I{sources}", str(HERE / source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{source} does not compile:\n{done.stderr}")
    return output
