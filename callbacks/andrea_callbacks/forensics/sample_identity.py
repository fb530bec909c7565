"""Identifies the rows of a micro-batch by the project's own names, or by source, document, place and text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from andrea_callbacks.hooks.protocols import DecodesTokens, DescribesDocuments, LocatesText, NamesSources
from andrea_callbacks.numerics.host_transfer import gather_objects

DecodeFunction = Callable[[Sequence[int]], str]

NameFunction = Callable[[Any], Sequence[object]]
"""Takes a micro-batch of any kind; returns a name for each of its rows."""

Identity = dict[str, Any]
"""`rank`, `micro_batch` and `row` from 1; `unit`, where a row is text, a `sequence`; and, if known, `name`,
`source`, `document`, `offset`, `place`."""

SEQUENCE = "sequence"


def fields(micro_batch: Any) -> Mapping[str, Any]:
    """Return the keys and values of a micro-batch; empty if it is not a mapping."""
    return cast("Mapping[str, Any]", micro_batch) if isinstance(micro_batch, Mapping) else {}


def field(micro_batch: Any, key: str) -> Any:
    """Return a micro-batch's value for a key, None if it is missing or cannot be read."""
    try:
        return fields(micro_batch).get(key)
    except Exception:  # a mapping of somebody's own, which reads when it is asked
        return None


def row_numbers(micro_batch: Any, key: str) -> list[int] | None:
    """Return the (B,) integers under a key of a micro-batch, or None. Waits for the device."""
    found = field(micro_batch, key)
    if isinstance(found, Tensor) and found.ndim == 1 and not found.is_floating_point():
        return cast("list[int]", found.tolist())
    return None


def source_name(trainer: pl.Trainer, source: int) -> str:
    """Return the name of a source, or its number if it has no name."""
    datamodule = cast(Any, trainer).datamodule
    names = list(datamodule.source_names) if isinstance(datamodule, NamesSources) else []
    return names[source] if 0 <= source < len(names) else f"source {source}"


def row_names(micro_batch: Any, identify: NameFunction | None) -> list[str] | None:
    """Return the names that the project's own function gives to rows, None without such a function.

    If the function raises, or does not return a list, a warning says so and the report has no names.
    """
    if identify is None:
        return None
    try:
        names = identify(micro_batch)
        if isinstance(names, str):
            raise TypeError(f"it returned one text, {names!r}")
        return [str(each) for each in names]
    except Exception as error:  # the user's code
        rank_zero_warn(
            f"identify={getattr(identify, '__name__', identify)} raised {type(error).__name__}: {error}. "
            "Rows have no names in this report; identify gets a micro-batch and must return a name for "
            "each row"
        )
        return None


def identity_of(
    trainer: pl.Trainer, micro_batch: Any, number: int, row: int | None, names: Sequence[str] | None = None
) -> Identity:
    """Return the identity of a row of a micro-batch.

    Args:
        trainer: Its datamodule names sources and places.
        micro_batch: A mapping with the keys in `protocols`, or anything else.
        number: The micro-batch's number in its update, from 1.
        row: Index in the micro-batch, from 0; None for the whole micro-batch.
        names: Names of all its rows; see `row_names`.
    """
    identity: Identity = {"rank": trainer.global_rank, "micro_batch": number}
    if row is None:
        return identity
    identity["row"] = row + 1
    if _is_text(micro_batch):
        identity["unit"] = SEQUENCE
    if names is not None and row < len(names):
        identity["name"] = names[row]
    columns = {
        key: column[row]
        for key in ("source_id", "document_id", "offset")
        if (column := row_numbers(micro_batch, key)) is not None and row < len(column)
    }
    if columns.get("source_id", -1) >= 0:
        identity["source"] = source_name(trainer, columns["source_id"])
    document = columns.get("document_id", -1)
    if document >= 0:
        identity["document"] = document
        identity["offset"] = columns.get("offset", 0)
        datamodule = cast(Any, trainer).datamodule
        if isinstance(datamodule, LocatesText):
            identity["place"] = datamodule.locate(document, identity["offset"])
        elif isinstance(datamodule, DescribesDocuments):
            identity["place"] = datamodule.describe(document)
    return identity


def rows_in(micro_batch: Any, names: Sequence[str] | None) -> int | None:
    """Return the number of rows of a micro-batch, from their names or its columns; None if unknown."""
    if names is not None:
        return len(names)
    columns = (field(micro_batch, key) for key in ("document_id", "source_id", "input_ids"))
    return next((len(each) for each in columns if isinstance(each, Tensor) and each.ndim), None)


def _is_text(micro_batch: Any) -> bool:
    ids = field(micro_batch, "input_ids")
    return isinstance(ids, Tensor) and not ids.is_floating_point()


def spell(identity: Identity) -> str:
    """Return a row's identity as readable text."""
    if "name" in identity:
        return f"{identity['name']} ({_spell_place(identity)})"
    if "document" in identity:
        of = f" of {identity['source']}" if "source" in identity else ""
        return f"document {identity['document']}{of}"
    of = f" of {identity['source']}" if "source" in identity else ""
    return f"{_spell_place(identity)}{of}"


def unit_of(identity: Identity) -> str:
    """Return the word for a row: `sequence` if it is text."""
    return str(identity.get("unit", "row"))


def _spell_place(identity: Identity) -> str:
    row = f"{unit_of(identity)} {identity['row']} of " if "row" in identity else ""
    on = f" on rank {identity['rank']}" if identity.get("rank") else ""
    return f"{row}micro-batch {identity['micro_batch']}{on}"


def decoder(
    trainer: pl.Trainer, pl_module: pl.LightningModule, decode: DecodeFunction | None
) -> DecodeFunction | None:
    """Return the function that turns ids into text: the user's, or that of a tokenizer."""
    if decode is not None:
        return decode
    for owner in (pl_module, cast(Any, trainer).datamodule):
        tokenizer = getattr(owner, "tokenizer", None)
        if isinstance(tokenizer, DecodesTokens):
            return tokenizer.decode
    return None


def text_of(micro_batch: Any, row: int, decode: DecodeFunction | None) -> str | None:
    """Return the text of a sequence, None without `input_ids` or a decoder."""
    ids = sequence_ids(micro_batch, row)
    return None if ids is None or decode is None else decode(ids)


def sequence_ids(micro_batch: Any, row: int) -> list[int] | None:
    """Return the ids of a sequence without padding, None if the micro-batch has none."""
    ids, mask = field(micro_batch, "input_ids"), field(micro_batch, "valid_mask")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or row >= len(ids):
        return None
    kept = ids[row]
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        kept = kept[mask[row].bool()]
    return cast("list[int]", kept.tolist())


def gather_rows(rows: list[Any]) -> list[Any]:
    """Return the rows of all ranks on every rank. All ranks must call this together."""
    return [row for share in gather_objects(rows) for row in share]
