"""Fixtures of all tests."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

collect_ignore = [  # run in processes of their own
    "system/commands.py",
    "system/two_ranks.py",
    "system/unequal_ranks.py",
    "system/watched_ranks.py",
    "system/steady_memory.py",
    "system/killed.py",
    "system/terminals.py",
    "kernels/builds.py",
    "kernels/checks.py",
    "kernels/mutants.py",
]

# built once for all tests and processes, in the checkout
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(__file__).parents[1] / "build" / "torch_extensions"))

settings.register_profile(
    "andrea", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("andrea")


LENGTHS = {"system": 0, "kernels": 1, "data": 2, "callbacks": 2, "tests": 2, "strategies": 3, "optim": 4}
"""Folders in the order of how long their files take; all others, and doctests, take less."""


def pytest_configure(config: pytest.Config) -> None:
    """Take signals that a background job or nohup ignores, and keep the order below.

    The commands under test inherit what is ignored, and leave it ignored. xdist would start the files with
    few tests last, and those take longest.
    """
    for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
        signum = getattr(signal, name, None)
        if signum is not None and signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, handler)
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, so that workers, which take a file at a time, end together."""
    items.sort(key=lambda item: LENGTHS.get(item.path.parent.name, 5))


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Give every test a seed, shown when it fails, a folder to work in, and a cache of its own."""
    seed = int(os.environ.get("ANDREA_TEST_SEED", "20240611"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    print(f"seed: ANDREA_TEST_SEED={seed}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return seed
