"""Checkpoints that somebody edited, or that are none: one line each, nothing executed, nothing allocated."""

import copy
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from andrea_pl import LanguageModule, NonFiniteError, UserError
from andrea_pl.cli.commands import generate_text
from andrea_pl.cli.main import main
from andrea_pl.language.export import export_model
from tests.support.checkpoints import save

pytestmark = [
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]

Edit = Callable[[dict[str, Any]], Any]


def within(*keys: Any, value: Any) -> Edit:
    """Return an edit that sets a nested value, or takes it away where it is `...`."""

    def edit(checkpoint: dict[str, Any]) -> None:
        place: Any = checkpoint
        for key in keys[:-1]:
            place = place[key]
        if value is ...:
            del place[keys[-1]]
        else:
            place[keys[-1]] = value

    return edit


def poisoned(value: float) -> Edit:
    def edit(checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["network.blocks.1.attention.out.weight"][3, 4] = value

    return edit


NETWORK = ("andrea_pl", "network")
WEIGHT = ("state_dict", "network.output.weight")
ODD: dict[str, tuple[Edit, str]] = {
    "a list": (lambda _: [1, 2], "holds a list, not a checkpoint"),
    "an int": (lambda _: 5, "holds a int, not a checkpoint"),
    "nothing": (lambda _: {}, "has no block of andrea_pl"),
    "block: list": (within("andrea_pl", value=[1]), "its block of andrea_pl is of type list"),
    "block: newer": (within("andrea_pl", "format", value=2), "is of format 2, .* upgrade"),
    "block: no format": (within("andrea_pl", "format", value=...), "its block's format is None"),
    "block: word": (within("andrea_pl", "format", value="1"), "its block's format is '1'"),
    "block: true": (within("andrea_pl", "format", value=True), "its block's format is True"),
    "block: zero": (within("andrea_pl", "format", value=0), "its block's format is 0"),
    "no network": (within(*NETWORK, value=...), "its network is nothing"),
    "network: list": (within(*NETWORK, value=[]), "its network is of type list"),
    "newer key": (
        within(*NETWORK, "n_experts", value=8),
        "its network has n_experts, which this version .* upgrade andrea_pl",
    ),
    "no d_model": (within(*NETWORK, "d_model", value=...), "its network lacks d_model"),
    "open": (within(*NETWORK, "vocab_size", value=None), "its network lacks vocab_size"),
    "d_model: word": (within(*NETWORK, "d_model", value="wide"), "d_model is 'wide', which cannot be"),
    "d_model: float": (within(*NETWORK, "d_model", value=32.0), "d_model is 32.0, which cannot be"),
    "bias: int": (within(*NETWORK, "bias", value=1), "bias is 1, which cannot be"),
    "norm": (within(*NETWORK, "norm", value="group"), "norm is 'group', which cannot be"),
    "theta": (within(*NETWORK, "rope_theta", value=float("nan")), "rope_theta and init_std must be positive"),
    "heads": (
        within(*NETWORK, "n_heads", value=5),
        "its network cannot be built: d_model must be a multiple",
    ),
    "vocab 10**12": (within(*NETWORK, "vocab_size", value=10**12), "has the shape .* and the checkpoint's"),
    "vocab 10**30": (within(*NETWORK, "vocab_size", value=10**30), "is not that of its"),
    "layers 10**9": (within(*NETWORK, "n_layers", value=10**9), "is not that of its"),
    "width 10**10": (within(*NETWORK, "d_model", value=4 * 10**10), "has the shape|is not that of its"),
    "block_size 10**12": (
        within(*NETWORK, "block_size", value=10**12),
        "takes .* GiB of that by block_size .*, and this machine has",
    ),
    "d_ff 10**15": (within(*NETWORK, "d_ff", value=10**15), "has the shape|is not that of its"),
    "tokenizer: int": (within("andrea_pl", "tokenizer", value=7), "its tokenizer is of type int"),
    "tokenizer: text": (within("andrea_pl", "tokenizer", value="{}"), "its tokenizer cannot be read"),
    "no weights": (within("state_dict", value=...), "has no weights"),
    "weights: list": (within("state_dict", value=[1]), "has no weights"),
    "a weight less": (within(*WEIGHT, value=...), r"lacks output\.weight"),
    "a weight more": (
        within("state_dict", "network.extra", value=torch.ones(2)),
        "has extra, which its network does not have",
    ),
    "weight: word": (within(*WEIGHT, value="a"), r"'network\.output\.weight' in .* no tensor"),
    "weight: ints": (within(*WEIGHT, value=torch.ones(280, 32).int()), "no tensor of real numbers"),
    "weight: shape": (
        within(*WEIGHT, value=torch.ones(32, 280)),
        r"output\.weight has the shape \(32, 280\)",
    ),
    "weight: sparse": (within(*WEIGHT, value=torch.ones(280, 32).to_sparse()), "no tensor of real numbers"),
}


def refused(path: Path, message: str, tmp_path: Path, kind: type[Exception] = UserError) -> None:
    """Both commands that need the checkpoint alone refuse it, naming the file."""
    with pytest.raises(kind, match=message) as fault:
        generate_text(str(path), max_new_tokens=1)
    assert "\n" not in str(fault.value)
    with pytest.raises(kind, match=message):
        export_model(str(path), str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("good") / "a.ckpt"
    save(path, norm="rms", activation="swiglu")
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("name", ODD)
def test_odd_content(name: str, good: dict[str, Any], tmp_path: Path) -> None:
    edit, message = ODD[name]
    checkpoint = copy.deepcopy(good)
    changed = edit(checkpoint)
    torch.save(checkpoint if changed is None else changed, tmp_path / "a.ckpt")
    if name == "block_size 10**12":  # transformers builds no tables in a file
        with pytest.raises(UserError, match=message):
            generate_text(str(tmp_path / "a.ckpt"), max_new_tokens=1)
    else:
        refused(tmp_path / "a.ckpt", message, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value: float, good: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = copy.deepcopy(good)
    poisoned(value)(checkpoint)
    torch.save(checkpoint, tmp_path / "a.ckpt")
    refused(
        tmp_path / "a.ckpt",
        r"1 of the 1,024 weights in blocks\.1\.attention\.out\.weight",
        tmp_path,
        NonFiniteError,
    )
    LanguageModule.load_from_checkpoint(tmp_path / "a.ckpt")  # to be looked at from Python


class Mischief:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_files_of_another_kind(good: dict[str, Any], tmp_path: Path) -> None:
    torch.save(good, "whole.ckpt")
    whole = Path("whole.ckpt").read_bytes()
    Path("cut.ckpt").write_bytes(whole[: len(whole) // 2])
    Path("empty.ckpt").touch()
    Path("text.ckpt").write_text("once upon a time")
    Path("list.ckpt").write_text("[1, 2]")
    save_file({"a": torch.ones(2)}, "safe.ckpt")
    Path("raw.ckpt").write_bytes(pickle.dumps(Mischief()))
    torch.save(good | {"more": Mischief()}, "pickle.ckpt")
    for name in ("cut", "empty", "text", "list", "safe", "raw", "pickle"):
        refused(Path(f"{name}.ckpt"), rf"^{name}\.ckpt is not a checkpoint that can be loaded", tmp_path)
    Path("folder.ckpt").mkdir()
    refused(Path("folder.ckpt"), r"^folder\.ckpt: no such checkpoint file", tmp_path)
    assert not Path("executed").exists()


SOURCES = [{"name": "t", "kind": "tokens", "documents": [[1, 2, 3, 4], [5, 6, 7], [8, 9, 1], [3, 4]]}]
RUN = [
    *("--seed_everything", "0", "--trainer.logger", "false", "--trainer.accelerator", "cpu"),
    *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
    *("--data.sources", json.dumps(SOURCES), "--data.vocab_size", "40", "--data.val_fraction", "0"),
    *("--data.block_size", "8", "--data.sequences_per_update", "2", "--model.network.d_model", "16"),
    *("--model.network.n_heads", "2", "--model.network.n_layers", "1"),
    *("--trainer.callbacks", "andrea_pl.DurableCheckpoint", "--trainer.callbacks.dirpath", "kept"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("run"))
    try:
        assert main(["fit", *RUN, "--trainer.max_steps", "2"]) == 0
        return torch.load("kept/update-000002.ckpt", weights_only=True)
    finally:
        os.chdir(before)


@pytest.mark.system
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (within("optimizer_states", value=...), "its state cannot be restored"),
        (within("optimizer_states", 0, value={"state": 5}), "its state cannot be restored"),
        (within("lr_schedulers", value=7), "its state cannot be restored"),
        (within("loops", value=[1]), "its state cannot be restored"),
        (within("loops", "fit_loop", value={}), "its state cannot be restored"),
        (within("callbacks", value={"DurableCheckpoint": []}), "its state cannot be restored"),
        (within("pytorch-lightning_version", value=...), "its state cannot be restored"),
        (within("andrea_config", value=[1]), "its state cannot be restored"),
        (within("andrea_config", "trainer", value=5), "its state cannot be restored"),
        (within("state_dict", "network.output.weight", value=...), r"lacks output\.weight"),
        (lambda checkpoint: checkpoint["state_dict"]["network.output.weight"].fill_(float("nan")), "NaN"),
        (lambda _: [1], "holds a list"),
    ],
)
def test_state_that_cannot_be_restored(
    run: dict[str, Any], edit: Edit, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = copy.deepcopy(run)
    changed = edit(checkpoint)
    torch.save(changed if isinstance(changed, list) else checkpoint, "a.ckpt")
    code = main(["fit", *RUN, "--trainer.max_steps", "2", "--ckpt_path", "a.ckpt"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("andrea: error: a.ckpt")
    assert re.search(message, error)
    assert code == (3 if message == "NaN" else 1)
