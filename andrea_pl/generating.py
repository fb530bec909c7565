"""The command `andrea generate`."""

import sys

import torch

from andrea_pl.errors import UserError
from andrea_pl.language import LanguageModule
from andrea_pl.network import Sampling
from andrea_pl.starting import shown

SEEDS = (-(2**63), 2**64 - 1)
"""The least and the largest seed that torch's generators take."""


def generate_text(
    ckpt_path: str,
    prompt: str = "",
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Continue a prompt with the model and the tokenizer of a checkpoint; nothing else is needed.

    Args:
        ckpt_path: A checkpoint that `andrea fit` wrote.
        prompt: The text to continue; empty to start a document.
        max_new_tokens: Most tokens to write; less where the document ends before.
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Draw only from the k likeliest tokens.
        top_p: Draw only from the likeliest tokens that together reach this probability.
        seed: The same seed writes the same text.
        device: Where the model runs, such as cpu or cuda.

    Raises:
        UserError: If a value is out of range, or the checkpoint cannot be used.
        NonFiniteError: If a weight of the checkpoint is NaN or infinite.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError("the prompt is not UTF-8; convert it") from error
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    if not SEEDS[0] <= seed <= SEEDS[1]:
        raise UserError(f"--seed must lie in {SEEDS[0]} … {SEEDS[1]}, got {seed}")
    module = LanguageModule.load_verified(ckpt_path)
    try:
        module.to(device)
        generator = torch.Generator(device).manual_seed(seed)
    except Exception as error:  # torch has several kinds for a device that it does not have
        reason = str(error).partition("\n")[0]
        raise UserError(f"--device {device} cannot be used here: {reason}") from error
    text = prompt + module.generate([prompt], max_new_tokens, generator, sampling)[0]
    print(shown(text, sys.stdout))
