"""The callbacks on two gloo ranks: all decide alike, name what lies on the other rank, and change nothing."""

from typing import Any

import pytest
import torch

from tests.support.commands import run_script

pytestmark = pytest.mark.system

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Return what each of two ranks saw."""
    return run_script("watched_ranks.py", 2, tmp_path_factory.mktemp("two") / "out")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return what a single process saw."""
    return run_script("watched_ranks.py", 1, tmp_path_factory.mktemp("one") / "out")[0]


def shares(results: Results) -> dict[int, float]:
    (report,) = results["spike"]["reports"].values()
    return {part["identity"]["document"]: part["share"] for part in report["attribution"]["sequences"]}


def test_spike_is_attributed_over_all_ranks(both: list[Results], alone: Results) -> None:
    """The shares are those of a single process, and the first is the sequence that was planted."""
    for results in (*both, alone):
        assert results["spike"]["spikes"] == 1
        assert list(results["spike"]["reports"]) == ["update-000045-spike"]
        found = shares(results)
        assert max(found, key=lambda document: found[document]) == 55
        assert sorted(found) == list(range(50, 58))
        assert sum(found.values()) == pytest.approx(1.0, abs=1e-4)
        report = results["spike"]["reports"]["update-000045-spike"]
        assert report["attribution"]["agreement"] == pytest.approx(1.0, abs=1e-5)
        assert len(report["sequences"]) == 8
        assert {part["identity"]["source"] for part in report["attribution"]["sources"]} == {
            "source 0",
            "source 1",
        }
    assert (
        both[0]["spike"]["reports"]["update-000045-spike"]["attribution"]["sequences"][0]["identity"]["rank"]
        == 1
    )
    for document, share in shares(alone).items():
        assert shares(both[0])[document] == pytest.approx(share, abs=5e-3)


def test_watching_changes_nothing(both: list[Results], alone: Results) -> None:
    for results in (*both, alone):
        assert all(map(torch.equal, results["spike"]["weights"], results["unwatched"]["weights"]))
    assert all(map(torch.equal, both[0]["spike"]["weights"], both[1]["spike"]["weights"]))


def test_origin_on_the_other_rank_is_named(both: list[Results], alone: Results) -> None:
    """Lightning#19106: NaN on rank 1 only: both ranks decide alike and nobody hangs."""
    for results, rank in ((both[0], 1), (both[1], 1), (alone, 0)):
        poisoned = results["poisoned"]
        assert poisoned["outcomes"] == (47, 1)
        assert poisoned["flagged"] == 1
        (origin,) = poisoned["reports"]["update-000045-nonfinite"]["origin"]
        assert origin["rank"] == rank
        assert [each["document"] for each in origin["sequences"]] == [55]


def test_foreign_project_on_two_ranks(both: list[Results], alone: Results) -> None:
    for results in (*both, alone):
        assert results["skip"]["flagged"] == 1
        assert results["skip"]["last_epoch"] == 7
        assert results["raise"]["error"].startswith("update 4: the loss")
        assert [each["row"] for each in results["skip"]["report"]["origin"][0]["sequences"]] == [2]
        assert all(torch.isfinite(each).all() for each in results["skip"]["weights"])
    assert both[0]["skip"]["report"]["origin"][0]["rank"] == 1
    for policy in ("skip", "raise"):
        assert all(map(torch.equal, both[0][policy]["weights"], both[1][policy]["weights"]))


def test_sharded_parameters_are_not_attributed(both: list[Results]) -> None:
    for results in both:
        assert results["fsdp2"]["spikes"] == 1
        report = results["fsdp2"]["reports"]["update-000045-spike"]
        assert "sharded over ranks (FSDP2)" in report["attribution"]["unavailable"]
        assert len(report["sequences"]) == 8
        assert report["norm"] == pytest.approx(
            both[0]["spike"]["reports"]["update-000045-spike"]["norm"], rel=0.05
        )


def test_ranks_that_differ_wait_for_nobody(both: list[Results], alone: Results) -> None:
    """Sources on one rank alone, a replay that fails on the other: all decide alike, and it is said."""
    for results in (*both, alone):
        assert results["lopsided"]["spikes"] == 1
        said = results["lopsided"]["report"]["attribution"]["unavailable"]
        assert "ValueError: this rank cannot" in said
        assert results["lopsided"]["report"]["mixture"] == {"source 0": 1.0} or results is alone
