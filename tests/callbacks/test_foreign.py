"""All callbacks in projects that know nothing of ours: automatic and manual optimization."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch.demos import transformer
from lightning.pytorch.demos.boring_classes import BoringModel

from andrea_callbacks import FiniteGuard, PreClipNorm, read_journal
from tests.support.projects import PROJECTS, BoringAdam, Norms, everything, loader_of, scaler_plugin, train
from tests.support.toy import RowLogger, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Precision 16-mixed is not supported"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


@pytest.fixture(autouse=True)
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo transformer's `prepare_data` fetches a text that it is not trained on here."""
    monkeypatch.setattr(transformer, "WikiText2", lambda download: None)


@pytest.mark.system
@pytest.mark.parametrize("name", PROJECTS)
def test_all_callbacks_at_once(name: str) -> None:
    """Norms agree with float64, every update is in log and journal once, and nothing changes the weights."""
    logger, norms = RowLogger(), Norms()
    module = train(name, [*everything(), norms], logger=logger)
    found = logger.series("train/grad_norm")
    assert [step for step, _ in found] == list(range(1, len(norms.norms) + 1))
    assert [value for _, value in found] == pytest.approx(norms.norms, rel=1e-6)
    rows = [row for row in read_journal("journal.jsonl") if row["kind"] == "update"]
    assert [row["update"] for row in rows] == list(range(1, len(norms.norms) + 1))
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms.norms, rel=1e-6)
    assert all(row["loss"] > 0 for row in rows)
    assert {value for _, value in logger.series("train/nonfinite")} == {0.0}
    watched = [each.detach().clone() for each in module.parameters()]
    alone = train(name, [])
    assert all(torch.equal(one, two) for one, two in zip(watched, alone.parameters(), strict=True))


@pytest.mark.parametrize("name", [name for name in PROJECTS if "manual" not in name])
def test_clip_under_automatic_optimization(name: str) -> None:
    logger, norms = RowLogger(), Norms()
    train(name, [PreClipNorm(), norms], logger=logger)
    max_norm = PROJECTS[name][1]().get("gradient_clip_val", float("inf"))
    clipped = [value for _, value in logger.series("train/grad_norm_clipped")]
    assert clipped == pytest.approx([min(norm, max_norm) for norm in norms.norms], rel=2e-6)
    if "16-mixed" not in name:
        assert clipped == pytest.approx(norms.after, rel=1e-5)
    bitten = [norm > max_norm for norm in norms.norms]
    assert logger.series("train/clip_fraction")[-1][1] == pytest.approx(sum(bitten) / len(bitten))


@pytest.mark.parametrize("name", [name for name in PROJECTS if "manual" in name])
def test_clip_of_others_is_not_guessed(name: str) -> None:
    logger = RowLogger()
    train(name, [PreClipNorm()], logger=logger)
    for scalar in ("grad_norm_clipped", "clip_coefficient", "clip_fraction", "clip_threshold"):
        assert logger.series(f"train/{scalar}") == []


def test_clip_by_value_is_measured() -> None:
    logger, norms = RowLogger(), Norms()
    options: dict[str, Any] = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    train("boring", [PreClipNorm(), norms], logger=logger, **options)
    found = dict(logger.series("train/grad_norm"))
    assert list(found.values()) == pytest.approx(norms.norms, rel=1e-6)
    clipped = [value for _, value in logger.series("train/grad_norm_clipped")]
    assert clipped == pytest.approx(norms.after, rel=1e-6)
    coefficients = [value for _, value in logger.series("train/clip_coefficient")]
    assert coefficients == pytest.approx([a / b for a, b in zip(norms.after, norms.norms, strict=True)])
    assert logger.series("train/clip_threshold") == []  # a bound on elements is no norm


def test_own_clipping_is_not_guessed() -> None:
    class Own(BoringModel):
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            pass

    logger = RowLogger()
    trainer = build_trainer(callbacks=[PreClipNorm()], logger=logger, limit_train_batches=4)
    trainer.fit(Own(), loader_of("boring"))
    assert len(logger.series("train/grad_norm")) == 4
    assert logger.series("train/grad_norm_clipped") == []


@pytest.mark.parametrize("fused", [False, True])
def test_under_a_scaler(fused: bool) -> None:
    """The norm is that of the true gradient, also where a fused optimizer leaves it scaled."""

    class Adam(BoringAdam):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=fused)

    logger, norms = RowLogger(), Norms()
    trainer = build_trainer(
        callbacks=[PreClipNorm(), FiniteGuard(), norms],
        logger=logger,
        plugins=[scaler_plugin(1024.0)],
        limit_train_batches=8,
    )
    trainer.fit(Adam(), loader_of("boring"))
    scale = 1024.0 if fused else 1.0
    found = [value for _, value in logger.series("train/grad_norm")]
    assert found == pytest.approx([norm / scale for norm in norms.norms], rel=1e-6)
    assert 0.01 < found[0] < 100.0  # of a model whose gradients are about 1


def test_two_optimizers_have_names_of_their_own() -> None:
    logger = RowLogger()
    train("manual two optimizers", everything(), logger=logger)
    names = {name for _, row in logger.rows for name in row}
    assert {"grad_norm_group/0/0", "grad_norm_group/1/0"} <= names
    assert {"moments/first/0/0", "moments/update/1/0"} <= names


@pytest.mark.system
def test_nothing_of_andrea_pl_is_imported() -> None:
    """Nor is Lightning under its other name, neither by the callbacks nor by andrea_pl."""
    code = """
import sys
import andrea_callbacks
def found(*names): return {each.partition(".")[0] for each in sys.modules} & set(names)
andrea_callbacks.UpdateProgressBar()
assert not found("andrea_pl", "pytorch_lightning", "lightning_fabric")
import andrea_pl
andrea_pl.DurableCheckpoint()
assert not found("pytorch_lightning", "lightning_fabric")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
