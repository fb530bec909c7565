"""The block in a checkpoint from which a model can be rebuilt without any other file."""

import platform
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import lightning
import tokenizers
import torch
from torch import Tensor

from andrea_callbacks import NonFiniteError
from andrea_pl.data.store.tokenizer import TextTokenizer
from andrea_pl.errors import UserError
from andrea_pl.network import RoPELanguageModel, TransformerConfig
from andrea_pl.network.sizes import memory_needs
from andrea_pl.training.compiled import plain_name

KEY = "andrea_pl"
FORMAT_VERSION = 1

PREFIX = "network."
"""Prefix of the network's weights in a checkpoint of `LanguageModule`."""

LARGEST = 2**60
"""Largest size of a network in bytes; torch cannot count more."""

ANOTHER = "take another checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBlock:
    """What is needed to rebuild a model: its shape and its tokenizer."""

    network: TransformerConfig
    tokenizer: TextTokenizer | None
    """None for a model trained on token files with an unknown tokenizer."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with the versions of the libraries that wrote them."""
        return {
            "format": FORMAT_VERSION,
            "network": self.network.to_dict(),
            "tokenizer": self.tokenizer.definition if self.tokenizer else None,
            "tokenizer_fingerprint": self.tokenizer.fingerprint if self.tokenizer else None,
            "libraries": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "lightning": str(lightning.__version__),
                "tokenizers": str(tokenizers.__version__),
            },
        }


def read_block(checkpoint: Any, path: str | Path = "the checkpoint") -> ModelBlock:
    """Return the validated block of a loaded checkpoint, which may have been edited.

    Raises:
        UserError: If there is no block, a newer version wrote it, or a value has the wrong type.
    """
    if not isinstance(checkpoint, Mapping):
        raise UserError(f"{path} holds {_kind(checkpoint)}, not a checkpoint; give one that andrea fit wrote")
    block = cast("Mapping[str, Any]", checkpoint).get(KEY)
    if block is None:
        raise UserError(
            f"{path} has no block of andrea_pl; only checkpoints of LanguageModule can be used here"
        )
    if not isinstance(block, Mapping):
        raise UserError(f"{path}: its block of andrea_pl is {_kind(block)}, not a mapping; {ANOTHER}")
    block = cast("Mapping[str, Any]", block)
    version: Any = block.get("format")
    if not _fits(version, int) or version < 1:
        raise UserError(f"{path}: its block's format is {version!r:.80}, not a version number; {ANOTHER}")
    if version > FORMAT_VERSION:
        raise UserError(f"{path} is of format {version}, this version reads up to {FORMAT_VERSION}; upgrade")
    return ModelBlock(
        network=_read_network(block.get("network"), path), tokenizer=_read_tokenizer(block, path)
    )


def _read_network(fields: Any, path: str | Path) -> TransformerConfig:
    """Return the network's shape, if every field is known and of its type."""
    if not isinstance(fields, Mapping):
        raise UserError(f"{path}: its network is {_kind(fields)}, not a mapping; {ANOTHER}")
    given = cast("Mapping[Any, Any]", fields)
    types = {
        each.name: get_type_hints(TransformerConfig)[each.name]
        for each in dataclass_fields(TransformerConfig)
    }
    unknown = [str(name) for name in given if name not in types]
    if unknown:
        raise UserError(
            f"{path}: its network has {', '.join(unknown):.200}, which this version of andrea_pl does not "
            "know; a newer version wrote it: upgrade andrea_pl"
        )
    for name, value in given.items():
        if not _fits(value, types[name]):
            raise UserError(f"{path}: its network's {name} is {value!r:.80}, which cannot be; {ANOTHER}")
    required = [each.name for each in dataclass_fields(TransformerConfig) if each.default is MISSING]
    missing = [name for name in ("vocab_size", "block_size", *required) if given.get(name) is None]
    if missing:
        raise UserError(f"{path}: its network lacks {', '.join(missing)}; {ANOTHER}")
    try:
        return TransformerConfig(**given)
    except UserError as error:
        raise UserError(f"{path}: its network cannot be built: {error}") from error


def _read_tokenizer(block: Mapping[str, Any], path: str | Path) -> TextTokenizer | None:
    definition = block.get("tokenizer")
    if not definition:
        return None
    if not isinstance(definition, str):
        raise UserError(f"{path}: its tokenizer is {_kind(definition)}, not a tokenizer.json; {ANOTHER}")
    try:
        return TextTokenizer(definition)
    except UserError as error:
        raise UserError(f"{path}: its tokenizer cannot be read: {error}") from error


def read_weights(
    checkpoint: Mapping[str, Any], block: ModelBlock, path: str | Path, *, is_strict: bool = True
) -> dict[str, Tensor]:
    """Return the network's weights in a checkpoint, by the names of `RoPELanguageModel`.

    They are compared with the network's shape before anything of its size is allocated.

    Args:
        checkpoint: The loaded checkpoint.
        block: Its block.
        path: The checkpoint's path, for errors.
        is_strict: Whether missing and unexpected weights are errors.

    Raises:
        UserError: If weights are missing, unexpected, of another shape, or not numbers.
    """
    state = checkpoint.get("state_dict")
    if not isinstance(state, Mapping):
        raise UserError(f"{path} has no weights (its state_dict is {_kind(state)}); {ANOTHER}")
    weights: dict[str, Tensor] = {}
    for name, value in cast("Mapping[Any, Any]", state).items():
        plain = plain_name(name) if isinstance(name, str) else ""
        if not isinstance(name, str) or (plain.startswith(PREFIX) and not _is_weight(value)):
            raise UserError(f"{path}: {name!r:.80} in its state_dict is no tensor of real numbers; {ANOTHER}")
        if plain.startswith(PREFIX):
            weights[plain.removeprefix(PREFIX)] = value
    expected = _expected_shapes(block.network, len(weights), path)
    wrong = next(
        (name for name, each in weights.items() if expected.get(name, each.shape) != each.shape), None
    )
    if wrong is not None:
        raise UserError(
            f"{path}: {wrong} has the shape {tuple(weights[wrong].shape)}, and the checkpoint's network "
            f"{tuple(expected[wrong])}; {ANOTHER}"
        )
    for names, fault in (
        (expected.keys() - weights.keys(), "lacks"),
        (weights.keys() - expected.keys(), "has"),
    ):
        if names and is_strict:
            more = "" if fault == "lacks" else ", which its network does not have"
            raise UserError(f"{path} {fault} {_some(names)}{more}; {ANOTHER}")
    return weights


def refuse_nonfinite(weights: Mapping[str, Any], path: str | Path = "the checkpoint") -> None:
    """Refuse weights that are NaN or infinite.

    Raises:
        NonFiniteError: If a weight is not finite; the message names its tensor.
    """
    for name, each in weights.items():
        if isinstance(each, Tensor) and each.is_floating_point() and not bool(each.isfinite().all()):
            count = int((~each.isfinite()).sum())
            raise NonFiniteError(
                f"{path}: {count:,} of the {each.numel():,} weights in {name} are NaN or infinite; take an "
                "earlier checkpoint"
            )


def compare_networks(here: TransformerConfig, there: TransformerConfig) -> None:
    """Refuse a network that would compute something else with the same weights.

    Args:
        here: The module's shape.
        there: The checkpoint's shape.

    Raises:
        UserError: If a field differs that affects the computation; the message names both values.
    """
    ours, theirs = _decisive(here), _decisive(there)
    changed = [
        f"{key}: checkpoint {theirs[key]}, here {ours[key]}" for key in ours if ours[key] != theirs[key]
    ]
    if changed:
        raise UserError(
            f"the checkpoint is of another network ({'; '.join(changed)}); use its values "
            "(`vocab_size` of the data gives `network.vocab_size`)"
        )


def _decisive(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields that affect the computation. Others may differ from a checkpoint's."""
    free = {"dropout", "init_std", "activation_checkpointing", "block_size", "d_ff"}
    fields = {key: value for key, value in config.to_dict().items() if key not in free}
    return {**fields, "d_ff": config.feed_forward_width}


def refuse_other_tokenizer(data: TextTokenizer, trained: TextTokenizer | None, vocab_size: int) -> None:
    """Refuse a tokenizer of the data that is not the weights' tokenizer, or has more ids than the network.

    Raises:
        UserError: If the tokenizer does not fit; the message names both.
    """
    if trained is not None and trained.fingerprint != data.fingerprint:
        raise UserError(
            f"the data's tokenizer ({data.fingerprint[:12]}, {data.vocab_size} ids) is not the one that the "
            f"weights were trained with ({trained.fingerprint[:12]}, {trained.vocab_size} ids); set "
            "`tokenizer` to the tokenizer.json in that run's log folder"
        )
    if data.vocab_size > vocab_size:
        raise UserError(
            f"the tokenizer has {data.vocab_size} ids and the network vocab_size={vocab_size}; make them "
            "equal"
        )


def _expected_shapes(config: TransformerConfig, count: int, path: str | Path) -> dict[str, torch.Size]:
    """Return the shapes of a network's weights without allocating them; compare their number first."""
    size = sum(memory_needs(config.to_dict(), *config.sizes).values())
    if config.n_layers <= max(count, 1) and size <= LARGEST:
        with torch.device("meta"):
            return {name: each.shape for name, each in RoPELanguageModel(config).state_dict().items()}
    raise UserError(
        f"{path}: its network (vocab_size={config.vocab_size}, block_size={config.block_size}, "
        f"d_model={config.d_model}, d_ff={config.feed_forward_width}, n_layers={config.n_layers}) is not "
        f"that of its {count} weights; {ANOTHER}"
    )


def _is_weight(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.layout == torch.strided
        and value.device.type != "meta"
    )


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a field's type; a bool is no number, and a whole number is a float too."""
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_args(hint):
        return any(_fits(value, each) for each in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"of type {type(value).__name__}"


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
