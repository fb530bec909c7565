"""The wheel and the sdist: complete, and enough to run a fit far from the checkout."""

import ast
import re
import site
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.commands import ROOT

FILES = [
    "andrea_pl/__init__.py",
    "andrea_pl/py.typed",
    "andrea_pl/data/module.py",
    "andrea_pl/network/transformer.py",
    "andrea_pl/optim/schedules.py",
    "andrea_pl/strategies/clip_mixin.py",
    "andrea_pl/csrc/clip_kernels.cuh",
    "andrea_pl/csrc/clip_cpu.cpp",
    "andrea_pl/csrc/clip_tensors.h",
    "andrea_pl/csrc/clip_cuda.cu",
    "andrea_callbacks/__init__.py",
    "andrea_callbacks/py.typed",
]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.system
def test_wheel_and_sdist(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\0")
    names = [name for name in files if name] or [
        str(path.relative_to(ROOT))
        for folder in ("andrea_pl", "callbacks", "configs")
        for path in (ROOT / folder).rglob("*")
    ] + ["pyproject.toml", "README.md", "LICENSE"]
    for name in names:
        if (ROOT / name).is_file() and "__pycache__" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", cwd=source)
    wheel = next((tmp_path / "dist").glob("*.whl"))
    sdist = next((tmp_path / "dist").glob("*.tar.gz"))
    configs = [path.name for path in (ROOT / "configs").glob("*.yaml")]
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.namelist()
    with tarfile.open(sdist) as archive:
        sources = archive.getnames()
    for file in FILES:
        assert file in packed
        assert any(name.endswith(f"/{file}") for name in sources)
    for name in configs:
        assert any(each.endswith(f"share/andrea_pl/configs/{name}") for each in packed)
        assert any(each.endswith(f"/configs/{name}") for each in sources)
    assert not any(name.startswith(("tests/", "callbacks/")) for name in packed)

    environment = tmp_path / "environment"
    venv.create(environment)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    # what it depends on is lent by this environment
    run(*pip, "install", "-q", "--no-deps", "--force-reinstall", wheel, cwd=tmp_path)
    packages = next((environment / "lib").glob("python*/site-packages"))
    (packages / "lent.pth").write_text("\n".join(site.getsitepackages()))
    config = environment / "share" / "andrea_pl" / "configs" / "overfit.yaml"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    strategy = "--trainer.strategy=ClipSingleDeviceStrategy"
    clipper = "--trainer.strategy.clipper=extension"
    said = run(environment / "bin" / "andrea", "fit", "--config", config, strategy, clipper, cwd=elsewhere)
    assert "epoch 60: loss 0.0" in said
    assert list((elsewhere / "runs").rglob("*.ckpt"))


@pytest.mark.system
def test_what_is_imported_is_declared() -> None:
    """Every package that a module imports is a dependency of the wheel, or of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["parquet"]]
    declared = {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in required}
    imported: set[str] = set()
    for folder in ("andrea_pl", "callbacks/andrea_callbacks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported.add(node.module.partition(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"andrea_pl", "andrea_callbacks"}
    assert len(foreign) > 8
    assert {{"yaml": "pyyaml"}.get(each, each) for each in foreign} <= declared
