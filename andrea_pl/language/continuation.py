"""Continues prompts with a network and its tokenizer; each text starts where its prompt ends."""

from collections.abc import Sequence

import torch

from andrea_pl.data.store.tokenizer import TextTokenizer
from andrea_pl.network import RoPELanguageModel, Sampling, generate


def continue_texts(
    network: RoPELanguageModel,
    tokenizer: TextTokenizer,
    prompts: list[str],
    max_new_tokens: int,
    generator: torch.Generator | None,
    sampling: Sampling | None,
) -> list[str]:
    """Return a continuation of each prompt; see `LanguageModule.generate`."""
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    rows = generate(
        network,
        [[tokenizer.end_id, *ids] for ids in encoded],
        max_new_tokens,
        sampling,
        end_id=tokenizer.end_id,
        usable_ids=tokenizer.vocab_size,
        generator=generator,
    )
    return [
        continuation(tokenizer, prompt, ids, row)
        for prompt, ids, row in zip(prompts, encoded, rows, strict=True)
    ]


def continuation(tokenizer: TextTokenizer, prompt: str, ids: Sequence[int], new_ids: Sequence[int]) -> str:
    """Return the text of new ids, so that the given prompt followed by this text is the whole text.

    Many tokenizers drop the space before the first id that they decode. So prompt and new ids are decoded
    together. If that does not reproduce the prompt, for example because the tokenizer changes case, the text
    after the prompt's own decoding is returned. A space at the seam appears only once.

    Args:
        tokenizer: The tokenizer of `ids` and `new_ids`.
        prompt: The continued text.
        ids: The prompt's ids, without the token that starts a document.
        new_ids: The ids that the model added.
    """
    whole = tokenizer.decode([*ids, *new_ids])
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    alone = tokenizer.decode(ids)
    pairs = zip(whole, alone, strict=False)
    shared = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(whole), len(alone)))
    text = whole[shared:]
    has_lost_space = prompt[-1:].isspace() and not alone[-1:].isspace()
    return text[1:] if has_lost_space and text[:1].isspace() else text
