"""What the command cannot parse: one line, quickly, the nearest key, and nothing of any file's content."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningArgumentParser

import andrea_pl.sizes
from andrea_pl import RoPELanguageModel, TextDataModule, TextSource, TransformerConfig, UserError
from andrea_pl.arguments import restrict
from andrea_pl.cli import _plain
from andrea_pl.configuration import read_configuration
from andrea_pl.parsing import CommandParser, as_record
from andrea_pl.sizes import BLOCK_BYTES, memory_needs, refuse_what_cannot_fit
from answers import ask, write_tiny
from commands import run_python

pytestmark = pytest.mark.system

BILLION_LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{each}: &{each} [{','.join([f'*{before}'] * 10)}]\n"
    for before, each in zip("abcdefghi", "bcdefghij", strict=True)
)

YAMLS: dict[str, tuple[bytes, str]] = {
    "5,000 brackets": (b"model: " + b"[" * 5000 + b"]" * 5000, "nested more than 100 levels deep"),
    "5,000 braces": (b"{a: " * 5000 + b"1" + b"}" * 5000, "nested more than 100 levels deep"),
    "200,000 open brackets": (b"[" * 200_000, "nested more than 100 levels deep"),
    "3,000 levels": ("\n".join(" " * n + "a:" for n in range(3000)).encode(), "mine.yaml:101: nested"),
    "alias bomb": (BILLION_LAUGHS.encode(), "aliases that stand for 12,345,679,021 values"),
    "alias of itself": (b"data: &a {sources: *a}", "an alias that stands for what it is in"),
    "5,000 digits": (b"trainer: {max_steps: " + b"9" * 5000 + b"}", "mine.yaml: "),
    "key given twice": (b"model: 1\nmodel: 2", "mine.yaml:2: 'model' is given twice, first in line 1"),
    "tab": (b"model:\n\tlr: 1", "mine.yaml:2: a tab"),
    "not UTF-8": (b"model: \xe9", "mine.yaml: not UTF-8 (byte 7)"),
    "UTF-16": ("model: {}".encode("utf-16"), "mine.yaml: not UTF-8 (byte 0)"),
    "a list": (b"- a\n- b", "it holds a list"),
    "text": (b"hello", "it holds text"),
    "empty": (b"", "an empty configuration"),
    "nothing but a comment": (b"# nothing\n", "an empty configuration"),
    "NUL": (b"model: {lr: 1.0e-3}\0", "mine.yaml:1: the control character '\\x00'"),
    "two documents": (b"model: {}\n---\nmodel: {}", "mine.yaml:2: a second document"),
    "a tag": (b"model: !!python/object/apply:os.system [ls]", "mine.yaml:1: "),
    "an alias of nothing": (b"model: *x", "mine.yaml:1: found undefined alias"),
    "a list as key": (b"{[a]: b}", "mine.yaml:1: found unhashable key"),
    "no date": (b"a: 2026-13-45", "mine.yaml: month must be in 1..12"),
}


@pytest.mark.parametrize("case", YAMLS)
def test_odd_yaml_is_refused_in_one_line_quickly(case: str) -> None:
    content, words = YAMLS[case]
    Path("mine.yaml").write_bytes(content)
    start = time.monotonic()
    with pytest.raises(UserError) as error:
        restrict(["fit", "--config", "mine.yaml"])
    assert time.monotonic() - start < 3
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_a_configuration_that_names_itself() -> None:
    """By its key `config`, through another; and one that names a file of something else."""
    Path("a.yaml").write_text("config: b.yaml\n")
    Path("b.yaml").write_text("config: [a.yaml]\n")
    with pytest.raises(UserError, match=r"^a\.yaml: the key config leads back to this file"):
        restrict(["fit", "--config", "a.yaml"])
    Path("b.yaml").write_text("SECRET: &a [*a]\n")
    with pytest.raises(UserError, match=r"^b\.yaml:1: an alias that stands for what it is in$"):
        restrict(["fit", "--config", "a.yaml"])


def test_what_yaml_may_hold() -> None:
    """A mark of byte order, other line ends, merges, and aliases within reason."""
    Path("mine.yaml").write_bytes(b"\xef\xbb\xbfa: &a {x: 1}\r\nb: {<<: *a, x: 2}\r\nc: [*a, *a]\r\n")
    assert read_configuration("mine.yaml") == {"a": {"x": 1}, "b": {"x": 2}, "c": [{"x": 1}] * 2}


ODD: dict[str, tuple[str, int, str]] = {
    "5,000 brackets": ("data: {sources: " + "[" * 5000 + "]" * 5000 + "}", 2, "100 levels deep"),
    "alias bomb": (BILLION_LAUGHS, 2, "aliases that stand for 12,345,679,021 values"),
    "seed": ("seed_everything: 1" + "0" * 40, 1, "seed_everything must lie from 0 to 4294967295"),
    "vocabulary": ("data: {vocab_size: 1000000000000}", 1, "by vocab_size 1,000,000,000,000"),
    "layers": ("model: {network: {n_layers: 1000000000000}}", 1, "by n_layers 1,000,000,000,000"),
    "processes": ("trainer: {devices: 1000000000}", 1, "trainer.devices must lie from -1"),
    "NUL in a path": ('trainer: {default_root_dir: "a\\0b"}', 1, "default_root_dir: 'a\\x00b' holds a NUL"),
}


def test_odd_values_are_refused_by_the_command() -> None:
    """Exit codes 1 and 2, and no traceback, where the old command had one or took for ever."""
    write_tiny()
    calls = []
    for number, (content, _, _) in enumerate(ODD.values()):
        Path(f"{number}.yaml").write_text(content)
        calls.append(["fit", "--config", "tiny.yaml", "--config", f"{number}.yaml"])
    answers, _ = ask(*calls)
    for (name, (_, code, words)), answer in zip(ODD.items(), answers, strict=True):
        assert answer.code == code, (name, answer)
        assert len(answer.errors) == 1, (name, answer.errors)
        assert words in answer.errors[0], name


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"vocab_size": 10**9}, "119.2 GiB of that by vocab_size"),
        ({"block_size": 10**9}, "59.6 GiB of that by block_size"),
        ({"d_model": 10**9}, "of d_model 1,000,000,000"),
        ({"n_layers": 10**9}, "by n_layers 1,000,000,000"),
        ({"d_ff": 10**9}, "119.2 GiB of that by n_layers 1"),
    ],
)
def test_sizes_of_a_billion(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], words: str) -> None:
    """Refused on a machine of 16 GiB; two matrices of 10^9 x 16 float32 are 119.2 GiB."""
    monkeypatch.setattr(andrea_pl.sizes, "machine_memory", lambda: 16 * 2**30)
    network = {"d_model": 16, "n_heads": 2, "n_layers": 1, **sizes}
    with pytest.raises(UserError, match=words):
        refuse_what_cannot_fit(network, sizes.get("vocab_size", 300), sizes.get("block_size", 32))


@pytest.mark.parametrize("options", [{}, {"activation": "swiglu"}, {"tie_output": True}, {"d_ff": 40}])
def test_memory_is_that_of_the_weights(options: dict[str, Any]) -> None:
    """Never more than what is there, so that nothing is refused that could be trained."""
    network = {"d_model": 24, "n_heads": 3, "n_layers": 2, "norm_weight": False, **options}
    model = RoPELanguageModel(TransformerConfig(vocab_size=500, block_size=64, **network))
    held = sum(each.nbytes for each in model.parameters())
    needs = memory_needs(network, 500, 64)
    tables = 16 * 64 * 4
    assert sum(needs.values()) == held + tables + 2 * BLOCK_BYTES


MISTYPED = {
    "--trainer.max_step=3": "--trainer.max_step=3; did you mean --trainer.max_steps?",
    "--model.lrr=3": "--model.lrr=3; did you mean --model.lr?",
    "model: {lrr: 3}": "'model.lrr'; did you mean 'model.lr'?",
    "modl: {lr: 3}": "'modl.lr'; did you mean 'model.lr'?",
    "data: {sources: [{name: a, paths: [text.txt]}, {name: b, pathss: [x]}]}": (
        "data.sources[1]: andrea_pl.TextSource: Option 'pathss' is not accepted; did you mean 'paths'?"
    ),
    "trainer: {callbacks: [{class_path: andrea_callbacks.FiniteGuard, init_args: {polcy: skip}}]}": (
        "'polcy' is not accepted; did you mean 'policy'?"
    ),
    "trainer: {callbacks: [{class_path: andrea_callbacks.FiniteGard}]}": "did you mean 'FiniteGuard'?",
    "trainer: {callbacks: [{clas_path: andrea_callbacks.FiniteGuard}]}": "did you mean 'class_path'?",
}


def test_a_mistyped_key_is_told_the_nearest() -> None:
    """One line each: flags, keys, options of sources and callbacks, class names, files, subcommands."""
    write_tiny()
    fit = ["fit", "--config", "tiny.yaml"]
    calls = []
    for number, text in enumerate(MISTYPED):
        Path(f"{number}.yaml").write_text("" if text.startswith("--") else text)
        calls.append([*fit, text] if text.startswith("--") else [*fit, "--config", f"{number}.yaml"])
    others = [["fit", "--config", "tny.yaml"], ["generate", "--ckpt_pth", "x"], ["fti"]]
    words = [
        "tny.yaml: no such configuration file; did you mean tiny.yaml?",
        "did you mean --ckpt_path?",
        "mean fit?",
    ]
    answers, _ = ask(*calls, *others)
    for answer, wanted in zip(answers, [*MISTYPED.values(), *words], strict=True):
        assert answer.code == 2, answer
        assert len(answer.errors) == 1, answer.errors
        assert answer.errors[0].startswith("andrea: error: ")
        assert wanted in answer.errors[0]


KEYS: dict[str, Any] = {
    "data.sources": "secret",
    "data.curriculum": "mapping.yaml",
    "data": "mapping.yaml",
    "model": "secret",
    "model.optimizer": "secret",
    "trainer.callbacks": ["secret"],
    "trainer.logger": "secret",
    "trainer": "mapping.yaml",
    "config": "secret",
}


def nested(key: str, value: object) -> dict[str, object]:
    """Return a mapping with a dotted key."""
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


def test_a_file_in_place_of_a_value_is_named_and_not_shown() -> None:
    """`data.sources: /etc/passwd`, and other keys that the parser reads a file for, by YAML and by flag."""
    write_tiny()
    Path("secret").write_text("SECRET:x:0\nSECRETs more\n")
    Path("mapping.yaml").write_text("SECRETkey: SECRETvalue\nother: [SECRETitem]\n")
    calls = []
    for number, (key, value) in enumerate(KEYS.items()):
        Path(f"{number}.yaml").write_text(yaml.safe_dump(nested(key, value)))
        calls.append(["fit", "--config", "tiny.yaml", "--config", f"{number}.yaml"])
    flags = [["fit", "--config", "tiny.yaml", "--data.sources", "mapping.yaml"]]
    answers, _ = ask(*calls, *flags, ["fit", "--config", "secret"])
    for call, answer in zip([*calls, *flags, ["secret"]], answers, strict=True):
        assert answer.code == 2, (call, answer)
        assert "SECRET" not in answer.stderr, call
        assert len(answer.errors) == 1, (call, answer.errors)
        assert "secret" in answer.stderr or "mapping.yaml" in answer.stderr, call
    assert "data.sources: secret is a file" in answers[0].stderr


CHECKS = """
import collections, json, sys
import jsonargparse
from andrea_pl.cli import main

calls = collections.Counter()
parse_object = jsonargparse.ArgumentParser.parse_object
def counted(self, *args, **kwargs):
    calls["parses"] += 1
    return parse_object(self, *args, **kwargs)
jsonargparse.ArgumentParser.parse_object = counted
sys.argv = ["andrea"]
counts = {}
for number in (20, 200):
    calls.clear()
    try:
        main(["fit", "--config", f"{number}.yaml", "--ckpt_path", "none.ckpt"])
    except SystemExit:
        pass
    counts[number] = calls["parses"]
print(json.dumps(counts))
"""


def test_parsing_takes_linear_time_in_sources() -> None:
    """200 take as many steps as 20 do; each was parsed five times, and the list copied for each."""
    config = yaml.safe_load(write_tiny().read_text())
    for number in (20, 200):
        config["data"]["sources"] = [
            {"name": f"s{n}", "paths": ["text.txt"], "floor": 0.001, "document_separator": "\n"}
            for n in range(number)
        ]
        Path(f"{number}.yaml").write_text(yaml.safe_dump(config))
    result = run_python(CHECKS)
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout.splitlines()[-1])
    assert counts["20"] == counts["200"] < 20


@pytest.mark.parametrize(
    "source",
    [
        {"name": "a", "paths": ["x.txt"]},
        {"name": "a", "paths": [], "kind": "python", "part": "topics", "floor": 0.25, "max_epochs": 2.0},
        {"name": "t", "kind": "tokens", "documents": [[1, 2], [3]], "weight": 1.5, "split": "val"},
    ],
)
def test_a_source_that_needs_no_conversion_is_what_the_parser_makes_of_it(source: dict[str, Any]) -> None:
    """The short way gives the same namespace, with defaults; what it cannot know, it leaves to the parser."""
    parser = CommandParser()
    parser.add_argument("--sources", type=list[TextSource])
    parsed = parser.parse_object({"sources": [source]}).sources[0]
    ready = as_record(TextSource, source)
    assert ready is not None
    assert ready.init_args == parsed
    assert ready.class_path == "andrea_pl.TextSource"
    assert as_record(TextSource, ready) is ready
    assert as_record(TextSource, parsed) is parsed
    for odd in ({"floor": 1}, {"split": "all"}, {"pathss": []}, {"paths": "x"}, {"documents": [["1"]]}):
        assert as_record(TextSource, {**source, **odd}) is None
    assert as_record(TextSource, {"paths": ["x"]}) is None


def test_sources_are_saved_as_the_parser_would() -> None:
    """What a checkpoint has of a configuration is what the parser's own dump says."""
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(TextDataModule, "data")
    sources = [{"name": "a", "paths": ["x.txt"], "floor": 0.5}, {"name": "b", "kind": "python"}]
    config = parser.parse_object({"data": {"sources": sources, "vocab_size": 300}})
    dumped = yaml.safe_load(parser.dump(config, skip_unset=False, skip_validation=True))
    assert _plain(parser, config) == dumped
    assert dumped["data"]["sources"][0]["floor"] == 0.5
    defaults = parser.get_defaults(skip_validation=True)
    assert _plain(parser, defaults) == yaml.safe_load(
        parser.dump(defaults, skip_unset=False, skip_validation=True)
    )
