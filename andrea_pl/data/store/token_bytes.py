"""Computes how many bytes of text each id of a byte-level tokenizer stands for."""

from typing import Any, cast

from tokenizers import pre_tokenizers

BYTE_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())
"""A character for each of the 256 bytes."""


def bytes_of_ids(definition: dict[str, Any], end_id: int) -> dict[int, int] | None:
    """Return the bytes of text that each id stands for, or None if a fixed count could be wrong.

    A token of the byte alphabet has one character per byte. An added token is literal text and counts its
    UTF-8 bytes. Special tokens are never encoded from text and count 0.

    The result is None if text is changed or dropped before encoding (a normalizer, a prefix space, a
    pre-tokenizer that removes something, an added token that takes adjacent white space, an alphabet that
    lacks a byte), if tokens are not written in the byte alphabet, or if an id stands for different texts.

    Args:
        definition: The contents of a `tokenizer.json`.
        end_id: Id of the end-of-document token, which stands for no text.
    """
    model = cast("dict[str, Any]", definition["model"])
    vocabulary = cast("dict[str, int]", model.get("vocab"))
    if not _keeps_text(definition) or not _is_plain_bpe(model) or not vocabulary.keys() >= BYTE_ALPHABET:
        return None
    made = _made_from_text(model)
    if not all(BYTE_ALPHABET.issuperset(token) for token in made):
        return None
    table = {index: len(token) for token, index in vocabulary.items() if token in made}
    for added in cast("list[dict[str, Any]]", definition.get("added_tokens") or []):
        index, content = added["id"], added["content"]
        if added.get("special"):
            table.setdefault(index, 0)  # also where merges make the very same token
            continue
        size = len(content.encode())
        if added.get("lstrip") or added.get("rstrip") or table.get(index, size) != size:
            return None
        table[index] = size
    return table if table.get(end_id) == 0 else None


def _keeps_text(definition: dict[str, Any]) -> bool:
    """Return whether all text reaches the model unchanged, in the byte alphabet."""
    if definition.get("normalizer") or (definition.get("decoder") or {}).get("type") != "ByteLevel":
        return False
    node = cast("dict[str, Any]", definition.get("pre_tokenizer") or {})
    *before, last = node["pretokenizers"] if node.get("type") == "Sequence" else [node]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return False
    return all(
        step.get("type") == "Digits"
        or (step.get("type") in ("Split", "Punctuation") and step.get("behavior") != "Removed")
        for step in before
    )


def _is_plain_bpe(model: dict[str, Any]) -> bool:
    affixes = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    return model.get("type") == "BPE" and not any(affixes)


def _made_from_text(model: dict[str, Any]) -> set[str]:
    """Return the tokens that the model can make from text."""
    if model.get("ignore_merges"):
        return set(model["vocab"])
    pairs = (each.split(" ") if isinstance(each, str) else each for each in model["merges"])
    return {"".join(pair) for pair in pairs} | BYTE_ALPHABET
