"""Two gloo processes: what cases.md asks of ranks, and what one rank gives."""

import pytest
import torch

from tests.support.commands import RankResults as Results
from tests.support.commands import run_script

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Return what each of two ranks saw."""
    return run_script("two_ranks.py", 2, tmp_path_factory.mktemp("two") / "out")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return what a single process saw of the scenarios that it can run."""
    return run_script("two_ranks.py", 1, tmp_path_factory.mktemp("one") / "out")[0]


def test_ranks_are_weighted_by_tokens(both: list[Results]) -> None:
    """transformers#34242, fairseq#494, torchtitan#2206: A on one rank, B on the other."""
    for results in both:
        assert results["one each"]["gradients"][0].tolist() == pytest.approx([0.25, -0.25])
        assert results["one each"]["norms"][0] == pytest.approx(0.353553, abs=1e-6)
        assert results["one each"]["losses"][0] == pytest.approx(0.693147, abs=1e-6)


def test_uneven_windows(both: list[Results]) -> None:
    """torchtitan#2206: ranks with (1, 3) and (2, 0) tokens divide by 6."""
    for results in both:
        assert results["uneven"]["gradients"][0].tolist() == pytest.approx([1 / 6, -1 / 6])


def test_a_rank_without_a_label(both: list[Results]) -> None:
    for results in both:
        assert results["ignored"]["gradients"][0].tolist() == pytest.approx([-0.5, 0.5])


def test_all_ranks_agree_on_empty(both: list[Results]) -> None:
    """mlx-lm#1413: no rank hangs or steps."""
    for results in both:
        assert results["empty"]["outcomes"] == ["empty", "applied"]
        assert torch.equal(results["empty"]["weights"][0], torch.zeros(2))


def test_nan_on_one_rank_alone(both: list[Results]) -> None:
    """Lightning#19106: both ranks decide alike, skipping or raising, and nobody hangs."""
    for results in both:
        assert results["nan skip"]["outcomes"] == ["nonfinite_skip", "applied"]
        assert torch.equal(results["nan skip"]["weights"][0], torch.zeros(2))
        assert results["nan raise"]["error"].startswith("update 2: the loss of ")
        assert torch.equal(results["nan raise"]["final"], results["nan raise"]["weights"][0])
    assert "another rank's micro-batch" in both[0]["nan raise"]["error"]
    assert "micro-batch 1 of 1 (nan)" in both[1]["nan raise"]["error"]


def test_one_reduction_an_update(both: list[Results]) -> None:
    """Lightning#4092, #2595: windows of four micro-batches exchange gradients once."""
    for results in both:
        assert len(results["many"]["weights"]) == 2
        assert results["many"]["reductions"] == 2


def test_weights_stay_equal(both: list[Results]) -> None:
    """Lightning#9237: after every update."""
    for name in ("one each", "many", "language", "sharded loader"):
        for one, two in zip(both[0][name]["weights"], both[1][name]["weights"], strict=True):
            assert torch.equal(one, two)


def test_one_rank_logs(both: list[Results]) -> None:
    assert both[0]["one each"]["rows"] == [1, 2, 3]


def test_windows_are_shared_out(both: list[Results], alone: Results) -> None:
    """The sequences of each window are disjoint and together those of one rank."""
    windows = zip(both[0]["language"]["windows"], both[1]["language"]["windows"], strict=True)
    for (one, two), whole in zip(windows, alone["language"]["windows"], strict=True):
        assert not set(one) & set(two)
        assert sorted(one + two) == sorted(whole)
        assert len(set(whole)) == len(whole)


def test_a_bandit_decides_alike(both: list[Results], alone: Results) -> None:
    """Weights and losses by source are bitwise those of the other rank, windows those of one rank."""
    one, two, whole = (results["bandit"] for results in (*both, alone))
    assert one["figures"] == two["figures"]
    for mine, yours, all_of_them in zip(one["windows"], two["windows"], whole["windows"], strict=True):
        assert not set(mine) & set(yours)
        assert sorted(mine + yours) == sorted(all_of_them)
    assert len({weights for _, _, weights in one["figures"]}) > 4, "phases differ"
    for (losses, tokens, weights), (there, counted, given) in zip(
        one["figures"], whole["figures"], strict=True
    ):
        assert tokens == counted
        assert weights == pytest.approx(given, rel=1e-6)
        assert losses == pytest.approx(there, rel=1e-9)


def test_resume_is_exact_on_two_ranks(both: list[Results], alone: Results) -> None:
    """A signal to one rank stops both after the same update, also in a validation, and a metric that differs
    between them parts nobody; each gets its own random state back."""
    for results in (*both, alone):
        found = results["resumed"]
        assert found["stops"] == [(143, 10), (143, 15)]
        straight, rest = found["weights"]
        assert all(torch.equal(here, there) for here, there in zip(straight, rest, strict=True))
    states = both[0]["resumed"]["random"]
    assert len(states) == 2
    assert not torch.equal(states[0]["torch"], states[1]["torch"])
    assert len(alone["resumed"]["random"]) == 1


def test_same_run_as_one_rank(both: list[Results], alone: Results) -> None:
    """Norms, tokens and weights after every update are those of one rank; validation to 1e-9."""
    for results in both:
        assert results["language"]["tokens"] == alone["language"]["tokens"]
        assert results["language"]["norms"] == pytest.approx(alone["language"]["norms"], rel=1e-9)
        pairs = zip(results["language"]["weights"], alone["language"]["weights"], strict=True)
        assert max(float((here - there).norm() / there.norm()) for here, there in pairs) < 1e-10
        assert results["language"]["validation"] == pytest.approx(
            alone["language"]["validation"], rel=1e-9, abs=0
        )


def test_window_loader_over_a_sharded_loader(both: list[Results], alone: Results) -> None:
    for results in both:
        assert results["sharded loader"]["tokens"] == [4, 4]
        assert "not sharded" in results["sharded loader"]["refusal"]
        for here, there in zip(
            results["sharded loader"]["weights"], alone["sharded loader"]["weights"], strict=True
        ):
            torch.testing.assert_close(here, there)


CLIPPED = [
    "ddp sgd",
    "ddp adamw",
    "ddp adamw torch",
    "static adamw",
    "fsdp2 sgd",
    "fsdp2 adamw",
    "fsdp2 adamw torch",
    "deferred ddp adamw",
    "deferred fsdp2 adamw",
]


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_runs_are_those_of_one_process(name: str, both: list[Results], alone: Results) -> None:
    """Lightning#19235, pytorch#170862: norms, coefficients and weights, on both ranks alike."""
    one = alone[name]
    assert sum(each < 1 for each in one["coefficients"]) > 0
    for results in (each[name] for each in both):
        assert results["norms"] == pytest.approx(one["norms"], rel=1e-6)
        assert results["coefficients"] == pytest.approx(one["coefficients"], rel=1e-6)
        assert results["losses"] == pytest.approx(one["losses"], rel=1e-5)
        pairs = list(zip(results["weights"], one["weights"], strict=True))
        gap = sum(float((here - there).square().sum()) for here, there in pairs)
        size = sum(float(there.square().sum()) for _, there in pairs)
        assert (gap / size) ** 0.5 < (1e-6 if name.endswith("sgd") else 1e-4)
    assert both[0][name]["norms"] == both[1][name]["norms"]
    for here, there in zip(both[0][name]["weights"], both[1][name]["weights"], strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("name", ["automatic", "automatic static"])
def test_other_projects_accumulate_and_clip(name: str, both: list[Results], alone: Results) -> None:
    """Lightning#18086: accumulation under a static graph, by Lightning's own loop."""
    for results in both:
        for here, there in zip(results[name]["weights"], alone[name]["weights"], strict=True):
            torch.testing.assert_close(here, there)


@pytest.mark.parametrize("name", ["fsdp2 sgd", "fsdp2 adamw"])
def test_a_sharded_norm_is_a_plain_global_number(name: str, both: list[Results]) -> None:
    for results in (each[name] for each in both):
        assert results["sharded"] == len(results["weights"])
        assert results["types"] == ["Tensor"]
        assert results["logged"] == [
            (step, pytest.approx(norm)) for step, norm in enumerate(results["norms"], start=1)
        ]


def test_only_the_last_micro_batch_exchanges_shards(both: list[Results]) -> None:
    """Lightning#4092, #2595 under FSDP2: no gradient until the window's last backward pass."""
    for results in (each["fsdp2 sgd"] for each in both):
        assert results["present"] == [0, len(results["weights"])] * 10


@pytest.mark.parametrize("prefix", ["", "deferred "])
def test_nan_in_one_rank_s_shard(prefix: str, both: list[Results]) -> None:
    """Lightning#19106 under FSDP2, where a NaN may lie in one rank's shards alone."""
    for results in both:
        skipped, raised = (results[f"{prefix}fsdp2 nan {policy}"] for policy in ("skip", "raise"))
        assert skipped["outcomes"] == ["nonfinite_skip", "applied"]
        assert skipped["weight"].tolist() == pytest.approx([-0.003, 0.003])
        assert raised["outcomes"] == ["applied", "nonfinite_raise"]
        assert "the gradient of unigram.weight" in raised["error"]


def test_checkpoints_under_fsdp2(both: list[Results]) -> None:
    """One file, which goes on exactly and is read anywhere; moments never go to the wrong weights."""
    for results in (each["checkpoint"] for each in both):
        assert results["step"] == 4
        assert len(results["saved"]) == len(results["straight"])
        for here, there in zip(results["resumed"], results["straight"], strict=True):
            torch.testing.assert_close(here, there)
        assert "`init_from` takes the weights alone" in results["error"]


def test_ranks_agree_on_the_extension(both: list[Results]) -> None:
    """One rank without a compiler: all clip with torch, or all stop."""
    for rank, results in enumerate(both):
        assert results["auto lacking"] == {"error": "", "uses": {torch.device("cpu"): False}}
        told = (
            "no compiler on rank 1"
            if rank
            else "rank 1 cannot have the clip extension: no compiler on rank 1"
        )
        assert results["extension lacking"]["error"] == told


def test_a_broken_window_is_not_continued_under_fsdp2(both: list[Results]) -> None:
    """Half an update that FSDP2 has accumulated must not leak into the next."""
    for results in both:
        assert "resume from a checkpoint" in results["broken"]["error"]


def test_tensor_parallel_ranks_and_scalers_are_refused(both: list[Results]) -> None:
    for results in both:
        assert "clip_model_parallel" in results["tensor parallel"]["error"]
        assert "bf16-mixed" in results["fsdp2 scaler"]["error"]
        assert "no fused SGD" in results["fsdp2 fused sgd"]["error"]


@pytest.mark.parametrize("name", ["equal", "equal streams"])
def test_equal_numbers_of_windows_train(name: str, both: list[Results]) -> None:
    for results in both:
        assert results[f"unequal {name}"] == {"error": "", "updates": 6, "validated": 2}


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("max_steps", "rank 0 has 5 windows in this epoch, rank 1 has 4"),
        ("max_epochs", "rank 0 has 4 windows in this epoch, rank 1 has 5"),
    ],
)
def test_lengths_are_compared_before_the_first_update(name: str, counts: str, both: list[Results]) -> None:
    """Lightning#20404: both ran on in different epochs, or ended by a traceback of gloo."""
    for results in both:
        assert counts in results[f"unequal {name}"]["error"]
        assert results[f"unequal {name}"]["updates"] == 0


STREAMS = {
    "streams": ("rank 0 has at least 5 windows in this epoch, rank 1 has 4", 4),
    "streams, epochs": ("rank 0 has 4 windows in this epoch, rank 1 has at least 5", 4),
    "streams, second epoch": ("rank 0 has 2 windows in this epoch, rank 1 has at least 3", 5),
    "streams, limited": ("rank 0 has 5 windows in this epoch, rank 1 has 4", 4),
    "an empty stream": ("rank 0 has at least 2 windows in this epoch, rank 1 has 0", 0),
    "an empty second epoch": ("rank 0 has at least 2 windows in this epoch, rank 1 has 0", 3),
    "a wrong length": ("rank 0 has 4 windows in this epoch, rank 1 has 3", 3),
}
WAITED_FOR = ["streams", "streams, second epoch", "an empty stream", "an empty second epoch"]


@pytest.mark.parametrize(
    "name", [f"unequal {name}" for name in STREAMS] + [f"deferred unequal {name}" for name in WAITED_FOR]
)
def test_streams_stop_together(name: str, both: list[Results]) -> None:
    """Lightning#20404: without a length they find out once one of them has no window after this one."""
    counts, updates = STREAMS[name.partition("unequal ")[2]]
    for results in both:
        assert counts in results[name]["error"]
        assert results[name]["updates"] == updates


def test_a_limit_within_all_of_them_is_kept(both: list[Results]) -> None:
    for results in both:
        assert results["unequal streams, limited in time"]["updates"] == 8
        assert results["unequal stopped"]["updates"] == 4
        assert (
            results["unequal streams, limited in time"]["error"] == results["unequal stopped"]["error"] == ""
        )
