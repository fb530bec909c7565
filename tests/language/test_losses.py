"""The loss of a micro-batch: against torch, with padding, smoothing and ignored labels."""

import pytest
import torch
import torch.nn.functional as F

from andrea_pl import (
    LanguageModule,
    TextDataModule,
    TextSource,
    TransformerConfig,
    UserError,
)
from tests.support.runs import micro_batch
from tests.support.toy import build_trainer

SHAPE = TransformerConfig(vocab_size=40, block_size=8, d_model=16, n_heads=2, n_layers=1)


class TestLoss:
    def test_is_the_sum_over_labels(self) -> None:
        module = LanguageModule(SHAPE)
        batch = micro_batch()
        logits = module(batch["input_ids"], batch["valid_mask"])
        expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        torch.testing.assert_close(module.loss_sum(batch), expected)
        torch.testing.assert_close(module.sequence_losses(batch).sum(), expected)

    @pytest.mark.parametrize(
        "without", [["token_index"], ["token_index", "num_tokens"], ["token_index", "valid_mask"]]
    )
    def test_optional_keys(self, without: list[str]) -> None:
        module = LanguageModule(SHAPE)
        batch = micro_batch()
        fewer = {key: value for key, value in batch.items() if key not in without}
        torch.testing.assert_close(module.loss_sum(fewer), module.loss_sum(batch))
        assert int(module.count_tokens(fewer)) == 7

    def test_masked_labels_and_left_padding(self) -> None:
        """Fine-tuning masks prompts; left-padded batches are masked for real."""
        module = LanguageModule(SHAPE)
        batch = micro_batch()
        labels = batch["labels"].clone()
        labels[0, :2] = -100
        masked = {**batch, "labels": labels, "num_tokens": int((labels != -100).sum())}
        per_row = [
            F.cross_entropy(module(batch["input_ids"][n : n + 1, :w])[0], labels[n, :w], reduction="sum")
            for n, w in enumerate((4, 1, 2))
        ]
        torch.testing.assert_close(module.sequence_losses(masked), torch.stack(per_row))
        left = {
            "input_ids": torch.tensor([[0, 0, 6], [1, 2, 3]]),
            "valid_mask": torch.tensor([[False, False, True], [True, True, True]]),
            "labels": torch.tensor([[-100, -100, 7], [2, 3, 4]]),
        }
        alone = module.loss_sum({"input_ids": torch.tensor([[6]]), "labels": torch.tensor([[7]])})
        full = module.loss_sum({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[2, 3, 4]])})
        torch.testing.assert_close(module.loss_sum(left), alone + full)

    def test_no_label_at_all_keeps_a_graph(self) -> None:
        module = LanguageModule(SHAPE)
        loss = module.loss_sum(micro_batch(labels=torch.full((3, 4), -100), num_tokens=0))
        loss.backward()
        assert float(loss.detach()) == 0.0

    def test_no_double_shift(self) -> None:
        """transformers#47394: on 0, 1, 2, 0, 1, 2, … the trained argmax at t is token t + 1."""
        module = LanguageModule(
            TransformerConfig(vocab_size=3, block_size=12, d_model=16, n_heads=2, n_layers=1), lr=1e-2
        )
        data = TextDataModule(
            [TextSource(name="t", kind="tokens", documents=[[0, 1, 2] * 4])],
            vocab_size=3,
            block_size=12,
            val_fraction=0.0,
        )
        build_trainer(max_epochs=60).fit(module, datamodule=data)
        ids = torch.tensor([[0, 1, 2, 0, 1, 2, 0]])
        assert module.eval()(ids)[0].argmax(-1).tolist() == [1, 2, 0, 1, 2, 0, 1]


def test_refused_smoothing() -> None:
    with pytest.raises(UserError, match="label_smoothing"):
        LanguageModule(SHAPE, label_smoothing=1.0)


def test_smoothing_changes_training_alone() -> None:
    smooth, plain = LanguageModule(SHAPE, label_smoothing=0.1), LanguageModule(SHAPE)
    smooth.load_state_dict(plain.state_dict())
    batch = micro_batch()
    assert float(smooth.loss_sum(batch).detach()) != pytest.approx(
        float(plain.loss_sum(batch).detach()), rel=1e-6
    )
    assert torch.equal(smooth.sequence_losses(batch), plain.sequence_losses(batch))
