"""CoherenceGate: collapses score under 30, held-out text over 70, and a poisoned model is stopped."""

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger

from andrea_callbacks import CoherenceGate, IncoherenceWarning, RunEvent, known_units
from andrea_pl import LanguageModule, TextDataModule, TransformerConfig
from andrea_pl.data.sources.documents import TextSource
from tests.support.toy import RowLogger, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
]


class Poisoned(LanguageModule):
    """From update 6 on the head favours one token."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 5:
            with torch.no_grad():
                self.network.output.weight.zero_()
                self.network.output.weight[self.favourite] = 100 * self.network.final_norm.weight.sign()
                self.network.final_norm.bias = torch.nn.Parameter(torch.ones(16), requires_grad=False)


WORDS = "the model learns from every text that it reads and the loss falls while the norm is small"


def text_data(folder: Path) -> TextDataModule:
    words = [
        "the",
        "model",
        "learns",
        "from",
        "every",
        "text",
        "that",
        "it",
        "reads",
        "and",
        "the",
        "loss",
        "falls",
        "while",
        "the",
        "norm",
        "is",
        "small",
    ]
    rng = random.Random(0)
    lines = [" ".join(rng.choice(words) for _ in range(40)) for _ in range(120)]
    (folder / "text.txt").write_text("\n\n\n".join(lines))
    source = TextSource(name="t", paths=[str(folder / "text.txt")], document_separator="\n\n\n")
    return TextDataModule([source], vocab_size=300, block_size=64, sequences_per_update=4, val_fraction=0)


SMALL = TransformerConfig(vocab_size=300, block_size=64, d_model=16, n_heads=2, n_layers=1)


@pytest.mark.filterwarnings("ignore:the text gave")
def test_run_with_a_poisoned_head_is_stopped_within_two_samples(tmp_path: Path) -> None:
    data = text_data(tmp_path)
    module = Poisoned(SMALL, schedule="constant", lr=1e-5)
    module.favourite = 5  # type: ignore[assignment]
    gate = CoherenceGate(every=5, start=0, patience=2, action="stop", max_new_tokens=40)
    logger = TensorBoardLogger(tmp_path)
    trainer = build_trainer(callbacks=[gate], max_epochs=3, logger=logger)
    data.prepare_data()
    data.setup()
    assert "learns" in data.known_words()
    with pytest.warns(IncoherenceWarning, match="update 1[05]: .* under 30 .*the run stops"):
        trainer.fit(module, datamodule=data)
    assert trainer.global_step <= 15
    assert gate.last is not None
    assert gate.last < 30
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert {"coherence/score", "coherence/bigrams", "coherence/words"} <= set(events.Tags()["scalars"])
    assert "coherence/text_summary" in events.Tags()["tensors"]


TEXT = "the loss of the model fell in every epoch while its norm was small and no update was lost"
KNOWN = known_units([TEXT])


class Events(pl.Callback):
    def __init__(self) -> None:
        self.taken: list[RunEvent] = []

    def take_event(self, trainer: Any, event: RunEvent) -> None:
        self.taken.append(event)


def sample(texts: list[str]) -> Any:
    """Return a generator of texts, one each time, for any module."""
    left = iter(texts)
    return lambda module, prompts, most, generator: [next(left)] * len(prompts)


def test_warns_once_in_a_row_of_low_samples_in_a_foreign_project() -> None:
    texts = [TEXT, "loss " * 50, "loss " * 50, "loss " * 50, TEXT, "loss " * 50, "loss " * 50]
    gate = CoherenceGate(every=2, start=0, patience=2, generate=sample(texts), known=KNOWN)
    events, logger = Events(), RowLogger()
    trainer = build_trainer(
        callbacks=[gate, events], logger=logger, limit_train_batches=14, limit_val_batches=0
    )
    with pytest.warns(IncoherenceWarning) as caught:
        trainer.fit(BoringModel())
    said = [str(each.message)[:10] for each in caught if each.category is IncoherenceWarning]
    assert said == ["update 6: ", "update 14:"]
    assert [event.update for event in events.taken] == [6, 8, 14]
    low = [value < 30 for _, value in logger.series("coherence/score")]
    assert low == [False, True, True, True, False, True, True]
    assert [step for step, _ in logger.series("coherence/score")] == [2, 4, 6, 8, 10, 12, 14]


def test_start_and_accumulation_are_counted_in_updates() -> None:
    gate = CoherenceGate(every=2, start=3, generate=sample([TEXT] * 9), known=KNOWN)
    trainer = build_trainer(
        callbacks=[gate],
        logger=(logger := RowLogger()),
        accumulate_grad_batches=3,
        limit_train_batches=24,
        limit_val_batches=0,
    )
    trainer.fit(BoringModel())
    assert [step for step, _ in logger.series("coherence/score")] == [4, 6, 8]


def test_module_that_cannot_be_sampled_is_spoken_of() -> None:
    with pytest.warns(IncoherenceWarning, match=r"BoringModel has no generate\("):
        build_trainer(callbacks=[CoherenceGate()], limit_train_batches=2, limit_val_batches=0).fit(
            BoringModel()
        )


def test_patience_goes_through_a_checkpoint() -> None:
    gate = CoherenceGate(known=KNOWN)
    gate.load_state_dict({"low": 2, "last": 3.0})
    assert gate.state_dict() == {"low": 2, "last": 3.0}
