"""A decoder-only transformer: pre-norm, causal attention with rotary positions, final norm.

B batch, S sequence, V vocabulary, D width, H heads, K head width, N tokens in the flat list, T valid tokens.

    ids (B, S) -> embedding (N, D) -> blocks (N, D) -> norm (N, D) -> output matrix (N, V)
    block: x + attention(norm(x)), then x + feed_forward(norm(x))
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from andrea_pl.errors import UserError
from andrea_pl.network.cache import KeyValueCache
from andrea_pl.network.config import TransformerConfig
from andrea_pl.network.layout import TokenLayout, is_right_padded, masked_layout, select_rows

RMS_NORM_EPS = 1e-6
LAYER_NORM_EPS = 1e-5


class FeedForward(nn.Module):
    """The position-wise layer of a block: GELU (Hendrycks and Gimpel, 2016) or SwiGLU (Shazeer, 2020).

    Args:
        config: Takes `d_model`, `feed_forward_width`, `activation` and `bias`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gated = config.activation == "swiglu"
        width = config.feed_forward_width
        self.expand = nn.Linear(config.d_model, 2 * width if self.gated else width, bias=config.bias)
        self.contract = nn.Linear(width, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, D) to (…, D)."""
        hidden = self.expand(x)
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            return self.contract(F.silu(gate) * hidden)
        return self.contract(F.gelu(hidden))


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al., 2021), in the two-halves layout.

    Args:
        head_width: K, even.
        block_size: Number of positions.
        theta: Base of the frequencies.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, block_size: int, theta: float) -> None:
        super().__init__()
        frequencies = theta ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
        angles = torch.outer(torch.arange(block_size, dtype=torch.float64), frequencies)
        self.register_buffer("cos", angles.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sin", angles.sin().to(torch.get_default_dtype()), persistent=False)

    def tables(self, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, each (1 or B, S, 1, K / 2), for the positions of a layout."""
        if layout.positions is None:
            return self.cos[None, : layout.length, None], self.sin[None, : layout.length, None]
        return self.cos[layout.positions][:, :, None], self.sin[layout.positions][:, :, None]


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + K/2) of (B, S, H, K) by the angle of its position."""
    cos, sin = (table.to(x.dtype) for table in tables)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention in which no token sees a later one, through `scaled_dot_product_attention`.

    Args:
        config: Takes `d_model`, `n_heads`, `dropout` and `bias`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=config.bias)
        self.out = nn.Linear(config.d_model, config.d_model, bias=config.bias)

    def forward(
        self,
        x: Tensor,
        layout: TokenLayout,
        tables: tuple[Tensor, Tensor],
        cache: KeyValueCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Map (N, D) to (N, D)."""
        rows = cast(Tensor, layout.pad(self.qkv(x)).unflatten(-1, (3, self.n_heads, -1)))
        query = rotate(rows[:, :, 0], tables).transpose(1, 2)
        key = rotate(rows[:, :, 1], tables).transpose(1, 2)
        value = rows[:, :, 2].transpose(1, 2)
        if cache is not None:
            key, value = cache.append(layer, key, value)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=layout.mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=layout.causal and layout.mask is None,
        )
        return self.out(layout.unpad(mixed.transpose(1, 2).flatten(2)))


def build_norm(config: TransformerConfig) -> nn.Module:
    """Return the norm that a configuration names, over the last dimension of width D."""
    if config.norm == "rms":
        return nn.RMSNorm(config.d_model, eps=RMS_NORM_EPS, elementwise_affine=config.norm_weight)
    return nn.LayerNorm(config.d_model, LAYER_NORM_EPS, config.norm_weight, config.bias)


class TransformerBlock(nn.Module):
    """One pre-norm block (Xiong et al., 2020): attention, then feed-forward, each added to its input."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = CausalSelfAttention(config)
        self.feed_forward_norm = build_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        layout: TokenLayout,
        tables: tuple[Tensor, Tensor],
        cache: KeyValueCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Map (N, D) to (N, D)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), layout, tables, cache, layer))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class RoPELanguageModel(nn.Module):
    """A causal language model over token ids.

    Args:
        config: The shape.

    Example:
        >>> config = TransformerConfig(vocab_size=32, block_size=8, d_model=32, n_heads=4, n_layers=1)
        >>> RoPELanguageModel(config)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 32])
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, self.block_size = config.sizes
        self.embedding = nn.Embedding(self.vocab_size, config.d_model)
        self.rotary = RotaryEmbedding(config.head_width, self.block_size, config.rope_theta)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.final_norm = build_norm(config)
        self.output = nn.Linear(config.d_model, self.vocab_size, bias=False)
        self._initialize()
        if config.tie_output:
            self.output.weight = self.embedding.weight

    def _initialize(self) -> None:
        residual_std = self.config.init_std / (2 * self.config.n_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                is_residual = name.endswith(("attention.out.weight", "feed_forward.contract.weight"))
                nn.init.normal_(parameter, std=residual_std if is_residual else self.config.init_std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self,
        input_ids: Tensor,
        valid_mask: Tensor | None = None,
        *,
        token_index: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Predict the next token at every position, or at chosen ones.

        Args:
            input_ids: (B, S) int64, S at most `block_size`.
            valid_mask: (B, S) bool, false for padding; None without padding. Right padding uses plain causal
                attention, since no valid query sees a later key. Other padding is masked. The host decides
                between the two; on an accelerator use `token_index`, which does not wait.
            token_index: (T,) int64, as for `hidden_states`.
            chosen: (C,) int64, distinct: the tokens to predict from, as indices into the T tokens of
                `token_index`, or else into all B * S.

        Returns:
            Logits (B, S, V); those at invalid positions are finite but meaningless. With `chosen` they are
            (C, V), with only `token_index` (T, V).

        Raises:
            UserError: If the sequence is longer than `block_size`, or an id is out of range (checked on the
                CPU, unless compiled).
        """
        hidden = self.hidden_states(input_ids, valid_mask, token_index)
        if chosen is not None:
            hidden = select_rows(hidden, chosen)
        logits = self.logits(hidden)
        return logits.view(*input_ids.shape, -1) if token_index is None and chosen is None else logits

    def hidden_states(
        self, input_ids: Tensor, valid_mask: Tensor | None = None, token_index: Tensor | None = None
    ) -> Tensor:
        """Return the last layer's normalized states, without the projection to the vocabulary.

        Args:
            input_ids: (B, S) int64.
            valid_mask: (B, S) bool, as for `forward`. Ignored if `token_index` is given.
            token_index: (T,) int64, indices of the valid tokens in the flattened *right-padded* batch. With
                it, padding takes part only in attention, and only these tokens are returned.

        Returns:
            (T, D) with `token_index`, (B * S, D) without.
        """
        batch, length = input_ids.shape
        self._check(input_ids)
        if token_index is not None:
            layout = TokenLayout(batch=batch, length=length, index=token_index)
        elif valid_mask is None or is_right_padded(valid_mask):
            layout = TokenLayout(batch=batch, length=length)
        else:
            layout = masked_layout(valid_mask)
        flat = input_ids.flatten()
        return self.run_blocks(flat if token_index is None else flat[token_index], layout)

    def run_blocks(self, ids: Tensor, layout: TokenLayout, cache: KeyValueCache | None = None) -> Tensor:
        """Map the ids (N,) of a layout to normalized states (N, D), reading and filling a cache."""
        tables = self.rotary.tables(layout)
        x = self.dropout(self.embedding(ids))
        for layer, block in enumerate(self.blocks):
            if self.config.activation_checkpointing and self.training and torch.is_grad_enabled():
                x = cast(Tensor, checkpoint(block, x, layout, tables, use_reentrant=False))
            else:
                x = block(x, layout, tables, cache, layer)
        return self.final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Project states (…, D) to the vocabulary (…, V)."""
        return self.output(hidden)

    def count_parameters(self) -> int:
        """Return the number of trainable parameters, shared ones once."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def _check(self, input_ids: Tensor) -> None:
        if input_ids.shape[1] > self.block_size:
            raise UserError(
                f"a sequence of {input_ids.shape[1]} tokens is longer than "
                f"block_size={self.block_size}; cut it or raise block_size"
            )
        if torch.compiler.is_compiling():
            return  # to read numbers would cut the graph; embedding itself refuses such an id
        if input_ids.device.type == "cpu" and input_ids.numel():
            low, high = int(input_ids.min()), int(input_ids.max())
            if low < 0 or high >= self.vocab_size:
                raise UserError(
                    f"token id {low if low < 0 else high} is outside 0 … {self.vocab_size - 1}; "
                    f"vocab_size must be at least {high + 1}, or the text was prepared with another tokenizer"
                )


def flops_per_token(network: RoPELanguageModel) -> float:
    """Return the floating-point operations per token of forward and backward pass, 6N + 12LDS/2.

    N is the number of multiplying weights (all but the embedding's). Attention is causal over sequences of
    `block_size`; shorter ones cost less (Chowdhery et al., 2022, appendix B, halved for the causal mask).
    """
    config = network.config
    vocab_size, block_size = config.sizes
    weights = sum(each.numel() for each in network.parameters() if each.ndim > 1)
    if not config.tie_output:
        weights -= vocab_size * config.d_model
    return 6.0 * weights + 6.0 * config.n_layers * config.d_model * block_size
