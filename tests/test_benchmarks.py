"""The parts of benchmarks that compute something: figures of the story, texts of the corpora."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import corpora
import story
from tests.support.commands import ROOT


def run(**changes: Any) -> story.Run:
    """Return a run of 130 updates in phases of ten, whose norms double in the first three updates of each."""
    since = [update % 10 for update in range(130)]
    fields: dict[str, Any] = {
        "recipe": "v1",
        "seed": 0,
        "norms": [2.0 if age < 3 else 1.0 for age in since],
        "since_switch": since,
        "tokens": [100 * (update + 1) for update in range(130)],
        "shares": {"novels": 0.5, "documentation": 0.3, "questions": 0.2},
        "validations": [
            (50, dict.fromkeys(("all", *story.SOURCES), 4.0)),
            (100, dict.fromkeys(("all", *story.SOURCES), 3.0)),
        ],
        "coherence": [(100, 60.0)],
        "is_clipped": False,
        "shifts": [0.1, 0.3],
    }
    return story.Run(**(fields | changes))


def test_figures_of_a_run() -> None:
    around, inside = run().settled_norms
    assert (len(around), len(inside)) == (9, 21)
    assert story.norms_of_age(run(), 0) == [2.0, 2.0, 2.0]
    assert run().loss_at("novels", 7500) == pytest.approx(3.5), "halfway between two validations"
    assert story.share_over(run()) == pytest.approx(0.3)


def test_a_spike_lives_longer_without_the_clip() -> None:
    """Norm 36 among ones: 36 / (36 + 0.9 / (1 - 0.9)) = 0.8 of the moment, under a tenth after 33 updates.

    After k updates the spike is 36 * 0.9^k, and the others 10 - 0.9^k as if they had always been there: less
    than a tenth from 0.9^k < 10 / (9 * 36 + 1), k = 33.05, on. Clipped to 1 it is one of ten.
    """
    norms = [1.0] * 300
    norms[150] = 36.0
    assert story.spikes_of(norms) == [150]
    (free,), (clipped,) = (run(norms=norms, is_clipped=bound).lives for bound in (False, True))
    assert free[0] == pytest.approx(36 / 45)
    assert free[10] == pytest.approx(36 * 0.9**10 / (36 * 0.9**10 + 10 - 0.9**10))
    assert clipped[0] == pytest.approx(0.1)
    assert story.updates_until_gone([run(norms=norms)]) == [34]
    assert story.updates_until_gone([run(norms=norms, is_clipped=True)])[0] <= 1
    assert story.spikes_of([9.0, 8.0, *[1.0] * 100]) == [0], "the largest of a group alone"


def test_table(tmp_path: Path) -> None:
    table = story.write_table([run(), run(seed=1, norms=[1.0] * 130)], tmp_path / "table.md")
    row = next(line for line in table.splitlines() if line.startswith("| v1 |")).split(" | ")
    assert row[1] == "20%"
    assert row[2] == "1.50 [1.00, 2.00]"
    assert row[4] == "15% [0%, 30%]"
    assert "after 13,000 label tokens" in table


def test_every_recipe_is_v1_or_v2_with_one_change() -> None:
    changed = [set(changes) for config, changes in story.RECIPES.values() if changes]
    assert len(changed) == 5
    assert {name.rpartition(".")[0] for names in changed for name in names} == {"model", "data.curriculum"}
    command = story.Job(recipe="v1 + clip", seed=1, folder=Path("f")).command(50)
    assert "--model.max_norm=1.0" in command
    assert "--trainer.max_steps=50" in command


def test_a_run_by_another_command_is_made_again(tmp_path: Path) -> None:
    job = story.Job(recipe="v1", seed=0, folder=tmp_path)
    job.log.mkdir()
    (job.log / "done.json").write_text(json.dumps({"mark": job.mark(50), "seconds": 1.0}))
    assert job.is_done(50)
    assert job.train(50) == "kept"
    assert not job.is_done(60)
    assert not story.Job(recipe="v1", seed=1, folder=tmp_path).is_done(50)


def test_synsets(tmp_path: Path) -> None:
    """Words of a synset are asked for together; the licence at the head is no synset."""
    file = tmp_path / "data.adj"
    file.write_text(
        "  1 This software and database is being provided\n"
        '00001740 00 a 02 able 0 well_done(p) 1 005 = 05200169 n 0000 | having the means; "able to swim"  \n'
    )
    assert list(corpora._synsets(file, corpora.WORDNET_QUESTIONS["adj"])) == [
        {
            "question": "What does the adjective able or well done mean?",
            "answer": 'having the means; "able to swim"',
        }
    ]


def test_usage_of_the_script() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "corpora.sh"), "--fore"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "unknown option --fore; usage: bash benchmarks/corpora.sh [--force] [FOLDER]" in done.stderr
