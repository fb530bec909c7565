"""Building and loading the clip extension: found, missing, broken, and seen by torch.compile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from andrea_pl.optim import Clipper, ExtensionError, build_extension, clipping, extension
from andrea_pl.optim.extension import load_extension
from tests.support.commands import run_python

CPU = torch.device("cpu")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Take away the cache and what was loaded."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(extension, "_loaded", set())
    monkeypatch.setattr(extension, "_is_defined", lambda name: False)
    monkeypatch.setattr(clipping, "_told", set())
    return tmp_path


def executable(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_no_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """`extension` says what to install; `auto` says so once and clips with torch."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(fresh))
    with pytest.raises(ExtensionError, match=r"needs a C\+\+20 compiler: install g\+\+"):
        Clipper("extension").has_extension(CPU)
    caplog.set_level("INFO")
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    for _ in range(3):
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        assert float(Clipper("auto").gradient_norm(optimizer).total) == 5.0
    told = [each.message for each in caplog.records if "clipping with torch" in each.message]
    assert len(told) == 1
    assert "install g++" in told[0]


def test_a_compiler_that_fails(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error is shown, all of them are kept, and nothing half-built is."""
    broken = executable(fresh / "broken", "echo 'clip_cpu.cpp:1: error: no such standard' >&2; exit 3")
    monkeypatch.setenv("CXX", broken)
    with pytest.raises(
        ExtensionError, match=r"broken failed .* error: no such standard \(all of it in "
    ) as error:
        build_extension("cpu")
    log = Path(str(error.value).partition("all of it in ")[2].rstrip(")"))
    assert "no such standard" in log.read_text()
    assert not list(log.parent.glob("*.so"))


def test_no_nvcc(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(fresh / "nowhere"))
    monkeypatch.setattr(extension.shutil, "which", lambda name: None)
    with pytest.raises(ExtensionError, match=r"for sm_90 needs nvcc: install the CUDA toolkit"):
        build_extension("9.0")


@pytest.mark.parametrize("name", ["hopper", "sm_", "90 100", ""])
def test_unknown_architecture(name: str) -> None:
    with pytest.raises(ExtensionError, match=r"is no CUDA architecture; write 90, 9.0 or sm_90"):
        build_extension(name)


def test_other_devices() -> None:
    with pytest.raises(ExtensionError, match="not on mps"):
        load_extension(torch.device("mps"))


def test_a_cache_that_cannot_be_written(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(fresh / "file"))
    with pytest.raises(ExtensionError, match="TORCH_EXTENSIONS_DIR"):
        build_extension("cpu")


def test_a_damaged_library(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = executable(fresh / "odd", 'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"')
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ExtensionError, match=r"does not load \(.*short\); delete it to have it built again"):
        load_extension(CPU)


def test_what_was_built_ahead_needs_no_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built on a machine that has compilers, used on one that has none; CXX may have options."""
    compiler = executable(fresh / "quick", 'while [ "$1" != -o ]; do shift; done; echo > "$2"')
    monkeypatch.setenv("CXX", f"{compiler} -m64")
    monkeypatch.setenv("CUDA_HOME", str(fresh))
    (fresh / "bin").mkdir()
    executable(fresh / "bin" / "nvcc", 'while [ "$1" != -o ]; do shift; done; echo > "$2"')
    built = [build_extension(target) for target in ("cpu", "sm_90")]
    monkeypatch.delenv("CXX")
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(fresh / "nothing"))
    assert [build_extension(target) for target in ("cpu", "90")] == built


TOGETHER = """
import os, sys
from andrea_pl.optim.extension import build_extension

children = []
for _ in range(2):
    child = os.fork()
    if not child:
        print(build_extension("cpu"), flush=True)
        os._exit(0)
    children.append(child)
sys.exit(max(os.waitpid(child, 0)[1] for child in children))
"""


@pytest.mark.system
def test_processes_that_start_together_build_once(fresh: Path) -> None:
    """A lock that ends with its process: no second build, no stale lock."""
    counter = fresh / "built"
    compiler = executable(
        fresh / "slow", f'echo x >> {counter}; sleep 0.5; while [ "$1" != -o ]; do shift; done; echo > "$2"'
    )
    done = run_python(TOGETHER, CXX=compiler)
    assert done.returncode == 0, done.stderr
    outputs = {line for line in done.stdout.splitlines() if line.startswith("/")}
    assert len(outputs) == 1
    assert Path(outputs.pop()).exists()
    assert counter.read_text() == "x\n"


@pytest.mark.system
def test_torch_compile_sees_shapes() -> None:
    """Fake kernels: traced without a graph break, and exported shapes are right."""
    load_extension(CPU)

    def clipped(gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
        rows = torch.ops.andrea_clip.squared_norms(gradients)
        figures, controls = torch.ops.andrea_clip.clip_figures(rows, 1.0)
        torch.ops.andrea_clip.scale_(gradients, figures[1])
        return rows, controls

    compiled: Any = torch.compile(clipped, backend="aot_eager", fullgraph=True)
    gradients = [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
    rows, controls = compiled(gradients)
    assert rows.tolist() == [[9.0, 0.0], [16.0, 0.0]]
    assert controls.tolist() == [5.0, 0.0]
    assert gradients[1].tolist() == pytest.approx([0.0, 0.8])
    torch.library.opcheck(torch.ops.andrea_clip.squared_norms.default, ([torch.ones(3)],))
    torch.library.opcheck(torch.ops.andrea_clip.clip_figures.default, (rows, 1.0))
    torch.library.opcheck(
        torch.ops.andrea_clip.scale_.default, ([torch.ones(3)], torch.tensor(0.5, dtype=torch.float64))
    )


def test_wrong_input_is_refused() -> None:
    load_extension(CPU)
    operators = torch.ops.andrea_clip
    with pytest.raises(RuntimeError, match="no tensor"):
        operators.squared_norms([])
    with pytest.raises(RuntimeError, match="mixed dtypes"):
        operators.squared_norms([torch.ones(1), torch.ones(1, dtype=torch.bfloat16)])
    with pytest.raises(RuntimeError, match="must be float32, bfloat16 or float16"):
        operators.squared_norms([torch.ones(1, dtype=torch.float64)])
    with pytest.raises(RuntimeError, match="gaps or overlaps"):
        operators.squared_norms([torch.arange(8.0)[::2]])
    with pytest.raises(RuntimeError, match="gaps or overlaps"):
        operators.scale_([torch.ones(1).expand(3)], torch.tensor(0.5, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="an empty tensor"):
        operators.squared_norms([torch.ones(0)])
    turned = torch.arange(6.0).view(2, 3).t()
    assert operators.squared_norms([turned]).tolist() == [[55.0, 0.0]]
    with pytest.raises(RuntimeError, match="one float64"):
        operators.scale_([torch.ones(1)], torch.tensor(0.5))
