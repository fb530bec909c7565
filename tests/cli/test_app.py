"""The command in processes of its own: whole runs, errors, and what a configuration may not do."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.commands import andrea, andrea_from_scratch, run_ranks
from tests.support.configurations import CONFIGS, EVIL, log_folder, scalars

pytestmark = pytest.mark.system


def test_overfit() -> None:
    """60 updates by the first seed's section 8.2; every scalar at steps 1 to 60, once, increasing."""
    result = andrea("fit", "--config", str(CONFIGS / "overfit.yaml"))
    assert result.returncode == 0, result.stderr
    found = scalars(Path("runs/overfit/version_0"))
    steps = list(range(1, 61))
    names = {"loss", "tokens", "lr", "skipped", "grad_norm", "grad_norm_clipped", "clip_coefficient"}
    assert names <= {tag.removeprefix("train/") for tag in found}
    for tag, rows in found.items():
        is_every_update = tag.startswith(("train/", "epoch/")) and tag != "train/clip_threshold"
        assert [step for step, _ in rows] == (steps if is_every_update else [1, 26, 51]), tag
    losses = [value for _, value in found["epoch/loss"]]
    assert 2.9 < losses[0] < 3.7
    assert losses[-1] < 0.10
    assert found["train/lr"][0][1] == pytest.approx(6e-4)
    assert {value for _, value in found["train/tokens"]} == {4.0}
    assert re.search(r"epoch 60: loss 0\.0\d+ over 4 tokens in 1 updates", result.stderr)


def test_fit_evaluate_generate_and_fine_tune(tiny: Path) -> None:
    """The whole way of a small model, each step by the command."""
    config = ["--config", str(tiny)]
    prepared = andrea("prepare", *config)
    assert prepared.returncode == 0, prepared.stderr
    assert "prepared in cache/" in prepared.stdout
    fitted = andrea("fit", *config)
    assert fitted.returncode == 0, fitted.stderr
    assert "preparing source" not in fitted.stderr
    assert "parameters: " in fitted.stdout
    assert "sample: " in fitted.stderr
    assert "Tip:" not in fitted.stderr
    assert "Traceback" not in fitted.stderr
    found = scalars(Path("lightning_logs/version_0"))
    events = EventAccumulator("lightning_logs/version_0")
    events.Reload()
    assert "sample/text_summary" in events.Tags()["tensors"]
    assert [step for step, _ in found["val/bits_per_byte"]] == [3, 6]
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5, 6]
    checkpoint = str(next(Path("lightning_logs/version_0/checkpoints").glob("*.ckpt")))
    assert checkpoint in fitted.stderr
    torch.load(checkpoint, weights_only=True)

    validated = andrea("validate", *config, "--ckpt_path", checkpoint)
    assert validated.returncode == 0, validated.stderr
    line = re.search(r"^val/loss: ([\d.]+)$", validated.stdout, re.MULTILINE)
    assert line, validated.stdout
    assert float(line[1]) == pytest.approx(found["val/loss"][-1][1], rel=1e-4)

    predicted = andrea("predict", *config, "--ckpt_path", checkpoint)
    assert predicted.returncode == 0, predicted.stderr
    rows = [json.loads(line) for line in Path("predictions.jsonl").read_text().splitlines()]
    mean = sum(row["loss"] * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows)
    assert mean == pytest.approx(found["val/loss"][-1][1], rel=1e-4)
    assert rows[0]["document"].startswith("lines ")

    elsewhere = Path("elsewhere")
    elsewhere.mkdir()
    (elsewhere / "only.ckpt").write_bytes(Path(checkpoint).read_bytes())
    for prompt in ("line 7", ""):
        options = [
            "generate",
            "--ckpt_path",
            str(elsewhere / "only.ckpt"),
            "--prompt",
            prompt,
            "--max_new_tokens",
            "9",
        ]
        texts = [andrea(*options).stdout for _ in range(2)]
        assert texts[0] == texts[1]
        assert texts[0].startswith(prompt)

    tuned = andrea("fit", *config, "--init_from", checkpoint, "--trainer.max_steps", "1", "--model.lr", "0.0")
    assert tuned.returncode == 0, tuned.stderr
    losses = scalars(log_folder(tuned))["train/loss"]
    assert losses[0][1] < found["train/loss"][0][1] - 0.5

    drift = ["--trainer.max_steps", "8", "--allow_drift", "trainer.max_steps"]
    resumed = andrea("fit", *config, "--ckpt_path", checkpoint, *drift)
    assert resumed.returncode == 0, resumed.stderr
    assert [step for step, _ in scalars(log_folder(resumed))["train/loss"]] == [7, 8]


def test_twice_and_without_a_logger(tiny: Path) -> None:
    """Lightning#19827: the same command twice works twice, from step 0, with and without a logger."""
    mine = Path("config.yaml")
    mine.write_text("mine")
    for options in ([], ["--trainer.logger", "false"]):
        for _ in range(2):
            result = andrea("fit", "--config", str(tiny), "--trainer.max_steps", "2", *options)
            assert result.returncode == 0, result.stderr
    assert mine.read_text() == "mine"
    for version in ("version_0", "version_1"):
        assert [step for step, _ in scalars(Path("lightning_logs") / version)["train/loss"]] == [1, 2]


def test_changed_text_keeps_the_tokenizer_of_the_checkpoint(tiny: Path) -> None:
    """A run is evaluated and fine-tuned with its own tokenizer; its last update is saved."""
    first = andrea("fit", "--config", str(tiny), "--trainer.max_steps", "5")
    assert first.returncode == 0, first.stderr
    checkpoint = log_folder(first) / "checkpoints" / "update-000005.ckpt"
    assert f"checkpoint: {checkpoint}" in first.stderr
    kept = (log_folder(first) / "tokenizer.json").read_text()
    text = Path("text.jsonl")
    text.write_text(
        text.read_text() + "\n" + json.dumps({"text": "something quite different, zzzz zzzz " * 9})
    )
    for options in (["validate", "--ckpt_path"], ["fit", "--trainer.max_steps", "1", "--init_from"]):
        result = andrea(options[0], "--config", str(tiny), *options[1:], str(checkpoint))
        assert result.returncode == 0, result.stderr
    assert (log_folder(result) / "tokenizer.json").read_text() == kept
    drift = ["--allow_drift", "trainer.max_steps"]
    resumed = andrea("fit", "--config", str(tiny), "--ckpt_path", str(checkpoint), *drift)
    assert resumed.returncode == 0, resumed.stderr
    assert "lines: 1 document more; this run keeps the text it started with" in resumed.stderr


def test_prepare_verifies_and_prunes(tiny: Path) -> None:
    """The store of a text that changed goes when nothing needs it any more."""
    assert andrea("prepare", "--config", str(tiny)).returncode == 0
    (old,) = Path("cache").rglob("lines.*/manifest.json")
    Path("text.jsonl").write_text(json.dumps({"text": "something else, zzzz zzzz " * 9}) + "\n")
    os.utime(old, (0, 0))
    result = andrea("prepare", "--config", str(tiny), "--verify", "--prune")
    assert result.returncode == 0, result.stderr
    assert "bytes in all" in result.stdout


def test_resume_for_longer_follows_the_longer_schedule(tiny: Path) -> None:
    first = andrea("fit", "--config", str(tiny), "--trainer.max_steps", "4")
    checkpoint = str(log_folder(first) / "checkpoints" / "update-000004.ckpt")
    drift = ["--trainer.max_steps", "8", "--allow_drift", "trainer"]
    resumed = andrea("fit", "--config", str(tiny), "--ckpt_path", checkpoint, *drift)
    assert resumed.returncode == 0, resumed.stderr
    rates = [value for _, value in scalars(log_folder(resumed))["train/lr"]]
    assert rates == pytest.approx(
        [1e-2 * 0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(4, 8)], rel=1e-5
    )


def test_saved_configuration_runs_again(tiny: Path) -> None:
    assert andrea("fit", "--config", str(tiny), "--trainer.max_steps", "1").returncode == 0
    again = andrea("fit", "--config", "lightning_logs/version_0/config.yaml")
    assert again.returncode == 0, again.stderr


ERRORS: dict[str, tuple[list[str], int, list[str]]] = {
    "clip in the trainer": (["--trainer.gradient_clip_val", "1.0"], 1, ["model.max_norm"]),
    "accumulation": (["--trainer.accumulate_grad_batches", "2"], 1, ["data.sequences_per_update"]),
    "mistyped key": (["--model.max_nrom", "1.0"], 2, ["max_nrom"]),
    "mistyped value": (["--model.max_norm", "high"], 2, ["max_norm", "high"]),
    "bad threshold": (["--model.max_norm", "-1"], 1, ["max_norm must be more than 0"]),
    "bad shape": (["--model.network.n_heads", "3"], 1, ["d_model must be a multiple of n_heads"]),
    "missing text": (
        ["--data.sources", '[{"name": "s", "paths": ["none.txt"]}]'],
        1,
        ["none.txt", "matches"],
    ),
    "empty text": (
        ["--data.sources", '[{"name": "s", "paths": ["empty.txt"]}]'],
        1,
        ["empty.txt: empty file"],
    ),
    "missing checkpoint": (["--ckpt_path", "none.ckpt"], 1, ["none.ckpt: no such checkpoint"]),
    "remote checkpoint": (["--ckpt_path", "https://example.com/x.ckpt"], 1, ["not fetched from the web"]),
    "both checkpoints": (["--ckpt_path", "a.ckpt", "--init_from", "b.ckpt"], 1, ["are not given both"]),
    "abbreviated flag": (["--trainer.max_step", "2"], 2, ["max_step"]),
    "refused optimizer": (["--model.optimizer", "torch.optim.Muon"], 1, ["norm_weight=false"]),
    "bad betas": (["--model.betas", "[1.5,0.9]"], 1, ["betas must lie in"]),
    "file for a folder": (["--trainer.default_root_dir", "empty.txt"], 1, ["empty.txt"]),
    "long warm-up": (["--model.warmup_updates", "9"], 1, ["warmup_updates=9"]),
    "refused by a callback": (
        ["--trainer.callbacks+=andrea_callbacks.Throughput", "--trainer.callbacks.every", "0"],
        1,
        ["error: Throughput: every must be at least 1, got 0"],
    ),
    "mistyped option of a callback": (
        ["--trainer.callbacks+=andrea_callbacks.FiniteGuard", "--trainer.callbacks.polcy", "skip"],
        2,
        ["Option 'polcy' is not accepted"],
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_can_be_acted_on(tiny: Path, case: str) -> None:
    """A message with what to do, the right exit code, and no traceback."""
    Path("empty.txt").touch()
    options, code, words = ERRORS[case]
    result = andrea("fit", "--config", str(tiny), *options)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert "lightning.Callback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_callbacks_with_options_by_flag_and_by_yaml(tiny: Path) -> None:
    """Every callback of the package is named, and given options, as any of Lightning's is."""
    Path("more.yaml").write_text(
        """
trainer:
  callbacks:
    - {class_path: andrea_callbacks.PreClipNorm, init_args: {every: 2, layers: ["blocks"]}}
    - {class_path: andrea_callbacks.FiniteGuard, init_args: {policy: skip, state_every: 2}}
    - {class_path: andrea_callbacks.SpikeForensics, init_args: {threshold: 6, loss_ratio: null}}
    - class_path: andrea_callbacks.CoherenceGate
      init_args: {every: 2, start: 0, threshold: 0, action: stop, known: [the, says]}
    - {class_path: andrea_callbacks.TensorBoardLayout, init_args: {hyperparameters: {note: trial}}}
"""
    )
    flags = ["--trainer.callbacks+=andrea_callbacks.RunJournal", "--trainer.callbacks.every", "1"]
    result = andrea("fit", "--config", str(tiny), "--config", "more.yaml", *flags)
    assert result.returncode == 0, result.stderr
    journal = next(Path().rglob("journal.jsonl")).read_text()
    assert '"kind": "update"' in journal


def test_local_configuration_names_max_norm() -> None:
    result = andrea("fit", "--config", str(CONFIGS / "local.yaml"), "--trainer.gradient_clip_val", "1.0")
    assert result.returncode == 1
    assert "model.max_norm" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", "--config", "none.yaml"],
        ["fit", "--config", "https://example.com/a.yaml"],
        ["fly"],
        [],
        ["generate"],
    ],
)
def test_usage_errors(arguments: list[str]) -> None:
    result = andrea(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "usage:" in result.stderr or "error:" in result.stderr


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "an empty configuration"), (b"a: \xe9", "not UTF-8 (byte 3)")]
)
def test_unreadable_configuration_is_named(content: bytes, words: str) -> None:
    Path("mine.yaml").write_bytes(content)
    result = andrea("fit", "--config", "mine.yaml")
    assert result.returncode == 1
    assert f"mine.yaml: {words}" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_evaluation_wants_a_checkpoint(tiny: Path, subcommand: str) -> None:
    result = andrea(subcommand, "--config", str(tiny))
    assert result.returncode == 1
    assert "--ckpt_path is needed" in result.stderr


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("callbacks", "subprocess.Popen"),
        ("callbacks", "evil.Thing"),
        ("optimizer", "evil.Thing"),
        ("logger", "evil.Thing"),
        ("schedule", "os.system"),
    ],
)
def test_only_trusted_modules_are_imported(tiny: Path, where: str, name: str) -> None:
    """The named module is never imported, and the message names it."""
    Path("evil.py").write_text(EVIL)
    config = yaml.safe_load(tiny.read_text())
    named = {"class_path": name}
    part = config["trainer"] if where in ("callbacks", "logger") else config["model"]
    part[where] = [named] if where == "callbacks" else named
    tiny.write_text(yaml.safe_dump(config))
    result = andrea("fit", "--config", str(tiny), PYTHONPATH=str(Path.cwd()))
    assert result.returncode == 2
    assert name.replace("os.", "") in result.stderr
    assert "--trust_imports NAME" in result.stderr
    assert "Traceback" not in result.stderr
    assert not Path("witness").exists()


def test_trust_is_given_by_name(tiny: Path) -> None:
    Path("mine.py").write_text(
        "import lightning.pytorch as pl\n\nclass Hello(pl.Callback):\n    def on_fit_start(self, trainer, "
        "pl_module):\n        print('hello from mine')\n"
    )
    config = yaml.safe_load(tiny.read_text())
    config["trainer"]["callbacks"] = [{"class_path": "mine.Hello"}]
    config["trainer"]["max_steps"] = 1
    tiny.write_text(yaml.safe_dump(config))
    path = str(Path.cwd())
    assert andrea("fit", "--config", str(tiny), PYTHONPATH=path).returncode == 2
    result = andrea("fit", "--config", str(tiny), "--trust_imports", "mine", PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    assert "hello from mine" in result.stdout


def test_named_optimizer_in_yaml(tiny: Path) -> None:
    config: dict[str, Any] = yaml.safe_load(tiny.read_text())
    config["trainer"]["max_steps"] = 1
    config["model"]["network"]["norm_weight"] = False
    config["model"]["optimizer"] = {"class_path": "torch.optim.Muon", "init_args": {"lr": 0.02}}
    config["model"]["schedule"] = {
        "class_path": "torch.optim.lr_scheduler.StepLR",
        "init_args": {"step_size": 1, "gamma": 0.5},
    }
    tiny.write_text(yaml.safe_dump(config))
    result = andrea("fit", "--config", str(tiny))
    assert result.returncode == 0, result.stderr
    assert scalars(Path("lightning_logs/version_0"))["train/lr"][0][1] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("options", "clipper"),
    [
        (["--trainer.strategy", "clip_single_device"], "auto"),
        (["--trainer.strategy=andrea_pl.strategies.ClipSingleDeviceStrategy"], "auto"),
        (["--trainer.strategy=ClipSingleDeviceStrategy", "--trainer.strategy.clipper=torch"], "torch"),
        (["--trainer.strategy", "clip_single_device", "--trainer.strategy.clipper", "torch"], "torch"),
    ],
)
def test_clip_strategies_by_name_and_class_path(tiny: Path, options: list[str], clipper: str) -> None:
    """The run is that without a strategy, to rounding."""
    plain = andrea("fit", "--config", str(tiny))
    result = andrea("fit", "--config", str(tiny), *options)
    assert result.returncode == 0, result.stderr
    ours, theirs = (scalars(log_folder(each)) for each in (result, plain))
    for tag in ("train/grad_norm", "train/loss", "val/loss"):
        assert ours[tag] == [(step, pytest.approx(value, rel=1e-5)) for step, value in theirs[tag]]
    kept = yaml.safe_load((log_folder(result) / "config.yaml").read_text())["trainer"]["strategy"]
    assert kept == options[-1].partition("=")[2] or kept in options or kept["init_args"]["clipper"] == clipper


def test_a_clipper_that_cannot_be_had(tiny: Path) -> None:
    """An error before training, which says what to install; `auto` goes on with torch."""
    environment = {"PATH": "", "TORCH_EXTENSIONS_DIR": "empty", "CXX": ""}
    options = ["--trainer.strategy=ClipSingleDeviceStrategy", "--trainer.strategy.clipper"]
    refused = andrea("fit", "--config", str(tiny), *options, "extension", **environment)
    assert refused.returncode == 1
    assert "needs a C++20 compiler: install g++" in refused.stderr
    assert "Traceback" not in refused.stderr
    going = andrea("fit", "--config", str(tiny), *options, "auto", **environment)
    assert going.returncode == 0
    assert going.stderr.count("clipping with torch: the clip extension needs a C++20 compiler") == 1


def test_option_of_a_strategy_named_in_yaml(tiny: Path) -> None:
    tiny.write_text(
        tiny.read_text().replace("  max_steps: 6", "  max_steps: 1\n  strategy: clip_single_device")
    )
    result = andrea("fit", "--config", str(tiny), "--trainer.strategy.clipper=torch")
    assert result.returncode == 0, result.stderr
    kept = yaml.safe_load((log_folder(result) / "config.yaml").read_text())["trainer"]["strategy"]
    assert kept["init_args"]["clipper"] == "torch"


def test_a_strategy_that_is_none_by_itself(tiny: Path) -> None:
    result = andrea("fit", "--config", str(tiny), "--trainer.strategy", "andrea_pl.strategies.ClipHook")
    assert result.returncode == 1
    assert "needs options, or is none by itself" in result.stderr
    assert "Traceback" not in result.stderr


def test_build_extension() -> None:
    result = andrea("build-extension")
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"cpu: \S+andrea_clip_cpu.so\n", result.stdout)
    unknown = andrea("build-extension", "hopper")
    assert unknown.returncode == 1
    assert "'hopper' is no CUDA architecture" in unknown.stderr


def test_two_ranks_train_as_one(tiny: Path) -> None:
    """`--trainer.devices 2` starts the second process itself, prepares once, and logs the same curve."""
    curves, rows = [], []
    Path("command.py").write_text(
        "import sys, andrea_pl.cli.main; sys.exit(andrea_pl.cli.main.main(sys.argv[2:]))"
    )
    Path("mine.py").write_text("import lightning.pytorch as pl\n\nclass Quiet(pl.Callback):\n    pass\n")
    trusted = ["--trust_imports", "mine", "--trainer.callbacks", "mine.Quiet"]
    two = ["--trainer.devices", "2", "--trainer.strategy", "ddp", *trusted]
    for call, options in ((andrea, []), (andrea_from_scratch, two)):
        result = call("fit", "--config", str(tiny), *options, PYTHONPATH=str(Path.cwd()))
        assert result.returncode == 0, result.stderr
        curves.append(scalars(log_folder(result)))
        checkpoint = ["--ckpt_path", str(next((log_folder(result) / "checkpoints").glob("*.ckpt")))]
        predict = ["predict", "--config", str(tiny), *options, *checkpoint]
        predicted = run_ranks(Path("command.py"), 2 if options else 1, *predict, PYTHONPATH=str(Path.cwd()))
        assert predicted.returncode == 0, predicted.stderr
        rows.append([json.loads(line) for line in Path("predictions.jsonl").read_text().splitlines()])
    assert [row["document"] for row in rows[0]] == [row["document"] for row in rows[1]]
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        here, there = ([value for _, value in curve[name]] for curve in curves)
        assert here == pytest.approx(there, rel=1e-4)


def test_help_is_complete() -> None:
    top = andrea("--help")
    assert top.returncode == 0
    for subcommand in (
        "fit",
        "validate",
        "test",
        "predict",
        "prepare",
        "generate",
        "export",
        "build-extension",
    ):
        assert subcommand in top.stdout
        page = andrea(subcommand, "--help")
        assert page.returncode == 0
        words = {
            "generate": ["--prompt", "--top_p"],
            "build-extension": ["architectures", "sm_90"],
            "export": ["--ckpt_path", "--output"],
            "fit": ["--init_from", "--resume", "--allow_drift", "--trust_imports", "--model.max_norm"],
        }
        for word in words.get(subcommand, ["--data.sources", "--trust_imports"]):
            assert word in page.stdout
