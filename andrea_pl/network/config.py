"""The shape of a decoder-only transformer, checked where it is written down."""

import math
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any, Literal

from andrea_pl.errors import UserError


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """Shape and options of `RoPELanguageModel`.

    Args:
        vocab_size: Number of token ids, V. Ids are 0 … V - 1. By default a `LanguageModule` uses the data's.
        block_size: Longest sequence in tokens that attention may see. By default a `LanguageModule` uses the
            data's.
        d_model: Width of the residual stream, D. Must be a multiple of `n_heads`.
        n_heads: Number of attention heads, H. The head width `d_model / n_heads` must be even (RoPE turns
            pairs).
        n_layers: Number of transformer blocks.
        d_ff: Hidden width of the feed-forward layer; by default four times `d_model`.
        dropout: Probability of dropping an activation after each sub-layer, and an attention weight.
        activation: `gelu` (two matrices) or `swiglu` (three matrices, gated).
        norm: `layer` for LayerNorm or `rms` for RMSNorm, before each sub-layer and before the output.
        norm_weight: Whether norms have a learned scale. Without it every parameter is a matrix, as Muon
            requires.
        bias: Whether linear layers and LayerNorm have a bias.
        tie_output: Whether the output projection shares the embedding's matrix.
        rope_theta: Base of the rotary frequencies.
        init_std: Standard deviation of the initial weights; divided by sqrt(2 * n_layers) for residual
            projections.
        activation_checkpointing: Recompute each block in the backward pass instead of keeping its
            activations.

    Raises:
        UserError: If a value cannot work; the message says which one and what to change.
    """

    vocab_size: int | None = None
    block_size: int | None = None
    _: KW_ONLY
    d_model: int
    n_heads: int
    n_layers: int
    d_ff: int | None = None
    dropout: float = 0.0
    activation: Literal["gelu", "swiglu"] = "gelu"
    norm: Literal["layer", "rms"] = "layer"
    norm_weight: bool = True
    bias: bool = False
    tie_output: bool = False
    rope_theta: float = 10_000.0
    init_std: float = 0.02
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be built."""
        for name in ("vocab_size", "block_size", "d_model", "n_heads", "n_layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if self.d_ff is not None and self.d_ff < 1:
            raise UserError(f"d_ff must be at least 1, or left out for 4 * d_model, got {self.d_ff}")
        if self.d_model % self.n_heads:
            raise UserError(
                f"d_model must be a multiple of n_heads, got d_model={self.d_model} and "
                f"n_heads={self.n_heads}; the nearest d_model is "
                f"{max(1, round(self.d_model / self.n_heads)) * self.n_heads}"
            )
        if self.head_width % 2:
            raise UserError(
                f"the head width d_model / n_heads must be even for RoPE, got {self.d_model} / "
                f"{self.n_heads} = {self.head_width}; change d_model or n_heads"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout must lie in [0, 1), got {self.dropout}")
        if self.activation not in ("gelu", "swiglu"):
            raise UserError(f"activation must be 'gelu' or 'swiglu', got {self.activation!r}")
        if self.norm not in ("layer", "rms"):
            raise UserError(f"norm must be 'layer' or 'rms', got {self.norm!r}")
        if not (0 < self.rope_theta < math.inf and 0 < self.init_std < math.inf):
            raise UserError(
                "rope_theta and init_std must be positive and finite, got "
                f"{self.rope_theta} and {self.init_std}"
            )

    @property
    def missing(self) -> list[str]:
        """Names of the missing sizes, without which no network can be built."""
        return [name for name in ("vocab_size", "block_size") if getattr(self, name) is None]

    @property
    def sizes(self) -> tuple[int, int]:
        """Vocabulary size and block size.

        Raises:
            UserError: If one is missing.
        """
        if self.vocab_size is None or self.block_size is None:
            raise UserError(
                f"the network's {' and '.join(self.missing)} must be given: "
                f"TransformerConfig({', '.join(f'{name}=…' for name in self.missing)}, …)"
            )
        return self.vocab_size, self.block_size

    @property
    def head_width(self) -> int:
        """Width of one attention head, K."""
        return self.d_model // self.n_heads

    @property
    def feed_forward_width(self) -> int:
        """Hidden width of the feed-forward layer."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for a checkpoint; `TransformerConfig(**…)` reads them back."""
        return asdict(self)
