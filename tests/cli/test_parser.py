"""What the command cannot parse: one line, quickly, the nearest key, and nothing of any file's content."""

import json
import os
import re
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from andrea_pl import TextSource
from andrea_pl.cli.parser import (
    ATTRIBUTE,
    CHOICE,
    CLASS_PATH,
    LIBRARY_REMEDY,
    NOISE,
    PARSER_KEY,
    UNEXPECTED,
    UNKNOWN,
    CommandParser,
    as_record,
)
from tests.support.answers import ask, write_tiny
from tests.support.commands import run_python

pytestmark = pytest.mark.system


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
from andrea_pl.cli.main import main

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
            {"name": f"s{n}", "paths": ["text.txt"], "min_weight": 0.001, "document_separator": "\n"}
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
        {"name": "a", "paths": [], "kind": "python", "part": "topics", "min_weight": 0.25, "max_epochs": 2.0},
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
    for odd in ({"min_weight": 1}, {"split": "all"}, {"pathss": []}, {"paths": "x"}, {"documents": [["1"]]}):
        assert as_record(TextSource, {**source, **odd}) is None
    assert as_record(TextSource, {"paths": ["x"]}) is None


GUARD = "andrea_callbacks.FiniteGuard"
PINNED = {
    "an option of a class": (NOISE[0], [f"--trainer.callbacks+={GUARD}", "--trainer.callbacks.nope=1"]),
    "a value of a union": (NOISE[1], ["--model.max_norm=abc"]),
    "a class of a list": (
        NOISE[2],
        [f"--trainer.callbacks=[{{class_path: {GUARD}, init_args: {{nope: 1}}}}]"],
    ),
    "a key of a file": (UNKNOWN, ["--config", "unknown.yaml"]),
    "a flag": (UNKNOWN, ["--modl.lr=1"]),
    "a subcommand": (CHOICE, ["fitt"]),
    "a class of a module": (ATTRIBUTE, ["--trainer.callbacks=[{class_path: andrea_callbacks.FiniteGard}]"]),
    "a module that is not trusted": (
        re.escape(LIBRARY_REMEDY),
        ["--trainer.callbacks=[{class_path: os.Thing}]"],
    ),
    "a configuration from a pipe": (UNEXPECTED, ["--config", "pipe"]),
    "the key of a value": (PARSER_KEY, ["--model.max_norm=abc"]),
    "the class of an option": (CLASS_PATH, [f"--trainer.callbacks+={GUARD}", "--trainer.callbacks.nope=1"]),
}


REFUSED = """
import json, sys
from andrea_pl.cli.main import main
from andrea_pl.cli.parser import RefusedArguments

for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except RefusedArguments as refused:
        print(json.dumps(refused.message))
"""


def test_what_is_looked_for_is_what_the_parser_says() -> None:
    """Each pattern of `andrea_pl.cli.parser` against the parser's own text, which may change."""
    Path("unknown.yaml").write_text("model:\n  lrr: 1\n")
    os.mkfifo("pipe")
    Thread(target=lambda: Path("pipe").write_text("[1, 2]"), daemon=True).start()
    calls = [arguments if arguments == ["fitt"] else ["fit", *arguments] for _, arguments in PINNED.values()]
    done = run_python(REFUSED, json.dumps(calls))
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == len(PINNED), done.stderr
    for (name, (pattern, _)), message in zip(PINNED.items(), said, strict=True):
        assert re.search(pattern, message), f"{name}: {message}"
