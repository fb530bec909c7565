"""Breaks each guarantee in its mechanism, one at a time, and shows that the tests marked with it notice.

    python tests/mutants.py            all of them
    python tests/mutants.py norm lock  those whose guarantee, file or change has one of these
    words

A mutant is a small change of the source in a copy of the tree. A guarantee is a test's marker; see
pyproject.toml.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CALLBACKS = "callbacks/andrea_callbacks"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of the source that breaks a guarantee."""

    guarantee: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "averaged over tokens",
        "andrea_pl/training/accumulation.py",
        "scale = trainer.world_size / divisor(tokens)",
        "scale = trainer.world_size / len(window)",
    ),
    Mutant(
        "averaged over tokens",
        "andrea_pl/training/accumulation.py",
        "return float(max(tokens, 1))",
        "return float(max(tokens, 5))",
    ),
    Mutant(
        "clipped once by one global norm",
        "andrea_pl/optim/clipping.py",
        "coefficient = max_norm / value if math.isfinite(value) and value > max_norm else 1.0",
        "coefficient = 1.0",
    ),
    Mutant(
        "clipped once by one global norm",
        f"{CALLBACKS}/numerics/gradient_norm.py",
        "total = rows[:, 0].sum().sqrt()",
        "total = rows[:, 0].max().sqrt()",
    ),
    Mutant(
        "the norm agrees with float64",
        f"{CALLBACKS}/numerics/gradient_norm.py",
        "    return torch.cat(parts).double() if parts",
        "    return torch.cat(parts).half().double() if parts",
    ),
    Mutant(
        "the norm agrees with float64",
        f"{CALLBACKS}/numerics/gradient_norm.py",
        "    listed = distinct(parameters)\n",
        "    listed = list(parameters)\n",
    ),
    Mutant(
        "a NaN never reaches a weight",
        "andrea_pl/training/verdict.py",
        "    return (~is_good).float()",
        "    return (~is_good).float() * 0",
    ),
    Mutant(
        "a NaN never reaches a weight",
        "andrea_pl/training/module.py",
        "                optimizer.zero_grad(set_to_none=True)\n            self._count",
        "                pass\n            self._count",
    ),
    Mutant(
        "a NaN never reaches a weight",
        "andrea_pl/training/verdict.py",
        "        if self.in_a_row > limit:",
        "        if False:",
    ),
    Mutant(
        "an update without a label changes nothing",
        "andrea_pl/training/verdict.py",
        "    if figures.tokens == 0:",
        "    if figures.tokens < 0:",
    ),
    Mutant(
        "the schedule moves only with the weights",
        "andrea_pl/training/update.py",
        'return self.verdict is None or self.verdict.outcome == "applied"',
        "return True",
    ),
    Mutant(
        "figures of update k are at step k",
        "andrea_pl/training/module.py",
        "self._update = OpenUpdate(self.trainer.global_step + 1,",
        "self._update = OpenUpdate(self.trainer.global_step,",
    ),
    Mutant(
        "figures of update k are at step k",
        f"{CALLBACKS}/hooks/scalars.py",
        "self._write(sorted(self._steps))\n\n    def _write",
        "self._write(list(self._steps))\n\n    def _write",
    ),
    Mutant(
        "figures of update k are at step k",
        "andrea_pl/training/module.py",
        'lr = optimizer.param_groups[0]["lr"]',
        'lr = optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"])',
    ),
    Mutant(
        "checkpoints are verified",
        "andrea_pl/runs/manifest.py",
        "    if not any(each.size == size and each.sha256 == found for each in contents):",
        "    if False:",
    ),
    Mutant(
        "checkpoints are verified",
        "andrea_pl/runs/manifest.py",
        "        fault = fault_of(path)\n        if fault is None:",
        "        fault = None\n        if fault is None:",
    ),
    Mutant(
        "checkpoints are never unpickled",
        "andrea_pl/runs/checkpoint_io.py",
        "mmap=mmap, weights_only=True)",
        "mmap=mmap, weights_only=False)",
    ),
    Mutant(
        "checkpoints are never unpickled",
        "andrea_pl/runs/checkpoint_io.py",
        "        if weights_only is False:\n            raise",
        "        if False:\n            raise",
    ),
    Mutant(
        "no save tears a checkpoint",
        "andrea_pl/runs/checkpoint_io.py",
        "[content, *read_manifest(local)[:KEPT_CONTENTS]]",
        "[content]",
    ),
    Mutant(
        "no save tears a checkpoint",
        "andrea_pl/runs/checkpoint_writer.py",
        "        self._is_saving = True\n        try:",
        "        if self.last_path:\n            trainer.strategy.remove_checkpoint(self.last_path)\n"
        "        self._is_saving = True\n        try:",
    ),
    Mutant(
        "one run a folder",
        f"{CALLBACKS}/numerics/file_lock.py",
        "kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX",
        "kind = fcntl.LOCK_SH",
    ),
    Mutant(
        "a resume is exact",
        f"{CALLBACKS}/numerics/rng_state.py",
        "        torch.set_rng_state(self._torch)\n",
        "        pass\n",
    ),
    Mutant(
        "a resume is exact",
        "andrea_pl/data/windows/window.py",
        '        self.delivered = state["delivered"]\n',
        "        self.delivered = 0\n",
    ),
    Mutant(
        "windows follow from the seed",
        "andrea_pl/data/windows/window.py",
        "np.random.default_rng((self.seed, epoch)).permutation(numbers)",
        "np.random.default_rng().permutation(numbers)",
    ),
    Mutant(
        "windows follow from the seed",
        "andrea_pl/data/mixing/plan.py",
        "np.random.default_rng((seed, zlib.crc32(purpose.encode()), *counters))",
        "np.random.default_rng((0, zlib.crc32(purpose.encode()), *counters))",
    ),
    Mutant(
        "every sequence once an epoch",
        "andrea_pl/data/windows/window.py",
        "order[rank::world_size].tolist()",
        "order[rank:].tolist()",
    ),
    Mutant(
        "every sequence once an epoch",
        "andrea_pl/data/windows/loaders.py",
        "self._share: list[list[int]] = cut[reader.rank :: reader.world_size]",
        "self._share: list[list[int]] = cut[reader.rank + 1 :: reader.world_size]",
    ),
    Mutant(
        "every sequence once an epoch",
        "andrea_pl/data/windows/dataset.py",
        "labels = np.maximum(tokens - 1, 0)",
        "labels = np.maximum(tokens - 2, 0)",
    ),
    Mutant(
        "skipped updates teach the mixture nothing",
        "andrea_pl/data/mixing/curriculum.py",
        "        if teaches and finite:",
        "        if finite:",
    ),
    Mutant(
        "a phase is decided from the lag",
        "andrea_pl/data/mixing/curriculum.py",
        "wanted = max(0, window - self.curriculum.reward_lag)",
        "wanted = max(0, window)",
    ),
    Mutant(
        "watching changes nothing",
        f"{CALLBACKS}/forensics/replay.py",
        "undo.callback(buffer.restore)",
        "undo.callback(lambda: None)",
    ),
    Mutant(
        "old names keep working",
        "andrea_pl/cli/renamed.py",
        '    "model.lr_floor": "min_lr_ratio",\n',
        "",
    ),
]


def copy_tree(place: Path) -> None:
    """Copy what the tests need."""
    for name in ("andrea_pl", "callbacks", "configs", "tests", "benchmarks", "pyproject.toml", "README.md"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, place / name)


def notices(mutant: Mutant, place: Path) -> bool:
    """Run the tests of a guarantee over a mutant; return whether one of them fails."""
    file = place / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.file}: {mutant.old!r} occurs {text.count(mutant.old)} times; mend the mutant"
        )
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        return run(mutant.guarantee, place) == 1
    finally:
        file.write_text(text)


def run(guarantee: str, place: Path) -> int:
    """Run the tests of a guarantee and return pytest's exit code: 0 all passed, 1 one failed."""
    mark = f'guarantee("{guarantee}")'
    files = [str(each) for each in (place / "tests").rglob("test_*.py") if mark in each.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{place}:{place / 'callbacks'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [*command, "--guarantee", guarantee], cwd=place, env=environment, capture_output=True, check=False
    ).returncode


def main(words: list[str]) -> int:
    """Try the mutants and print a line for each; return 1 if one is not noticed."""
    chosen = [each for each in MUTANTS if not words or any(word in repr(each) for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        copy_tree(place)
        unsound = [name for name in dict.fromkeys(each.guarantee for each in chosen) if run(name, place) != 0]
        for name in unsound:
            print(f"FAILS UNCHANGED  {name}")
        missed = 0
        for number, mutant in enumerate(chosen, start=1):
            noticed = notices(mutant, place)
            missed += not noticed
            change = " ".join(mutant.new.split()) or "(removed)"
            print(
                f"{number:2} {'noticed' if noticed else 'MISSED'}  {mutant.guarantee}: {change:.70}",
                flush=True,
            )
    print(f"{len(chosen) - missed} of {len(chosen)} mutants are noticed")
    return 1 if missed or unsound else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
