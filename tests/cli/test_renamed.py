"""Old names of options and classes: one table, wherever they are given, and in checkpoints."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from andrea_pl import Arm, Curriculum, LanguageModule, TextSource, TransformerConfig, build_scheduler
from andrea_pl.cli import renamed
from andrea_pl.cli.renamed import UsageError, new_class_path, new_key, translate, translate_arguments
from tests.support.answers import ask, write_tiny
from tests.support.toy import ToyU

OLD = {
    "model": {"lr_floor": 0.1, "lr": 1e-3},
    "data": {
        "curriculum": {"share_of": "tokens", "hard_clip": 0.25},
        "sources": [{"name": "a", "floor": 0.5}, {"name": "b"}],
    },
    "trainer": {"callbacks": [{"class_path": "andrea_callbacks.spikes.SpikeForensics"}]},
}
NEW = {
    "model": {"min_lr_ratio": 0.1, "lr": 1e-3},
    "data": {
        "curriculum": {"weight_unit": "tokens", "min_clip_coefficient": 0.25},
        "sources": [{"name": "a", "min_weight": 0.5}, {"name": "b"}],
    },
    "trainer": {"callbacks": [{"class_path": "andrea_callbacks.SpikeForensics"}]},
}


@pytest.fixture(autouse=True)
def unnoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "_noted", set())


@pytest.mark.guarantee("old names keep working")
def test_nested_settings() -> None:
    noted: list[tuple[str, str]] = []
    assert translate(OLD, lambda old, new: noted.append((old, new))) == NEW
    assert ("model.lr_floor", "model.min_lr_ratio") in noted
    assert len(noted) == 5
    assert translate(NEW) == NEW


def test_only_where_the_option_is() -> None:
    """A class of somebody's own may have an option of that name."""
    own = {"trainer": {"callbacks": [{"class_path": "mine.Own", "init_args": {"floor": 1, "lr_floor": 2}}]}}
    assert translate(own) == own
    assert new_key("trainer.floor") == "trainer.floor"


def test_both_names() -> None:
    with pytest.raises(UsageError, match=r"model\.lr_floor is called model\.min_lr_ratio now, and both"):
        translate({"model": {"lr_floor": 0.1, "min_lr_ratio": 0.2}})


@pytest.mark.parametrize("equals", [True, False])
@pytest.mark.guarantee("old names keep working")
def test_command_lines(equals: bool) -> None:
    old = [
        ("--model.lr_floor", "0.1"),
        ("--data.sources", '[{"name": "a", "floor": 0.5}]'),
        ("--data.curriculum", "{share_of: tokens}"),
        ("--trainer.callbacks+", "andrea_callbacks.moments.MomentMonitor"),
        ("--model.lr", "0.1"),
    ]
    given = [f"{flag}={value}" for flag, value in old] if equals else [part for pair in old for part in pair]
    with pytest.warns(FutureWarning, match="the old name goes in the next minor version"):
        found = translate_arguments(["fit", *given])
    joined = "=".join(found)
    assert found[0] == "fit"
    assert "--model.min_lr_ratio=0.1" in joined
    assert '--data.sources=[{"name": "a", "min_weight": 0.5}]' in joined
    assert '--data.curriculum={"weight_unit": "tokens"}' in joined
    assert "--trainer.callbacks+=andrea_callbacks.MomentMonitor" in joined
    assert "--model.lr=0.1" in joined


def test_every_moved_class_is_public() -> None:
    """A class path of an old module leads to a name that its package exports."""
    import andrea_callbacks
    import andrea_pl
    import andrea_pl.strategies

    classes = {
        "andrea_callbacks": [
            "PreClipNorm",
            "FiniteGuard",
            "SpikeForensics",
            "SpikeDetector",
            "MomentMonitor",
        ],
        "andrea_pl": ["DurableCheckpoint", "DurableCheckpointIO", "TextSource", "Curriculum", "Ucb1"],
    }
    for package, names in classes.items():
        for name in names:
            assert hasattr({"andrea_callbacks": andrea_callbacks, "andrea_pl": andrea_pl}[package], name)
    assert new_class_path("andrea_callbacks.clip_norm.PreClipNorm") == "andrea_callbacks.PreClipNorm"
    assert new_class_path("andrea_pl.saving.DurableCheckpoint") == "andrea_pl.DurableCheckpoint"
    assert new_class_path("andrea_pl.network.config.TransformerConfig").count("network")
    assert new_class_path("mine.spikes.SpikeForensics") == "mine.spikes.SpikeForensics"


@pytest.mark.parametrize(
    ("build", "old", "new"),
    [
        (lambda **o: Curriculum(**o).weight_unit, {"share_of": "tokens"}, "tokens"),
        (lambda **o: Curriculum(**o).min_clip_coefficient, {"hard_clip": 0.25}, 0.25),
        (lambda **o: TextSource(name="a", kind="python", **o).min_weight, {"floor": 0.5}, 0.5),
        (lambda **o: Arm(name="a", **o).floor, {"floor": 0.5}, 0.5),
    ],
)
def test_from_python(build: Any, old: dict[str, Any], new: Any) -> None:
    with pytest.warns(FutureWarning, match="the old name goes in the next minor version"):
        assert build(**old) == new


def test_both_names_from_python() -> None:
    with pytest.raises(TypeError, match="share_of is called weight_unit now, and both are given"):
        Curriculum(share_of="tokens", weight_unit="tokens")  # type: ignore[call-arg]


def test_a_module_and_its_schedule() -> None:
    shape = TransformerConfig(vocab_size=8, block_size=4, d_model=4, n_heads=2, n_layers=1)
    with pytest.warns(FutureWarning, match="lr_floor is called min_lr_ratio now"):
        module = LanguageModule(shape, lr_floor=0.5)  # type: ignore[call-arg]
    assert module.hyperparameters["min_lr_ratio"] == 0.5
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.warns(FutureWarning, match="floor is called min_lr_ratio now"):
        scheduler = build_scheduler(optimizer, 10, 0, floor=0.5)  # type: ignore[call-arg]
    assert scheduler.lr_lambdas[0](10) == 0.5


def test_methods() -> None:
    module = ToyU()
    with pytest.warns(FutureWarning, match="settle_update is called finalize_update now"):
        module.settle_update()
    with pytest.warns(FutureWarning, match="note_losses is called record_source_losses now"):
        module.note_losses(torch.zeros(1, dtype=torch.int64), torch.zeros(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.finalize_update()


@pytest.mark.system
def test_a_configuration_and_a_checkpoint_with_old_names(tmp_path: Path) -> None:
    """Old names train, are saved as new ones, and resume without drift from a checkpoint with them."""
    path = write_tiny()
    config = yaml.safe_load(path.read_text())
    config["model"]["lr_floor"] = 0.1
    config["data"]["curriculum"] = {"share_of": "tokens", "updates_per_epoch": 4}
    config["data"]["sources"][0]["floor"] = 0.2
    path.write_text(yaml.safe_dump(config))
    answers, _ = ask(["fit", "--config", str(path), "--trainer.max_steps=4"])
    assert answers[0].code == 0, answers
    saved = next(Path().glob("**/update-*.ckpt"))
    checkpoint = torch.load(saved, weights_only=True)
    assert checkpoint["andrea_config"]["model"]["min_lr_ratio"] == 0.1
    settings = checkpoint["andrea_config"]
    settings["model"]["lr_floor"] = settings["model"].pop("min_lr_ratio")
    curriculum = settings["data"]["curriculum"]
    curriculum = curriculum.get("init_args", curriculum)
    curriculum["share_of"] = curriculum.pop("weight_unit")
    curriculum["hard_clip"] = curriculum.pop("min_clip_coefficient")
    source = settings["data"]["sources"][0]
    source["floor"] = source.pop("min_weight")
    old = tmp_path / "old.ckpt"
    torch.save(checkpoint, old)
    again = ["fit", "--config", str(path), "--trainer.max_steps=6", "--ckpt_path", str(old)]
    resumed, _ = ask([*again, "--allow_drift", "trainer.max_steps"])
    assert resumed[0].code == 0, resumed
    changed, _ = ask(
        [
            "fit",
            "--config",
            str(path),
            "--trainer.max_steps=4",
            "--ckpt_path",
            str(old),
            "--model.lr_floor=0.3",
        ]
    )
    assert "--allow_drift model.min_lr_ratio" in changed[0].errors[-1]
    allowed, _ = ask(
        [
            "fit",
            "--config",
            str(path),
            "--trainer.max_steps=6",
            "--ckpt_path",
            str(old),
            "--model.lr_floor=0.3",
            "--allow_drift",
            "trainer.max_steps",
            "--allow_drift",
            "model.lr_floor",
        ]
    )
    assert allowed[0].code == 0, allowed
