"""An exported model writes what `andrea generate` writes, for the same prompt string."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, processors

from andrea_pl import LanguageModule
from andrea_pl.cli.commands import generate_text
from andrea_pl.data.store.tokenizer import END_OF_DOCUMENT, TextTokenizer
from andrea_pl.language.export import export_model
from andrea_pl.language.model_spec import ModelBlock
from andrea_pl.runs.checkpoint_io import DurableCheckpointIO
from tests.support.checkpoints import LAYOUTS, save
from tests.support.texts import llama

PROMPTS = ["a text", "", "  of words ", "a <|endoftext|> in the text", "naïve"]


def with_template() -> TextTokenizer:
    """Return a tokenizer that adds tokens by itself: the first one twice, and one behind."""
    plain = Tokenizer.from_str(TextTokenizer.train(["a text of words " * 9], 270).definition)
    plain.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_DOCUMENT} {END_OF_DOCUMENT} $A {END_OF_DOCUMENT}",
        special_tokens=[(END_OF_DOCUMENT, plain.token_to_id(END_OF_DOCUMENT))],
    )
    return TextTokenizer(plain.to_str())


@pytest.mark.parametrize("architecture", LAYOUTS)
@pytest.mark.parametrize("build", [None, with_template, llama])
@pytest.mark.filterwarnings("ignore:the text gave")
def test_the_same_text(
    architecture: str, build: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 25; the network has rows that no token has, which neither side may choose."""
    path = tmp_path / "a.ckpt"
    options: dict[str, Any] = {**LAYOUTS[architecture], "vocab_size": 400}
    module = save(path, **options)
    if build is not None:
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["andrea_pl"] = ModelBlock(network=module.network.config, tokenizer=build()).to_dict()
        DurableCheckpointIO().save_checkpoint(checkpoint, path)
    export_model(str(path), str(tmp_path / "model"))
    kept = LanguageModule.load_from_checkpoint(path).tokenizer
    assert kept is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    capsys.readouterr()
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == [kept.end_id, *kept.encode(prompt)]
        written = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
        generate_text(str(path), prompt, max_new_tokens=8, temperature=0)
        theirs = tokenizer.decode(written, skip_special_tokens=True)
        ours = capsys.readouterr().out.removesuffix("\n")
        if kept.decode(kept.encode(prompt)) == prompt:  # else the prompt stands there as it was given
            assert theirs == ours
