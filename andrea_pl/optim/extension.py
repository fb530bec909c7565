"""The clip extension: compiles `csrc/` once with the machine's compilers, into torch's extension cache.

There are two libraries on LibTorch's stable ABI. One defines the operators and runs them on CPUs; it needs
only a C++ compiler and seconds. The other runs them on one CUDA architecture, and also needs nvcc.
"""

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from andrea_callbacks.numerics.file_lock import lock
from andrea_pl.errors import UserError
from andrea_pl.optim.ownership import PlantedError, refuse_others

SOURCES = Path(__file__).parents[1] / "csrc"
COMPILERS = ("c++", "g++", "clang++")
STABLE_ABI = "0x020a000000000000"
"""The stable ABI of torch 2.10, which later versions of torch support."""

_loaded: set[str] = set()


class ExtensionError(UserError):
    """The clip extension cannot be built or loaded here; the message says what is missing."""


def load_extension(device: torch.device) -> None:
    """Make the operators `torch.ops.andrea_clip` available on a device; build them if necessary.

    Args:
        device: A CPU or a CUDA device.

    Raises:
        ExtensionError: If a compiler is missing or fails, or the operators do not run.
    """
    if device.type not in ("cpu", "cuda"):
        raise ExtensionError(f"the clip extension runs on CPUs and CUDA devices, not on {device.type}")
    _load_once("cpu", lambda: build_extension("cpu"))
    if device.type == "cuda":
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        _load_once(architecture, lambda: build_extension(architecture))
    try:
        rows = torch.ops.andrea_clip.squared_norms([torch.tensor([3.0, 4.0], device=device)]).tolist()
    except RuntimeError as error:
        raise ExtensionError(f"the clip extension does not run on {device}: {error}") from error
    if rows != [[25.0, 0.0]]:
        raise ExtensionError(f"the clip extension gives wrong sums on {device}: {rows} for [3, 4]")


def build_extension(target: str) -> Path:
    """Compile the library of a target, unless it is in the cache.

    Args:
        target: `cpu`, or a CUDA architecture: `sm_90`, `90` or `9.0`.

    Returns:
        The library's path.

    Raises:
        ExtensionError: If the target is unknown, or the compiler is missing or fails.
    """
    target = canonical_target(target)
    if platform.system() == "Windows":
        raise ExtensionError("the clip extension is not built on Windows; use WSL, or clipper: torch")
    folder = _cache()
    try:
        folder /= f"andrea_clip_{_fingerprint(target)}"
        library = folder / f"andrea_clip_{target}.so"
        if library.exists():  # whatever compilers there are
            refuse_planted(library)
            return library
        command = [*_compiler(target), *_options(target)]
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)  # also where the umask is 0
        refuse_planted(folder)
        with _locked(folder / f"{target}.lock"):
            if not library.exists():
                _compile(command, library, target)
        refuse_planted(library)
    except OSError as error:
        raise ExtensionError(
            f"the clip extension cannot be kept in {folder}: {error.strerror or error}; the environment "
            "variable TORCH_EXTENSIONS_DIR names another folder"
        ) from error
    return library


def refuse_planted(path: Path) -> None:
    """Refuse a library that another user could have written.

    Raises:
        ExtensionError: If it, or a folder above it, belongs to another user or can be written by others.
    """
    try:
        refuse_others(path)
    except PlantedError as error:
        raise ExtensionError(
            f"{error}; remove it, or have the environment variable TORCH_EXTENSIONS_DIR name a folder of "
            "your own"
        ) from error


def _compile(command: Sequence[str], library: Path, target: str) -> None:
    """Run the compiler, and rename the library to its final name when it is complete."""
    compiler = Path(command[0]).name
    rank_zero_info(f"building the clip extension for {target} with {compiler}, once …")
    start = time.monotonic()
    unfinished = library.with_suffix(f".{os.getpid()}.so")
    done = subprocess.run(  # noqa: S603  # the command is ours
        [*command, "-o", str(unfinished)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        unfinished.unlink(missing_ok=True)
        log = library.with_suffix(".log")
        log.write_text(f"{' '.join(command)}\n{done.stdout}{done.stderr}", encoding="utf-8")
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()] or lines[-1:]
        raise ExtensionError(
            f"{compiler} failed on the clip extension for {target}: "
            f"{errors[0] if errors else f'exit code {done.returncode}'} (all of it in {log})"
        )
    unfinished.chmod(0o755)
    unfinished.replace(library)
    rank_zero_info(f"built in {time.monotonic() - start:.0f} s, kept in {library.parent}")


def _load_once(name: str, build: Callable[[], Path]) -> None:
    if name in _loaded or _is_defined(name):
        return
    library = build()
    try:
        torch.ops.load_library(library)
    except OSError as error:
        reason = error.__cause__ or error
        raise ExtensionError(
            f"{library} does not load ({reason}); delete it to have it built again"
        ) from error
    if name == "cpu":
        _register_fakes()
    _loaded.add(name)


def _is_defined(name: str) -> bool:
    """Return whether another library has defined the operators; defining them twice is fatal."""
    return name == "cpu" and hasattr(torch.ops.andrea_clip, "squared_norms")


def _register_fakes() -> None:
    """Register the shapes of the operators' results for torch.compile."""

    def squared_norms(gradients: list[Tensor]) -> Tensor:
        return gradients[0].new_empty((len(gradients), 2), dtype=torch.float64)

    def clip_figures(rows: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
        del max_norm
        return rows.new_empty(2), rows.new_empty(2, dtype=torch.float32)

    def scale_(gradients: list[Tensor], coefficient: Tensor) -> None:
        del gradients, coefficient

    for fake in (squared_norms, clip_figures, scale_):
        torch.library.register_fake(f"andrea_clip::{fake.__name__}", fake)


def canonical_target(target: str) -> str:
    """Return `cpu`, or an architecture in nvcc's notation, such as sm_90 for 9.0 and 90.

    Raises:
        ExtensionError: If the target is neither.
    """
    if target == "cpu":
        return target
    matched = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)", target)
    if matched is None:
        raise ExtensionError(f"{target!r} is no CUDA architecture; write 90, 9.0 or sm_90")
    return "sm_{}{}".format(*matched.groups())


def _options(target: str) -> list[str]:
    """Return the compiler's options, except the output."""
    torch_folder = Path(torch.__file__).parent
    shared = [
        "-O3",
        "-shared",
        f"-DTORCH_TARGET_VERSION={STABLE_ABI}",
        "-DTORCH_STABLE_ONLY",
        f"-I{torch_folder / 'include'}",
        f"-L{torch_folder / 'lib'}",
        "-ltorch_cpu",
    ]
    if target == "cpu":
        return ["-std=gnu++20", "-fPIC", str(SOURCES / "clip_cpu.cpp"), *shared]
    number = target.removeprefix("sm_")
    return [
        "-std=c++20",
        "-Xcompiler=-fPIC",
        "-DUSE_CUDA",
        f"-gencode=arch=compute_{number},code=sm_{number}",
        str(SOURCES / "clip_cuda.cu"),
        *shared,
        # absent from a CPU build of torch, for which one may build as well
        *(["-ltorch_cuda"] if (torch_folder / "lib" / "libtorch_cuda.so").exists() else []),
    ]


def _compiler(target: str) -> list[str]:
    compiler = _cxx() if target == "cpu" else _nvcc()
    if shutil.which(compiler[0]) is None:
        missing = f"{compiler[0]} is not found; " if compiler[0] not in (*COMPILERS, "nvcc") else ""
        raise ExtensionError(missing + _what_to_install(target))
    return compiler


def _cxx() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    return named or [next((each for each in COMPILERS if shutil.which(each)), COMPILERS[0])]


def _nvcc() -> list[str]:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [*(str(Path(home) / "bin" / "nvcc") for home in homes), "nvcc", "/usr/local/cuda/bin/nvcc"]
    return [next((each for each in places if shutil.which(each)), "nvcc")]


def _what_to_install(target: str) -> str:
    if target == "cpu":
        return (
            "the clip extension needs a C++20 compiler: install g++ 12 or later, or name one in the variable "
            "CXX; clipper: torch works without"
        )
    return (
        f"the clip extension for {target} needs nvcc: install the CUDA toolkit of version "
        f"{torch.version.cuda or '12 or 13'} and have nvcc on PATH, or name its folder in the variable "
        "CUDA_HOME; clipper: torch works without"
    )


def _cache() -> Path:
    """Return torch's folder of extensions."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return _home_expanded(named)
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        return (_home_expanded(caches) if caches else Path.home() / ".cache") / "torch_extensions"
    except RuntimeError as error:
        raise _without_home() from error


def _home_expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise _without_home() from error


def _without_home() -> ExtensionError:
    return ExtensionError(
        "the clip extension has no place to be kept: no home folder is known; set HOME, or have the "
        "environment variable TORCH_EXTENSIONS_DIR name a folder"
    )


def _fingerprint(target: str) -> str:
    """Return a hash of sources, options, torch and kind of machine, but not of the compiler's path."""
    options = [each for each in _options(target) if not each.startswith(("-I", "-L", "/"))]
    digest = hashlib.sha256(repr((options, torch.__version__, platform.machine())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold a lock so that only one process builds, if the file system has locks."""
    with path.open("w") as file:
        lock(file.fileno(), wait=True)
        yield
