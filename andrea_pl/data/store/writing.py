"""Encodes a source's documents into a store and assigns them to splits."""

from collections import Counter
from typing import Any, cast

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from tqdm import tqdm

from andrea_pl.data.sources.documents import Problems, TextSource
from andrea_pl.data.sources.token_files import token_pieces
from andrea_pl.data.store.encoding import encoded
from andrea_pl.data.store.inputs import SourceInput
from andrea_pl.data.store.learning import mark_of
from andrea_pl.data.store.settings import Preparation
from andrea_pl.data.store.token_store import StoreWriter, TokenStore, writing_store
from andrea_pl.data.store.tokenizer import TextTokenizer
from andrea_pl.data.store.versions import write_inputs
from andrea_pl.errors import UserError


def write_source(
    preparation: Preparation, each: SourceInput, tokenizer: TextTokenizer | None, seen: dict[int, str]
) -> TokenStore:
    """Write the store of a source.

    Args:
        preparation: Assigns documents to splits.
        each: The source.
        tokenizer: The tokenizer; None for token files.
        seen: The split of each document of other sources, by digest; this source's documents are added.

    Raises:
        UserError: If no document can be read, or the disk is full.
    """
    problems = Problems(preparation.on_error)
    source, entries = each.source, each.entries
    vocab_size = tokenizer.vocab_size if tokenizer else preparation.vocab_size
    splits: Counter[str] = Counter()
    repeated = crossing = 0
    with writing_store(preparation.folder / source.name, vocab_size, by_content=True) as writer:
        pieces = (
            token_pieces(source, vocab_size, problems)
            if each.is_token_file
            else encoded(source, cast(TextTokenizer, tokenizer), problems)
        )
        for tokens, size, mark, document in tqdm(
            pieces, desc=source.name, unit=" documents", disable=None, leave=False
        ):
            split = preparation.split_of(source, mark)
            repeated += mark in seen
            crossing += seen.setdefault(mark, split) != split
            splits[split] += 1
            for part in tokens:
                writer.write(part)
            writer.add(
                [],
                size=size,
                split=split,
                origin=document.origin,
                line=document.line,
                digest=mark,
            )
        made_from = {"inputs": each.stamps, "tokenizer": None if each.is_token_file else mark_of(tokenizer)}
        _finish(writer, source, made_from, problems, splits, repeated)
    write_inputs(writer.folder, entries)
    if crossing:
        rank_zero_warn(
            f"source {source.name!r}: {crossing} documents lie in another split too, because sources have a "
            "split or a val_fraction of their own; held-out losses will look better than they are"
        )
    return TokenStore(writer.folder)


def _finish(
    writer: StoreWriter,
    source: TextSource,
    made_from: dict[str, Any],
    problems: Problems,
    splits: Counter[str],
    repeated: int,
) -> None:
    if not writer.documents:
        raise UserError(
            f"source {source.name!r} has no document that could be read; {len(problems.messages)} were left "
            "out"
        )
    writer.close(
        {
            "source": source.settings(),
            **made_from,
            "splits": dict(splits),
            "repeated": repeated,
            "left_out": problems.messages,
        }
    )
    shares = ", ".join(f"{count} {split}" for split, count in sorted(splits.items()))
    rank_zero_info(f"source {source.name!r}: {writer.documents} documents ({shares}), {writer.tokens} tokens")
    if repeated:
        rank_zero_info(f"source {source.name!r}: {repeated} documents repeat an earlier one and were kept")
    if problems.messages:
        first = "; ".join(problems.messages[:3]) + ("; …" if len(problems.messages) > 3 else "")
        rank_zero_info(
            f"source {source.name!r}: left out {len(problems.messages)} that could not be read: {first}"
        )
