"""Exported checkpoints, read by transformers: the same logits, the same tokens, the same text."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers

from andrea_pl import LanguageModule, UserError
from andrea_pl.language.export import export_model
from tests.support.checkpoints import LAYOUTS, save


@pytest.mark.parametrize(
    ("architecture", "bias", "tie_output", "norm_weight"),
    list(product(LAYOUTS, (False, True), (False, True), (False, True))),
)
def test_logits_are_equal(
    tmp_path: Path, architecture: str, bias: bool, tie_output: bool, norm_weight: bool
) -> None:
    """Within 1e-5 of the largest, for every shape that has a layout."""
    module = save(
        tmp_path / "a.ckpt",
        **LAYOUTS[architecture],
        bias=bias,
        tie_output=tie_output,
        norm_weight=norm_weight,
        rope_theta=500.0,
        d_ff=48,
    )
    export_model(str(tmp_path / "a.ckpt"), str(tmp_path / "model"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert type(model).__name__ == architecture
    ids = torch.randint(0, 280, (3, 32))
    with torch.no_grad():
        ours, theirs = module(ids), model(ids).logits
    assert (ours - theirs).abs().max() <= 1e-5 * ours.abs().max()
    assert model.num_parameters() >= module.network.count_parameters()


def test_tokens_and_text_are_equal(tmp_path: Path) -> None:
    module = save(tmp_path / "a.ckpt", **LAYOUTS["LlamaForCausalLM"])
    export_model(str(tmp_path / "a.ckpt"), str(tmp_path / "model"))
    assert sorted(each.name for each in (tmp_path / "model").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    rebuilt = LanguageModule.load_from_checkpoint(tmp_path / "a.ckpt").eval()
    assert rebuilt.tokenizer is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "words of a text, and ünïcode\n"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == rebuilt.tokenizer.encode(text)
    assert tokenizer.decode(rebuilt.tokenizer.encode(text)) == text
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    start = torch.tensor([[rebuilt.tokenizer.end_id, *rebuilt.tokenizer.encode("a text")]])
    with torch.no_grad():
        ours = module(start)[0, -1].argmax()
        theirs = model.generate(start, max_new_tokens=1, do_sample=False, pad_token_id=0)[0, -1]
    assert ours == theirs


@pytest.mark.parametrize("options", [{"norm": "rms"}, {"activation": "swiglu"}])
def test_an_architecture_without_a_layout_is_refused(tmp_path: Path, options: dict[str, str]) -> None:
    save(tmp_path / "a.ckpt", **options)
    with pytest.raises(UserError, match=r"no layout for norm: \w+ with activation: "):
        export_model(str(tmp_path / "a.ckpt"), str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", **LAYOUTS["LlamaForCausalLM"])
    (tmp_path / "model").mkdir()
    export_model(str(tmp_path / "a.ckpt"), str(tmp_path / "model"))
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    assert described["model_type"] == "llama"
    with pytest.raises(UserError, match="is there already"):
        export_model(str(tmp_path / "a.ckpt"), str(tmp_path / "model"))
    with pytest.raises(UserError, match="could not be written"):
        export_model(str(tmp_path / "a.ckpt"), "/proc/model")
