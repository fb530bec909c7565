"""Paths: `~` means one folder everywhere, storages are allowed by name, names stay in their folders."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fsspec.core import _un_chain
from jsonargparse import Namespace

from andrea_pl import UserError
from andrea_pl.cli.paths import (
    expand_home,
    is_path_key,
    protocols_of,
    refuse_leading_out,
    resolve,
    trust_protocols,
)
from tests.support.answers import ask, write_tiny

pytestmark = pytest.mark.system

CSV = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "~/runs"}}


def test_home_is_one_folder_for_logs_and_checkpoints() -> None:
    """`save_dir: ~/runs` wrote logs there and checkpoints into a folder named `~`; every other path, too."""
    config = yaml.safe_load(write_tiny().read_text())
    home = Path("home").absolute()
    home.mkdir()
    config["trainer"]["logger"] = CSV
    config["data"]["cache_dir"] = "~/cache"
    config["data"]["sources"][0]["paths"] = ["~/text.txt"]
    (home / "mine.yaml").write_text(yaml.safe_dump(config))
    Path("text.txt").rename(home / "text.txt")
    run = home / "runs" / "lightning_logs" / "version_0"
    fit = ["fit", "--config=~/mine.yaml"]
    longer = ["--trainer.max_steps=3", "--allow_drift", "trainer.max_steps"]
    checkpoint = "--ckpt_path=~/runs/lightning_logs/version_0/checkpoints/update-000002.ckpt"
    answers, _ = ask(
        fit,
        [*fit, "--resume=~/runs/lightning_logs/version_0", *longer],
        ["generate", checkpoint, "--prompt", "~/line", "--max_new_tokens", "2"],
        HOME=str(home),
        XDG_CACHE_HOME="",
    )
    assert [answer.code for answer in answers] == [0, 0, 0], answers
    assert (run / "metrics.csv").is_file()
    assert (run / "checkpoints" / "update-000003.ckpt").is_file()
    assert answers[2].stdout.startswith("~/line")
    assert (home / "cache").is_dir()
    assert not Path("~").exists()
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert written["trainer"]["logger"]["init_args"]["save_dir"] == "~/runs"


PATHS = """
ckpt_path init_from resume output config trainer.default_root_dir data.cache_dir data.tokenizer
data.sources.paths trainer.logger.init_args.save_dir trainer.callbacks.init_args.dirpath
trainer.callbacks.init_args.folder trainer.callbacks.init_args.path trainer.profiler.init_args.dirpath
"""

TEXTS = """
prompt data.sources.document_separator data.sources.name trainer.callbacks.class_path
trainer.callbacks.init_args.prompts trainer.callbacks.init_args.known trainer.profiler
"""


def test_paths_are_told_by_their_keys() -> None:
    assert all(map(is_path_key, PATHS.split()))
    assert not any(map(is_path_key, TEXTS.split()))


def test_only_paths_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and a separator keep their `~`; a path within a name does too."""
    monkeypatch.setenv("HOME", "/home/me")
    values: dict[str, Any] = {
        "prompt": "~/x",
        "output": "~",
        "data": {"sources": [{"paths": ["~/a", "b/~/c", "a~"], "document_separator": "~"}]},
    }
    assert resolve(values) == {
        "prompt": "~/x",
        "output": "/home/me",
        "data": {"sources": [{"paths": ["/home/me/a", "b/~/c", "a~"], "document_separator": "~"}]},
    }
    assert expand_home({"data": {"cache_dir": "~/x"}}) == {"data": {"cache_dir": "/home/me/x"}}


def test_a_user_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder named `~nobody-here` is made; a file of that very name is taken."""
    with pytest.raises(
        UserError, match=r"output: ~nobody-here/x: no user 'nobody-here'; write \./~nobody-here/x"
    ):
        resolve({"output": "~nobody-here/x"})
    Path("~draft.txt").touch()
    assert resolve({"path": "~draft.txt"}) == {"path": "~draft.txt"}
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(UserError, match="no home folder is known here"):
        resolve({"output": "~/x"})


def test_a_folder_named_tilde_is_not_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier versions put into one is pointed at; written as `./~` it is used."""
    monkeypatch.setenv("HOME", "/home/me")
    Path("~").mkdir()
    with pytest.warns(UserWarning, match=r"~/runs is /home/me/runs\. A folder named ~ is here too"):
        assert resolve({"save_dir": "~/runs"}) == {"save_dir": "/home/me/runs"}
    assert resolve({"save_dir": "./~/runs"}) == {"save_dir": "./~/runs"}


REMOTE = [
    "hf://owner/model/x.ckpt",
    "HTTP://example.com/x.ckpt",
    "https://example.com/x.ckpt",
    "ftp://example.com/x.ckpt",
    "github://owner:repo@main/x.ckpt",
    "simplecache::http://example.com/x.ckpt",
    "filecache::s3://bucket/x.ckpt",
    "zip://x.ckpt::ftp://example.com/a.zip",
    "data:text/plain,x",
    "memory://x.ckpt",
]


@pytest.mark.parametrize("path", REMOTE)
def test_storages_that_are_not_allowed(path: str) -> None:
    for key in ("ckpt_path", "init_from", "tokenizer", "default_root_dir", "dirpath", "save_dir"):
        with pytest.raises(UserError, match=key):
            resolve({key: path})


def test_storages_that_are_allowed() -> None:
    for path in (
        "s3://b/x",
        "gs://b/x",
        "gcs://b/x",
        "az://c/x",
        "abfs://c/x",
        "file:///x",
        "local://x",
        "a/b",
    ):
        assert resolve({"ckpt_path": path}) == {"ckpt_path": path}
    assert resolve({"document_separator": "::", "prompt": "hf://x"}) == {
        "document_separator": "::",
        "prompt": "hf://x",
    }
    trust_protocols(["hf"])
    try:
        assert resolve({"ckpt_path": "hf://x"}) == {"ckpt_path": "hf://x"}
        with pytest.raises(UserError, match="ftp is no storage"):
            resolve({"ckpt_path": "ftp://x"})
    finally:
        trust_protocols([])


def test_protocols_are_those_of_fsspec() -> None:
    """Whatever fsspec would open a path by is among those that are looked at."""
    for path in (
        "a/b",
        "file:///b",
        "memory://x",
        "zip://x::memory://b/y",
        "simplecache::memory://x",
        "x::y",
    ):
        try:
            opened = {str(protocol) for _, protocol, _ in _un_chain(path, {})} - {"file"}
        except ValueError as error:  # a protocol that it does not know
            opened = set(re.findall(r"Protocol not known: (\w+)", str(error)))
        assert opened <= set(protocols_of(path)), path


def test_no_host_is_looked_up() -> None:
    """`--ckpt_path hf://…` and every key that Lightning hands to fsspec, by flag and by YAML, in one line."""
    write_tiny()
    Path("logger.yaml").write_text(
        yaml.safe_dump({"trainer": {"logger": {**CSV, "init_args": {"save_dir": "hf://owner/x"}}}})
    )
    fit = ["fit", "--config", "tiny.yaml"]
    saver = "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint"
    answers, looked_up = ask(
        [*fit, "--ckpt_path", "hf://owner/model/x.ckpt"],
        [*fit, "--config", "logger.yaml"],
        [*fit, saver, "--trainer.callbacks.dirpath=ftp://example.com/x"],
        ["generate", "--ckpt_path", "simplecache::https://example.com/x"],
    )
    assert looked_up == []
    for answer, key in zip(answers, ("ckpt_path", "save_dir", "dirpath", "ckpt_path"), strict=True):
        assert answer.code == 1, answer
        assert len(answer.errors) == 1, answer
        assert key in answer.errors[0]


NAMES = [
    ("callbacks", "lightning.pytorch.callbacks.ModelCheckpoint", "filename", "../../x"),
    ("callbacks", "lightning.pytorch.callbacks.OnExceptionCheckpoint", "filename", "/x"),
    ("callbacks", "lightning.pytorch.callbacks.ModelCheckpoint", "filename", "~/x"),
    ("callbacks", "andrea_callbacks.RunJournal", "name", "a/../../x"),
    ("profiler", "lightning.pytorch.profilers.SimpleProfiler", "filename", "..\\x"),
    ("logger", "lightning.pytorch.loggers.TensorBoardLogger", "name", "$HOME/x"),
    ("logger", "lightning.pytorch.loggers.TensorBoardLogger", "name", "${HOME}"),
    ("logger", "lightning.pytorch.loggers.CSVLogger", "version", "~"),
    ("logger", "lightning.pytorch.loggers.TensorBoardLogger", "sub_dir", "../x"),
    ("logger", "lightning.pytorch.loggers.CSVLogger", "name", "hf://x"),
]


@pytest.mark.parametrize(("where", "kind", "key", "name"), NAMES)
def test_names_do_not_lead_out(where: str, kind: str, key: str, name: str) -> None:
    """Of loggers, checkpoints, journals and profilers; TensorBoard's logger expands variables and `~`."""
    spec = {"class_path": kind, "init_args": {key: name}}
    parsed = Namespace(class_path=kind, init_args=Namespace({key: name}))
    for value in (spec, [spec], parsed):
        with pytest.raises(UserError, match=rf"^trainer\.{where}\.{key}: .* give a plain name"):
            resolve({"trainer": {where: value}})
    own = {"trainer": {where: {**spec, "class_path": "mine.Thing"}}}
    assert resolve(own) == own


def test_names_that_stay() -> None:
    for name in ("local", "a/b", "{epoch}-{step}", "v..1", "run~1", ""):
        refuse_leading_out(name, "trainer.logger.init_args.name")
    refuse_leading_out("cost-$5", "trainer.callbacks.init_args.filename")


def test_names_are_refused_by_the_command() -> None:
    """Nothing is written outside; nor by a variable in `save_dir`, two folders for logger and saver."""
    write_tiny()
    fit = ["fit", "--config", "tiny.yaml"]
    board = [*fit, "--trainer.logger=lightning.pytorch.loggers.TensorBoardLogger"]
    saver = "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint"
    answers, _ = ask(
        [*fit, saver, "--trainer.callbacks.filename=../../x"],
        [*board, "--trainer.logger.save_dir=runs", "--trainer.logger.name=$HOME/x"],
        [*board, "--trainer.logger.save_dir=$HOME/runs"],
    )
    for answer, words in zip(answers, ("leads out", "would be expanded", "variables are not"), strict=True):
        assert answer.code == 1
        assert len(answer.errors) == 1
        assert words in answer.errors[0]
    assert not Path("runs").exists()
