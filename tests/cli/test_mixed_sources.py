"""The command with several sources: a whole run under a bandit, its resume, and what is refused."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from andrea_callbacks import read_journal
from tests.support.commands import andrea
from tests.support.configurations import CONFIGS, TINY, log_folder, scalars

pytestmark = pytest.mark.system

NAMES = ("prose", "lists", "answers")
CURRICULUM = {
    "mixture": {"class_path": "andrea_pl.Ucb1", "init_args": {"reward_scale": 1000}},
    "warmup_updates": 5,
    "warmup_sources": ["prose", "answers"],
    "phases": [3, 4],
    "updates_per_epoch": 12,
}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Return a configuration over three sources of short documents."""
    texts = {
        "prose": [
            f"Chapter {n} tells of {n * 17 % 23} men and of the {n} seas they sailed. " * 3 for n in range(50)
        ],
        "lists": [f"- item {n}\n- item {n + 1}\n- item {n + 2}\n" * 4 for n in range(50)],
        "answers": [f"Question: what is {n}?\nAnswer: the number after {n - 1}." for n in range(50)],
    }
    for name, documents in texts.items():
        rows = [json.dumps({"text": text}) for text in documents]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    config = yaml.safe_load(TINY.format(path="x"))
    config["data"]["sources"] = [
        {"name": name, "paths": [str(tmp_path / f"{name}.jsonl")], "min_weight": 0.1} for name in NAMES
    ]
    config["data"]["curriculum"] = CURRICULUM
    config["trainer"] |= {
        "max_steps": 24,
        "val_check_interval": 12,
        "callbacks": [{"class_path": "andrea_callbacks.RunJournal"}],
    }
    path = tmp_path / "mixed.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_fit_under_a_bandit(mixed: Path) -> None:
    """Curves, validation and phases of every source; the run is evaluated and resumed."""
    result = andrea("fit", "--config", str(mixed))
    assert result.returncode == 0, result.stderr
    folder = log_folder(result)
    found = scalars(folder)
    for name in NAMES:
        for figure in ("weight", "tokens", "epochs"):
            assert [step for step, _ in found[f"data/{name}/{figure}"]] == list(range(1, 25))
        assert found[f"data/{name}/loss"]
        assert [step for step, _ in found[f"val/{name}/loss"]] == [12, 24]
        assert found[f"val/{name}/bits_per_byte"]
        assert f"  {name}: loss " in result.stderr
    assert found["data/lists/reward"][0][0] > 5
    assert {weight for step, weight in found["data/lists/weight"] if step <= 5} == {0.0}
    phases = [row for row in read_journal(folder / "journal.jsonl") if row["kind"] == "phase"]
    starts = [row["update"] for row in phases]
    assert 6 in starts
    assert {after - before for before, after in pairwise(starts)} <= {1, 2, 3, 4}
    checkpoint = next((folder / "checkpoints").glob("*-000024.ckpt"))
    saved = str(folder / "config.yaml")
    evaluated = andrea("validate", "--config", str(mixed), "--ckpt_path", str(checkpoint))
    assert evaluated.returncode == 0, evaluated.stderr
    assert "val/answers/loss" in evaluated.stdout
    drift = ["--trainer.max_steps", "30", "--allow_drift", "trainer.max_steps"]
    resumed = andrea("fit", "--config", saved, "--ckpt_path", str(checkpoint), *drift)
    assert resumed.returncode == 0, resumed.stderr
    longer = scalars(log_folder(resumed))
    assert longer["data/phase"][0] == (25, pytest.approx(found["data/phase"][-1][1], abs=1))
    assert longer["data/prose/epochs"][0][1] >= found["data/prose/epochs"][-1][1]
    scaled = ("fit", "--config", saved, "--ckpt_path", str(checkpoint), "--allow_drift", "data")
    changed = andrea(*scaled, "--data.curriculum.reward_lag", "3")
    assert changed.returncode == 1
    assert "comes from {'reward_lag': 7}, this run's from {'reward_lag': 3}: " in changed.stderr
    changed = andrea(*scaled, "--data.curriculum.mixture.reward_scale", "3")
    assert (
        "comes from {'mixture.reward_scale': 1000.0}, this run's from {'mixture.reward_scale': 3.0}"
        in changed.stderr
    )


ERRORS: dict[str, tuple[list[str], int, str]] = {
    "no such mixture": (["--data.curriculum.mixture", "Ucb2"], 2, "Ucb2"),
    "mistyped option": (["--data.curriculum.mixture.exploraton", "1"], 2, "exploraton"),
    "bad option": (
        ["--data.curriculum.mixture.alpha", "2"],
        1,
        "error: Ucb1: alpha must lie from 0 to 1, got 2",
    ),
    "mistyped key": (["--data.curriculum.warmup_update", "3"], 2, "warmup_update"),
    "unknown source": (
        ["--data.curriculum.warmup_sources", "[prose, poems]"],
        1,
        "data.curriculum.warmup_sources names 'poems', and the sources are prose, lists, answers",
    ),
    "too far ahead": (
        ["--data.num_workers", "2", "--data.prefetch_factor", "4"],
        1,
        "data.curriculum.reward_lag is 7: raise it to 9",
    ),
    "bad phase": (["--data.curriculum.phases", "[0]"], 1, "data.curriculum.phases must be whole lengths"),
    "foreign class": (["--data.curriculum.mixture", "os.path.Mixture"], 2, "--trust_imports"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_can_be_acted_on(mixed: Path, case: str) -> None:
    options, code, words = ERRORS[case]
    result = andrea("fit", "--config", str(mixed), *options)
    assert result.returncode == code, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert "NoneType" not in result.stderr
    assert "NestedArg" not in result.stderr


def test_a_later_file_replaces_sources_and_mixture(mixed: Path) -> None:
    """Lists as long as those before are not mixed item by item, nor are options of another class kept."""
    Path("over.yaml").write_text(
        yaml.safe_dump(
            {
                "data": {
                    "sources": [{"name": name, "paths": [f"{name}.jsonl"]} for name in reversed(NAMES)],
                    "curriculum": {"mixture": {"class_path": "andrea_pl.Exp3"}},
                }
            }
        )
    )
    given = ["fit", "--config", str(mixed), "--config", "over.yaml", "--print_config"]
    config = yaml.safe_load(andrea(*given).stdout)
    assert [source["name"] for source in config["data"]["sources"]] == list(reversed(NAMES))
    assert {source["min_weight"] for source in config["data"]["sources"]} == {0.0}
    mixture = config["data"]["curriculum"]["mixture"]
    assert mixture["class_path"].endswith("Exp3")
    assert mixture["init_args"]["reward_scale"] == 1.0
    assert config["data"]["curriculum"]["warmup_updates"] == 5, "what the later file does not name stays"
    local = ["fit", "--config", str(CONFIGS / "local.yaml"), "--config", "over.yaml", "--print_config"]
    sources = yaml.safe_load(andrea(*local).stdout)["data"]["sources"]
    assert {source["kind"] for source in sources} == {"files"}
    flags = ["--data.curriculum.mixture", "Exp3", "--data.curriculum.mixture.alpha", "0.2"]
    mixture = yaml.safe_load(andrea(*given[:3], *flags, "--print_config").stdout)["data"]["curriculum"][
        "mixture"
    ]
    assert mixture["init_args"]["reward_scale"] == 1.0
    assert mixture["init_args"]["alpha"] == 0.2


def test_a_mixture_of_the_user_s_own_by_class_path(mixed: Path) -> None:
    Path("mine.py").write_text(
        "import numpy as np\n\nfrom andrea_pl import Mixture\n\n\nclass Last(Mixture):\n"
        "    def __init__(self, share: float = 0.5) -> None:\n        self.share = share\n\n"
        "    def weights(self, allowed=None):\n"
        "        rest = (1 - self.share) / (len(self.arms) - 1)\n"
        "        return np.array([rest] * (len(self.arms) - 1) + [self.share]) * "
        "(1 if allowed is None else np.array(allowed))\n"
    )
    config = yaml.safe_load(mixed.read_text())
    config["data"]["curriculum"] = {"mixture": {"class_path": "mine.Last", "init_args": {"share": 0.8}}}
    mixed.write_text(yaml.safe_dump(config))
    result = andrea("fit", "--config", str(mixed), "--trust_imports", "mine", PYTHONPATH=str(Path.cwd()))
    assert result.returncode == 0, result.stderr
    assert {round(weight, 6) for _, weight in scalars(log_folder(result))["data/answers/weight"]} == {0.8}
