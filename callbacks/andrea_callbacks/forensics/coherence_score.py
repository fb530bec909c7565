"""Scores whether a sample is text. The score sees a collapse to a few words, which the loss does not.

of 100 points   35  distinct pairs of neighbouring words, both known, over all pairs
                35  distinct triples, all known, over all triples
                20  distinct known words over half the number of words
                10  distinct characters over an eighth of the number of characters

Only known words count, so that noise does not pass for variety. Only distinct ones count, so that one
repeated word does not pass for text. The known words are those of the training text. Since noise contains
short words by chance, the first three parts are multiplied by the square of the share of characters in known
words, with full marks from 60 %. A text shorter than ten words or eighty characters is scored as if it were
that long.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

SPACELESS = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f"  # Myanmar
    "\u1780-\u17ff"  # Khmer
    "\u3040-\u30ff"  # Hiragana, Katakana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Han
    "\U00020000-\U0003134f"
)
"""Scripts without spaces between words. Their units are pairs of neighbouring characters."""

_RUNS = re.compile(rf"[{SPACELESS}]+|[^\W\d_{SPACELESS}]+")
_SPACELESS = re.compile(rf"[{SPACELESS}]")

SHORTEST_WORDS = 10
SHORTEST_CHARACTERS = 80

FULL_WORDS = 0.5
"""Ratio of distinct known words to words that earns full marks. Real text repeats its small words."""

FULL_COVERAGE = 0.6
"""Share of characters, without spaces, in known words that earns full marks. Random bytes have about 0.2."""

FULL_CHARACTERS = 1 / 8
"""Ratio of distinct characters to characters that earns full marks, over at most 400 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coherence:
    """The score of a text and its parts, in points."""

    bigrams: float
    """Of 35."""
    trigrams: float
    """Of 35."""
    words: float | None
    """At most 20; None without known words, when the other parts make up the score."""
    characters: float
    """Of 10."""

    @property
    def score(self) -> float:
        """Of 100."""
        rest = self.bigrams + self.trigrams + self.characters
        return rest / 0.8 if self.words is None else rest + self.words


def units(text: str) -> list[str]:
    """Return the words of a text in lower case; for scripts without spaces, pairs of neighbouring characters.

    >>> units("The cat, os.path: 3 cats")
    ['the', 'cat', 'os', 'path', 'cats']
    >>> units("学習率 of 0.1")
    ['学習', '習率', 'of']
    """
    found: list[str] = []
    for run in _RUNS.findall(text):
        if _SPACELESS.match(run):
            found += [run[at : at + 2] for at in range(max(len(run) - 1, 1))]
        else:
            found.append(run.casefold())
    return found


def known_units(texts: Iterable[str]) -> set[str]:
    """Return the distinct units of texts: words, or pairs of characters."""
    return {unit for text in texts for unit in units(text)}


def score_coherence(text: str, known: Collection[str] | None) -> Coherence:
    """Score a text.

    Args:
        text: A sample of a few hundred characters.
        known: The result of `known_units` for the training text, as a set for speed. With None, any word
            counts, and noise passes for variety.
    """
    words = units(text)
    is_known = [True] * len(words) if known is None else [word in known for word in words]
    weight = min(_coverage(text, words, is_known) / FULL_COVERAGE, 1.0) ** 2
    distinct = {word for word, is_one in zip(words, is_known, strict=True) if is_one}
    characters = text[:400]
    variety = len(set(characters)) / (FULL_CHARACTERS * max(len(characters), SHORTEST_CHARACTERS))
    full_words = FULL_WORDS * max(len(words), SHORTEST_WORDS)
    return Coherence(
        bigrams=35.0 * weight * _diversity(words, is_known, 2),
        trigrams=35.0 * weight * _diversity(words, is_known, 3),
        words=None if known is None else 20.0 * weight * min(len(distinct) / full_words, 1.0),
        characters=10.0 * min(variety, 1.0),
    )


def _coverage(text: str, words: Sequence[str], is_known: Sequence[bool]) -> float:
    """Return the share of characters, without spaces, that are in known words."""
    characters = sum(not character.isspace() for character in text)
    covered = sum(
        1 if _SPACELESS.match(word) else len(word)  # a pair shares its second character with the next
        for word, is_one in zip(words, is_known, strict=True)
        if is_one
    )
    return min(covered / max(characters, 1), 1.0)


def _diversity(words: Sequence[str], is_known: Sequence[bool], size: int) -> float:
    """Return distinct runs of known words over all runs of `size` words."""
    count = len(words) - size + 1
    runs = {tuple(words[at : at + size]) for at in range(count) if all(is_known[at : at + size])}
    return len(runs) / (max(len(words), SHORTEST_WORDS) - size + 1)
