"""Fixtures of all tests."""

import gc
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, settings

from andrea_callbacks.numerics.host_transfer import late_reading
from tests.support.configurations import TINY

collect_ignore = ["support", "kernels/builds.py", "kernels/checks.py", "kernels/mutants.py", "mutants.py"]

# built once for all tests and processes, in the checkout
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(__file__).parents[1] / "build" / "torch_extensions"))

settings.register_profile(
    "andrea", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("andrea")


LONGEST_FIRST = ("cli", "runs", "", "kernels", "callbacks", "data", "training", "strategies")
"""Folders of tests in the order of how long their files take, "" for those in none; all others take less."""


def take_signals() -> None:
    """Take signals that a background job or nohup ignores, and Lightning after a fit that Ctrl-C ended.

    The commands under test inherit what is ignored, and leave it ignored.
    """
    for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
        signum = getattr(signal, name, None)
        if signum is not None and signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, handler)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the order below; xdist would start the files with few tests last, and those take longest."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add a way to run the tests of one guarantee alone."""
    parser.addoption("--guarantee", help="run only the tests that are marked with this guarantee")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run long files first, so that workers, which take a file at a time, end together."""
    wanted = config.getoption("--guarantee")
    if wanted is not None:
        items[:] = [
            item for item in items if any(wanted in mark.args for mark in item.iter_markers("guarantee"))
        ]
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(_room(item.nodeid), len(order)))


def pytest_collection_finish() -> None:
    """Exempt what is imported by now from garbage collection, which takes a fifth of the time otherwise."""
    gc.collect()
    gc.freeze()


def _room(node: str) -> str | None:
    """Return the folder of a test below tests/, None for a doctest."""
    top, *folders, _ = node.partition("::")[0].split("/")
    return None if top != "tests" else next(iter(folders), "")


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Give every test a seed, shown when it fails, a folder to work in, a cache of its own, and signals."""
    take_signals()
    seed = int(os.environ.get("ANDREA_TEST_SEED", "20240611"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    print(f"seed: ANDREA_TEST_SEED={seed}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return seed


@pytest.fixture
def read_late() -> Iterator[Callable[..., None]]:
    """Have the CPU taken for an accelerator, whose numbers arrive later: call it, with False to stop."""
    with ExitStack() as stack:
        yield lambda is_late=True: stack.enter_context(late_reading(is_late))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Return a configuration over 60 short documents."""
    lines = [json.dumps({"text": f"line {n} says {n * n} and {n + 1} again. " * 4}) for n in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.format(path=tmp_path / "text.jsonl"))
    return path


@pytest.fixture
def saving(tiny: Path) -> list[str]:
    """Return the command of a run that saves every two updates, of which validation comes at two."""
    config: dict[str, Any] = yaml.safe_load(tiny.read_text())
    config["trainer"]["callbacks"] = [
        {"class_path": "andrea_callbacks.RunJournal"},
        {
            "class_path": "andrea_pl.DurableCheckpoint",
            "init_args": {"every": 2, "monitor": "val/loss", "keep": 3},
        },
    ]
    tiny.write_text(yaml.safe_dump(config))
    return ["fit", "--config", str(tiny)]
