"""Configuration files that are none, or stand for something huge: one line each, quickly."""

import time
from pathlib import Path

import pytest

from andrea_pl import UserError
from andrea_pl.cli.arguments import restrict
from andrea_pl.cli.configuration import read_configuration
from tests.support.answers import ask, write_tiny

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
