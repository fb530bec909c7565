"""The language module: loss, schedule, evaluation, checkpoints, generation."""

from pathlib import Path

import pytest
import torch

from andrea_pl import (
    LanguageModule,
    TransformerConfig,
    UserError,
    Window,
)
from andrea_pl.data import TextTokenizer
from andrea_pl.language.model_spec import read_block
from andrea_pl.runs.checkpoint_io import read_checkpoint
from tests.support.runs import micro_batch, token_data
from tests.support.toy import build_trainer, fit

SHAPE = TransformerConfig(vocab_size=40, block_size=8, d_model=16, n_heads=2, n_layers=1)


@pytest.mark.filterwarnings("ignore:the text gave")
class TestCheckpoint:
    SHAPE = TransformerConfig(vocab_size=260, block_size=8, d_model=16, n_heads=2, n_layers=1)

    def saved(self, tmp_path: Path, tokenizer: TextTokenizer | None = None) -> tuple[LanguageModule, Path]:
        torch.manual_seed(5)
        module = LanguageModule(self.SHAPE)
        module.tokenizer = tokenizer
        trainer = build_trainer(max_steps=2)
        trainer.fit(module, datamodule=token_data())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        return module, tmp_path / "a.ckpt"

    def test_rebuilt_from_the_file_alone(self, tmp_path: Path) -> None:
        tokenizer = TextTokenizer.train(["abcabc" * 50], 260)
        module, path = self.saved(tmp_path, tokenizer)
        again = LanguageModule.load_from_checkpoint(path)
        assert again.network.config == self.SHAPE
        assert again.tokenizer is not None
        assert again.tokenizer.fingerprint == tokenizer.fingerprint
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))
        block = read_checkpoint(path)["andrea_pl"]
        assert set(block) == {"format", "network", "tokenizer", "tokenizer_fingerprint", "libraries"}

    def test_another_network_is_told(self, tmp_path: Path) -> None:
        _, path = self.saved(tmp_path)
        wider = TransformerConfig(vocab_size=260, block_size=8, d_model=32, n_heads=2, n_layers=1)
        with pytest.raises(UserError, match="d_model: checkpoint 16, here 32"):
            build_trainer(max_steps=4).fit(LanguageModule(wider), datamodule=token_data(), ckpt_path=path)

    def test_another_tokenizer_is_told(self, tmp_path: Path) -> None:
        _, path = self.saved(tmp_path, TextTokenizer.train(["abcabc" * 50], 260))
        module = LanguageModule(self.SHAPE)
        module.tokenizer = TextTokenizer.train(["xyzxyz" * 50], 260)
        with pytest.raises(UserError, match="is not the one that the weights were trained with"):
            module.check_block(read_block(read_checkpoint(path)))

    def test_what_changes_no_weight_may_differ(self, tmp_path: Path) -> None:
        _, path = self.saved(tmp_path)
        shape = TransformerConfig(
            vocab_size=260,
            block_size=4,
            d_model=16,
            n_heads=2,
            n_layers=1,
            d_ff=64,
            dropout=0.1,
            init_std=0.5,
        )
        LanguageModule(shape).check_block(read_block(read_checkpoint(path)))

    def test_bad_files(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="no such checkpoint"):
            read_checkpoint(tmp_path / "none.ckpt")
        with pytest.raises(UserError, match="not fetched from the web"):
            read_checkpoint("https://example.com/a.ckpt")
        (tmp_path / "bad.ckpt").write_bytes(b"not a checkpoint")
        with pytest.raises(UserError, match=r"bad\.ckpt is not a checkpoint that can be loaded"):
            read_checkpoint(tmp_path / "bad.ckpt")
        torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
        with pytest.raises(UserError, match="no block of andrea_pl"):
            read_block(read_checkpoint(tmp_path / "other.ckpt"))
        with pytest.raises(UserError, match="upgrade"):
            read_block({"andrea_pl": {"format": 99}})


def test_tokenizer_larger_than_the_network() -> None:
    with pytest.raises(UserError, match="257 ids and the network vocab_size=40"):
        LanguageModule(SHAPE)._adopt_tokenizer(TextTokenizer.train(["a"], 257))


class TestGeneration:
    @pytest.mark.filterwarnings("ignore:the text gave")
    def test_text_in_text_out(self) -> None:
        torch.manual_seed(0)
        shape = TransformerConfig(vocab_size=280, block_size=16, d_model=16, n_heads=2, n_layers=1)
        module = LanguageModule(shape)
        module.tokenizer = TextTokenizer.train(["the cat sat on the mat " * 50], 270)
        texts = [module.generate(["", "the cat"], 12, torch.Generator().manual_seed(1)) for _ in range(2)]
        assert texts[0] == texts[1]
        assert all(isinstance(text, str) for text in texts[0])

    def test_without_a_tokenizer(self) -> None:
        with pytest.raises(UserError, match="no tokenizer is known"):
            LanguageModule(SHAPE).generate([""], 1)


def test_window_of_one() -> None:
    """A batch that is no window is an update of its own."""
    reports = []
    for batch in (micro_batch(), Window([micro_batch()])):
        torch.manual_seed(0)
        _, recorder = fit(LanguageModule(SHAPE, schedule="constant"), [batch])
        reports.append(recorder.weights[0])
    assert torch.equal(reports[0], reports[1])
