"""Prompt and continuation as one text, for tokenizers of every kind."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import andrea_pl.language.continuation
from andrea_callbacks import CoherenceGate
from andrea_pl import LanguageModule, TransformerConfig
from andrea_pl.cli.commands import generate_text
from andrea_pl.data.store.tokenizer import END_OF_DOCUMENT, TextTokenizer
from andrea_pl.language.continuation import continuation
from andrea_pl.runs.checkpoint_io import DurableCheckpointIO
from tests.support.texts import TEXT, llama, trained


def metaspace() -> TextTokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = [END_OF_DOCUMENT, "<unk>"]
    return trained(
        tokenizer,
        trainers.UnigramTrainer(
            vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False
        ),
    )


def wordpiece() -> TextTokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = [END_OF_DOCUMENT, "[UNK]"]
    return trained(
        tokenizer, trainers.WordPieceTrainer(vocab_size=80, special_tokens=special, show_progress=False)
    )


def byte_level() -> TextTokenizer:
    return TextTokenizer.train([TEXT + " naïve 日本"] * 20, 290)


def joined(tokenizer: TextTokenizer, prompt: str, whole: str) -> str:
    """Return prompt and continuation, where the model writes the ids of a whole text that follow."""
    ids = tokenizer.encode(prompt)
    return prompt + continuation(tokenizer, prompt, ids, tokenizer.encode(whole)[len(ids) :])


@pytest.mark.parametrize("build", [llama, metaspace, byte_level, wordpiece])
def test_the_reported_prompt(build: Any) -> None:
    """llama2.c#41: "Once upona time"."""
    tokenizer = build()
    expected = "Once upon a time"
    assert joined(tokenizer, "Once upon", expected) == expected
    assert joined(tokenizer, "", "Once upon") == ("once upon" if build is wordpiece else "Once upon")


@pytest.mark.parametrize("build", [llama, metaspace, byte_level])
@pytest.mark.parametrize("prompt", ["Once upon ", "Once up", "O", "Once upon a time\n", "naïve"])
def test_prompts_that_end_anywhere(build: Any, prompt: str) -> None:
    """The model's ids are its own, not those that the whole text would be cut into."""
    tokenizer = build()
    ids, new = tokenizer.encode(prompt), tokenizer.encode("a time")
    text = prompt + continuation(tokenizer, prompt, ids, new)
    assert text.startswith(prompt)
    assert text.endswith("a time")


@pytest.mark.parametrize(
    ("prompt", "whole", "expected"),
    [
        ("Once UPON", "once upon a time", "Once UPON a time"),  # the tokenizer changes case
        ("Once  upon ", "once upon a time", "Once  upon a time"),  # and spaces; one comes once
        (" Once upon", "once upon a time", " Once upon a time"),
        ("☃ Once", "☃ once upon", "☃ Once upon"),  # it has no snowman
    ],
)
def test_prompts_that_do_not_come_back(prompt: str, whole: str, expected: str) -> None:
    assert joined(wordpiece(), prompt, whole) == expected


def test_a_word_that_goes_on() -> None:
    tokenizer = wordpiece()
    vocabulary = tokenizer._tokenizer.get_vocab()
    ids, new = [vocabulary["a"], vocabulary["t"]], [vocabulary["##i"]]
    assert "A T" + continuation(tokenizer, "A T", ids, new) == "A Ti"


def test_a_leading_space_that_the_tokenizer_drops() -> None:
    tokenizer = llama()
    ids = tokenizer.encode("Once upon")
    new = tokenizer.encode("Once upon a time")[len(ids) :]
    assert " Once upon" + continuation(tokenizer, " Once upon", ids, new) == " Once upon a time"


def test_half_a_character() -> None:
    """A model may end within a character, or begin with the rest of one; the prompt's own stay."""
    tokenizer = TextTokenizer.train(["abc"] * 9, 257)
    ids, more = tokenizer.encode("naï"), tokenizer.encode("日")
    assert len(more) == 3
    assert continuation(tokenizer, "naï", ids, more[:2]) == "\N{REPLACEMENT CHARACTER}"
    assert continuation(tokenizer, "naï", ids, more[1:])[0] == "\N{REPLACEMENT CHARACTER}"
    assert continuation(tokenizer, "naï", ids, more) == "日"


def test_wherever_samples_are_shown(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, and CoherenceGate's samples, by the module's own `generate`."""
    tokenizer = llama()
    shape = TransformerConfig(
        vocab_size=tokenizer.vocab_size, block_size=32, d_model=16, n_heads=2, n_layers=1
    )
    module = LanguageModule(shape)
    module.tokenizer = tokenizer
    checkpoint: dict[str, Any] = {"global_step": 1, "state_dict": module.state_dict()}
    LanguageModule.on_save_checkpoint(module, checkpoint)
    DurableCheckpointIO().save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    ids, whole = tokenizer.encode("Once upon"), tokenizer.encode("Once upon a time")
    assert whole[: len(ids)] == ids
    monkeypatch.setattr(andrea_pl.language.continuation, "generate", lambda *_, **__: [whole[len(ids) :]])
    generate_text(str(tmp_path / "a.ckpt"), "Once upon")
    assert capsys.readouterr().out == "Once upon a time\n"
    gate = CoherenceGate(prompts=["Once upon"])
    assert gate.generate is None
    assert module.generate(["Once upon"], 9, torch.Generator()) == [" a time"]
