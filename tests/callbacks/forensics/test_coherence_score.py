"""The coherence score: collapses under 30, held-out text over 70, parts by hand."""

import random
from statistics import mean

import pytest
import yaml

from andrea_callbacks import known_units, score_coherence
from andrea_callbacks.forensics.coherence_score import units
from andrea_pl import TextDataModule
from andrea_pl.data.sources.documents import TextSource
from tests.support.commands import ROOT

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
]

CONFIG = ROOT / "configs" / "local.yaml"


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
        for part in data.corpus.parts["val"]
        for document in part.sequences
    ]
    return data.known_words(), [text for text in held_out if len(text) >= 200]


def noise(seed: int) -> list[str]:
    """Return uniform random bytes as text, in three readings."""
    drawn = bytes(random.Random(seed).randrange(256) for _ in range(400))
    return [drawn.decode("utf-8", "replace"), drawn.decode("utf-8", "ignore"), drawn.decode("latin-1")]


@pytest.mark.system
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
