"""Samples from a language model with a cache of keys and values.

B prompts, C columns of context, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from andrea_pl.errors import UserError
from andrea_pl.network.cache import KeyValueCache
from andrea_pl.network.layout import TokenLayout, masked_layout
from andrea_pl.network.transformer import RoPELanguageModel

GREEDY = 1e-6
"""Temperatures below this take the likeliest token: float32 logits hardly differ by less."""

UNIFORM = 1e30
"""Upper bound of the temperature. All tokens are equally likely there, and float32 does not overflow."""

MOST_TOKENS = 1_000_000
"""Maximum number of new tokens per call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Only the k likeliest tokens may be drawn.
        top_p: Only the likeliest tokens that together reach this probability may be drawn (nucleus sampling,
            Holtzman et al., 2020).

    Raises:
        UserError: If a value is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot be sampled with."""
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature must be at least 0 and finite, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1], got {self.top_p}")


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """Choose one token a row from (B, V) logits, as (B,) int64."""
    if sampling.temperature < GREEDY:
        return logits.argmax(-1)
    logits = logits.float() / min(sampling.temperature, UNIFORM)
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if sampling.top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        reached = probabilities.cumsum(-1) - probabilities >= sampling.top_p
        reached[..., 0] = False  # the likeliest stays, however little is asked for
        logits = logits.masked_fill(reached.scatter(-1, order, reached), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


@torch.no_grad()
def generate(
    model: RoPELanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    *,
    end_id: int | None = None,
    usable_ids: int | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """Continue prompts.

    When the context fills `block_size`, its older half is dropped and the rest is read again.

    Args:
        model: The model. Its training mode is restored afterwards.
        prompts: Lists of one to `block_size` token ids.
        max_new_tokens: Maximum number of tokens to add to each prompt.
        sampling: How to choose tokens.
        end_id: The token that ends a continuation; it is not returned.
        usable_ids: Number of ids that may be chosen, if the tokenizer has fewer than the model.
        generator: Random generator on the model's device, for repeatable samples.
        use_cache: False reads the whole context for every token. The result is the same, but slower.

    Returns:
        The new tokens of each prompt.

    Raises:
        UserError: If a prompt is empty or too long, or a logit is not finite.
    """
    _check_prompts(model, prompts)
    if not 0 <= max_new_tokens <= MOST_TOKENS:
        raise UserError(f"max_new_tokens must lie in 0 … {MOST_TOKENS:,}, got {max_new_tokens}")
    was_training = model.training
    model.eval()
    try:
        context = _Context(model, prompts, use_cache)
        finished = torch.zeros(len(prompts), dtype=torch.bool, device=context.device)
        chosen: list[Tensor] = []
        while len(chosen) < max_new_tokens and not bool(finished.all()):
            logits = context.next_logits()
            if not bool(logits.isfinite().all()):
                raise UserError(
                    "the network's output is NaN or infinite, so no token can be chosen; take an earlier "
                    "checkpoint"
                )
            if usable_ids is not None:
                logits[:, usable_ids:] = float("-inf")
            token = choose(logits, sampling or Sampling(), generator)
            chosen.append(token)
            context.append(token)
            if end_id is not None:
                finished |= token == end_id
    finally:
        model.train(was_training)
    if not chosen:
        return [[] for _ in prompts]
    rows = cast("list[list[int]]", torch.stack(chosen, dim=1).tolist())
    return [row[: row.index(end_id)] if end_id in row else row for row in rows]


def _check_prompts(model: RoPELanguageModel, prompts: Sequence[Sequence[int]]) -> None:
    block_size, vocab_size = model.block_size, model.vocab_size
    if not prompts:
        raise UserError("there is no prompt")
    for prompt in prompts:
        if not prompt:
            raise UserError("a prompt has no token; start a document with its end-of-document token")
        if len(prompt) > block_size:
            raise UserError(
                f"a prompt of {len(prompt)} tokens is longer than block_size={block_size}; shorten it"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UserError(f"a prompt has a token id outside 0 … {vocab_size - 1}")


class _Context:
    """The current context, padded on the left, and the cache of the tokens already read."""

    def __init__(self, model: RoPELanguageModel, prompts: Sequence[Sequence[int]], use_cache: bool) -> None:
        self.model = model
        self.device = model.embedding.weight.device
        self.use_cache = use_cache
        width = max(map(len, prompts))
        self.ids = torch.tensor(
            [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=self.device
        )
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.valid = torch.arange(width, device=self.device) >= width - lengths[:, None]
        self.is_padded = len({len(prompt) for prompt in prompts}) > 1
        self.cache: KeyValueCache | None = None

    def append(self, token: Tensor) -> None:
        """Add one column. If the context is full, make room first."""
        block_size = self.model.block_size
        if self.ids.shape[1] == block_size:
            kept = max(1, block_size // 2)
            kept = kept - 1 if kept == block_size else kept
            self.ids, self.valid = self.ids[:, block_size - kept :], self.valid[:, block_size - kept :]
            self.cache = None
        self.ids = torch.cat((self.ids, token[:, None]), dim=1)
        self.valid = torch.cat((self.valid, self.valid.new_ones(len(token), 1)), dim=1)

    def next_logits(self) -> Tensor:
        """Return (B, V) logits of the token after the last column."""
        hidden = self._read_last() if self.cache is not None else self._read_all()
        return self.model.logits(hidden)

    def _read_all(self) -> Tensor:
        batch, length = self.ids.shape
        if self.use_cache:
            self.cache = KeyValueCache(self.model.config.n_layers, self.model.block_size)
        layout = masked_layout(self.valid) if self.is_padded else TokenLayout(batch=batch, length=length)
        return self._run(self.ids, layout).view(batch, length, -1)[:, -1]

    def _read_last(self) -> Tensor:
        layout = TokenLayout(
            batch=len(self.ids),
            length=1,
            positions=self.valid.sum(1, keepdim=True) - 1,
            mask=self.valid[:, None, None, :] if self.is_padded else None,
            causal=False,
        )
        return self._run(self.ids[:, -1:], layout)

    def _run(self, ids: Tensor, layout: TokenLayout) -> Tensor:
        hidden = self.model.run_blocks(ids.flatten(), layout, self.cache)
        if self.cache is not None:
            self.cache.advance(ids.shape[1])
        return hidden
