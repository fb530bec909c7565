"""CoherenceGate: collapses score under 30, held-out text over 70, and a poisoned model is stopped."""

import random
from pathlib import Path
from statistics import mean
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger

from andrea_callbacks import CoherenceGate, IncoherenceWarning, RunEvent, known_units, score_coherence
from andrea_callbacks.coherence import units
from andrea_pl import LanguageModule, TextDataModule, TransformerConfig
from andrea_pl.data.documents import TextSource
from toy import RowLogger, build_trainer

CONFIG = Path(__file__).parents[2] / "configs" / "local.yaml"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
]


@pytest.fixture(scope="module")
def local_text(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], list[str]]:
    """The known words and the held-out documents of the main job, with a small tokenizer."""
    sources = yaml.safe_load(CONFIG.read_text())["data"]["sources"]
    data = TextDataModule(
        [TextSource(**source) for source in sources],
        vocab_size=300,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
    )
    data.prepare_data()
    data.setup()
    held_out = [
        data.tokenizer.decode([int(token) for token in document])  # type: ignore[union-attr]
        for part in data._parts["val"]
        for document in part.sequences
    ]
    return data.known_words(), [text for text in held_out if len(text) >= 200]


def noise(seed: int) -> list[str]:
    """Return uniform random bytes as text, in three readings."""
    drawn = bytes(random.Random(seed).randrange(256) for _ in range(400))
    return [drawn.decode("utf-8", "replace"), drawn.decode("utf-8", "ignore"), drawn.decode("latin-1")]


def test_collapses_are_told_from_text(local_text: tuple[set[str], list[str]]) -> None:
    known, held_out = local_text
    assert len(held_out) > 50
    scores = [score_coherence(text[:400], known).score for text in held_out]
    assert min(scores) > 70
    assert mean(scores) > 85
    word, second, third = "module", "returns", "documentation"
    assert {word, second, third} <= known
    collapsed = [
        f"{word} " * 60,
        "a" * 400,
        "a " * 200,
        f"{word} {second} " * 30,
        f"{word} {second} {third} " * 20,
        f"{word}, {second}. {third}; " * 20,
        word,
        "",
        *(text for seed in range(20) for text in noise(seed)),
    ]
    for text in collapsed:
        assert score_coherence(text, known).score < 30, text


def test_parts_by_hand() -> None:
    """Ten words have nine pairs and eight triples; half of ten distinct words are full marks."""
    text = "the cat saw the dog and the bird saw nothing"
    known = set(text.split())
    found = score_coherence(text, known)
    assert (found.bigrams, found.trigrams, found.words) == (35.0, 35.0, 20.0)
    assert found.characters == pytest.approx(10.0)  # 14 distinct ones, 10 are an eighth of 80
    found = score_coherence("the cat the cat the cat the cat the cat", known)
    assert found.bigrams == pytest.approx(35 * 2 / 9)
    assert found.trigrams == pytest.approx(35 * 2 / 8)
    assert found.words == pytest.approx(20 * 2 / 5)
    assert found.characters == pytest.approx(6.0)  # t h e c a and the space
    # one word of ten is unknown, and with it two pairs and three triples
    found = score_coherence(text.replace("dog", "xyz"), known)
    assert found.bigrams == pytest.approx(35 * 7 / 9)
    assert found.trigrams == pytest.approx(35 * 5 / 8)
    # half of the characters are known: (0.5 / 0.6) squared; a text of two words counts as one of ten
    found = score_coherence("the xyz", known)
    assert found.words == pytest.approx(20 * 1 / 5 * (0.5 / 0.6) ** 2)
    assert found.bigrams == 0.0
    assert score_coherence(text, None).score == pytest.approx(100.0)


def test_scripts_without_spaces() -> None:
    text = "学習率を徐々に下げると、損失は滑らかに減少した。勾配の大きさも安定している。"
    known = known_units(["勾配の大きさは損失とともに減少した。", text])
    assert score_coherence(text, known).score > 70
    assert score_coherence("学習" * 50, known).score < 30
    assert score_coherence("学" * 50, known).score < 30
    assert score_coherence(text[::-1], known).score < 50  # known characters, unknown pairs
    korean = "그래디언트 노름이 크면 모델이 무너진다. 손실은 천천히 줄어든다."
    assert units(korean)[:2] == ["그래디언트", "노름이"]
    assert score_coherence(korean, known_units([korean])).score > 70


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
