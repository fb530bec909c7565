"""The sample of text that a tokenizer is learnt from."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from andrea_pl import TextDataModule, TextSource, UserError
from andrea_pl.data.store import cutting
from andrea_pl.data.store.preparation import prepare
from andrea_pl.data.store.sample import TextSample
from tests.support.texts import for_training

pytestmark = pytest.mark.filterwarnings("ignore:the text gave")

TEXT = "".join(f"Line {n} says that {n} times {n} is {n * n}, doesn't it?\r\n" for n in range(800))


def pieces_of(count: int) -> Iterator[str]:
    return (f"piece {number} " * (1 + number % 7) for number in range(count))


def test_a_sample_depends_on_content_alone() -> None:
    """At most as many bytes as asked, whatever the order; all of them where they fit."""
    texts = list(pieces_of(300))
    samples = []
    for order in (texts, texts[::-1], sorted(texts)):
        sample = TextSample(2000)
        for text in order:
            sample.add(text)
        assert sample.seen_bytes == sum(map(len, texts))
        samples.append(sorted(sample.texts()))
        assert sum(map(len, samples[-1])) == sample.kept_bytes <= 2000
        assert sample.kept_bytes > 1900
    assert samples[0] == samples[1] == samples[2]
    everything = TextSample(10**6)
    for text in texts:
        everything.add(text)
    assert sorted(everything.texts()) == sorted(texts)


def test_the_sample_is_said_and_an_option(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "PIECE_CHARACTERS", 500)
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    size = len(TEXT.replace("\r\n", "\n"))
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        prepare(for_training(path, tmp_path / "cache"))
        assert f"learning a tokenizer of 300 ids from all {size:,} bytes of training text" in caplog.text
        prepare(for_training(path, tmp_path / "cache", tokenizer_sample_bytes=5000))
    assert f" of {size:,} bytes of training text, chosen by a hash of their content" in caplog.text
    with pytest.raises(UserError, match=r"`tokenizer_sample_bytes` must be at least 1"):
        TextDataModule([TextSource(name="s", paths=["a.txt"])], tokenizer_sample_bytes=0)
