"""Prompts continued by a network and its tokenizer, as text that goes on where the prompt ends."""

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
    """Return the text of new ids, such that the prompt as it was given and this text belong together.

    Many tokenizers drop the space before the first id that they decode, so prompt and new ids are decoded
    together. Where that does not give the prompt back, because the tokenizer changes case, say, what follows
    the prompt's own decoding is returned; a space that both sides of the seam would have comes once.

    Args:
        tokenizer: Wrote `ids` and reads `new_ids`.
        prompt: The text that was continued.
        ids: The prompt's ids, without a token that starts the document.
        new_ids: What the model added.
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
