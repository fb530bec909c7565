r"""Finds places where a long text can be cut so that its pieces have the same ids as the whole.

A text is cut only where the tokenizer's pre-tokenizer surely ends a word, whatever comes before and after.
Such places are known for these tokenizers:

- The byte-level expression of GPT-2, and ours, which also ends runs of `LONGEST_RUN` characters: between a
  character that is no white space and one that is. No alternative of the expression goes on from the first
  to the second, none looks behind itself, and none that ends before the first looks further than to it.
- The expressions of GPT-4, Llama 3 and Qwen: the same where the white space is a space, because punctuation
  may keep line ends; and between \n and a letter or digit.
- Words of BERT: as for GPT-2. They are split at white space in any case.
- Metaspace, and byte-level with a prefix space: only before a space.

With our expression the end of a word also works, once the following text is longer than a word can be. This
keeps runs without white space, or of only white space, in bounded pieces. Text for other tokenizers is not
cut: their pre-tokenizer is unknown, or a normalizer looks at the whole text.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

from tokenizers import Tokenizer

PIECE_CHARACTERS = 1 << 16
"""Approximate number of characters in a piece."""
LONGEST_RUN = 1024
"""Longest run of letters, digits, other characters or white space in one word of a learnt tokenizer."""
MARGIN = LONGEST_RUN + 2
"""How far a word of our expression can look: a space, a run and the character behind it."""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BOUNDED = GPT2.replace("+", f"{{1,{LONGEST_RUN}}}")
"""GPT-2's expression with a bounded length of runs. It gives the same words if no run is longer."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_LINE_KEEPING = {
    _CONTRACTIONS
    + rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
}
"""GPT-4 and Llama 3; Qwen 2."""

_BEFORE_SPACE = re.compile(r"(?<=\S) ")
_BEFORE_WHITE_SPACE = re.compile(r"(?<=\S)[ \t\n\r]")
_LINE_KEEPING_CUT = re.compile(r"(?<=\S) |(?<=\n)[^\W_]")
WHITE_SPACE = " \t\n\r\u00a0\u3000"
_WINDOW = 1 << 12


class TooLongPieceError(Exception):
    """A text is too long for memory and has no place to cut it."""


class Cutter:
    """Cuts long texts into pieces that a tokenizer encodes to the ids of the whole.

    Args:
        tokenizer: The tokenizer.
        definition: The contents of its `tokenizer.json`.
    """

    def __init__(self, tokenizer: Tokenizer, definition: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        added = cast("list[dict[str, Any]]", definition.get("added_tokens") or [])
        matched = [each for each in added if not each.get("special")]
        self._place = _known_place(definition)
        changes_text = matched or definition.get("normalizer") or self._place is not _BEFORE_WHITE_SPACE
        self._is_bounded = _expression(definition) == BOUNDED and not changes_text
        self._added = _breakable(matched)
        self._reach = max((len(each) - 1 for each in self._added), default=0)
        if definition.get("normalizer") and not all(
            each.isspace() and each.isascii() for each in self._added
        ):
            self._place = None  # where the added tokens are found in normalized text is not known

    @property
    def is_able(self) -> bool:
        """Whether text for this tokenizer can be cut."""
        return self._place is not None

    def pieces(self, parts: Iterable[str], most: int | None = None) -> Iterator[str]:
        """Regroup a text so that cuts do not change its ids.

        Args:
            parts: The text, cut anywhere.
            most: Maximum number of characters in a piece; None for no limit.

        Returns:
            Pieces of about `PIECE_CHARACTERS`, longer if there is no place to cut.

        Raises:
            TooLongPieceError: If a piece would be longer than `most`.
        """
        held: list[str] = []
        length = 0
        for part in _sliced(parts):
            held.append(part)
            length += len(part)
            if length < PIECE_CHARACTERS:
                continue
            if most is not None and length > most:
                raise TooLongPieceError
            cut = self._last_cut(held, length)
            if cut:
                text = "".join(held)
                yield text[:cut]
                held, length = [text[cut:]], len(text) - cut
        if length:
            yield "".join(held)

    def _last_cut(self, held: list[str], length: int) -> int:
        """Return the last place at which the text may be cut, 0 if its last part has none."""
        if self._place is None:
            return 0
        text = "".join(held if self._added else held[-2:])
        last = len(text) - self._reach  # what follows may complete an added token from there on
        first = max(last - len(held[-1]), 0)
        for end in range(last, first, -_WINDOW):
            start = max(end - _WINDOW, first, 1)
            for match in reversed(list(self._place.finditer(text, start, end))):
                if not self._breaks_added(text, match.start()):
                    return length - len(text) + match.start()
        is_endless = self._is_bounded and length > 2 * PIECE_CHARACTERS
        return self._end_of_word("".join(held)) if is_endless else 0

    def _end_of_word(self, text: str) -> int:
        """Return the end of the last word that later text cannot change."""
        words = cast(
            "list[tuple[str, tuple[int, int]]]", self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        )
        ends = (end for _, (_, end) in words if end <= len(text) - MARGIN)
        # White space before something else ends elsewhere once nothing follows it.
        return max((at for at in ends if not _is_space(text[at - 1]) or text[at] in WHITE_SPACE), default=0)

    def _breaks_added(self, text: str, at: int) -> bool:
        """Return whether an added token with white space spans a place."""
        return any(each in text[max(at - len(each) + 1, 0) : at + len(each) - 1] for each in self._added)


def _is_space(character: str) -> bool:
    r"""Return whether a character may be white space in an expression; Python's include four controls."""
    return character.isspace() and not "\x1c" <= character <= "\x1f"


def _sliced(parts: Iterable[str]) -> Iterator[str]:
    for part in parts:
        for start in range(0, len(part), PIECE_CHARACTERS):
            yield part[start : start + PIECE_CHARACTERS]


def _steps(node: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a part of the definition, or the part itself if it is not a sequence."""
    if node is None:
        return []
    return node[key] if node.get("type") == "Sequence" else [node]


def _expression(definition: dict[str, Any]) -> str | None:
    """Return the regular expression of a byte-level definition, None for other definitions."""
    steps = _steps(definition.get("pre_tokenizer"), "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel":
        return None
    if len(steps) == 1:
        return GPT2 if steps[0].get("use_regex", True) else None
    first, last = steps[0], steps[-1]
    is_plain = (
        first.get("behavior") == "Isolated" and not first.get("invert") and not last.get("use_regex", True)
    )
    if len(steps) != 2 or first.get("type") != "Split" or not is_plain:
        return None
    return first["pattern"].get("Regex")


def _known_place(definition: dict[str, Any]) -> "re.Pattern[str] | None":
    """Return an expression that matches right after each place at which a definition's text can be cut."""
    steps = _steps(definition.get("pre_tokenizer"), "pretokenizers")
    kinds = [step.get("type") for step in steps]
    normalizer = cast("dict[str, Any]", definition.get("normalizer") or {}).get("type")
    words_of_bert = (["BertPreTokenizer"], ["Whitespace"], ["WhitespaceSplit"])
    if normalizer in (None, "BertNormalizer") and kinds in words_of_bert:
        return _BEFORE_WHITE_SPACE
    if normalizer not in (None, "NFC"):  # NFC composes nothing with white space
        return None
    if kinds == ["Metaspace"] and steps[0].get("split", True) and normalizer is None:
        return _BEFORE_SPACE
    expression = _expression(definition)
    if expression and steps[-1].get("add_prefix_space"):  # what begins with a space gets no other
        return _BEFORE_SPACE if expression in (GPT2, BOUNDED, *_LINE_KEEPING) else None
    if expression in (GPT2, BOUNDED):
        return _BEFORE_WHITE_SPACE
    return _LINE_KEEPING_CUT if expression in _LINE_KEEPING else None


def _breakable(added: list[dict[str, Any]]) -> list[str]:
    """Return an expression for added tokens with their adjacent white space, which a cut could break."""
    contents: list[str] = []
    for each in added:
        content: str = each["content"]
        if any(character.isspace() for character in content):
            contents.append(content)
        if each.get("rstrip"):
            contents += [content + space for space in WHITE_SPACE]
        if each.get("lstrip"):
            contents += [space + content for space in WHITE_SPACE]
    return contents
