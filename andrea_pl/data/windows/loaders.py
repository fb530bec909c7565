"""The loader of windows: sized, lazy, resumable at any window, sharded over the ranks."""

import hashlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from andrea_pl.data.windows.dataset import FILLER, DynamicPaddingCollator, Item, MicroBatch
from andrea_pl.data.windows.window import EpochCursor, Window, WindowSampler, pack, shard_window
from andrea_pl.errors import UserError


class WindowReader(Dataset[Window]):
    """Reads, cuts and collates the window of given sequences, for one rank.

    Args:
        dataset: The sequences.
        lengths: (number of sequences,) tokens in each.
        collator: Makes a micro-batch from items.
        micro_batch_tokens: Maximum number of padded tokens in a micro-batch.
        micro_batch_sequences: Maximum number of sequences in a micro-batch, None for no limit.
        rank: Rank of this process.
        world_size: Number of ranks.
    """

    def __init__(
        self,
        dataset: Dataset[Item],
        lengths: NDArray[np.int64],
        collator: DynamicPaddingCollator,
        micro_batch_tokens: int,
        micro_batch_sequences: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.dataset = dataset
        self.lengths = lengths
        self.collator = collator
        self.micro_batch_tokens = micro_batch_tokens
        self.micro_batch_sequences = micro_batch_sequences
        self.rank = rank
        self.world_size = world_size

    def __getitem__(self, chosen: NDArray[np.int64]) -> Window:
        """Return the window of the sequences with these numbers, cut for this rank."""
        shares = shard_window(
            self.lengths[chosen], self.micro_batch_tokens, self.micro_batch_sequences, self.world_size
        )
        return Window(self._collate([int(chosen[place]) for place in part]) for part in shares[self.rank])

    def _collate(self, numbers: Sequence[int]) -> MicroBatch:
        return self.collator([self.dataset[number] for number in numbers] or [FILLER])


class TextWindowLoader:
    """Yields windows, epoch after epoch.

    Args:
        reader: Makes the windows.
        sampler: Decides which sequences make which window.
        num_workers: Number of processes that read ahead; 0 reads in this process.
        prefetch_factor: Number of windows that each process reads ahead.
        pin_memory: Whether to put micro-batches in pinned memory.
        epoch: The epoch that iteration starts with.
        limit: Number of windows per epoch, if the trainer uses fewer than there are.
        text: A checksum of the text, which a resume compares.
    """

    def __init__(
        self,
        reader: WindowReader,
        sampler: WindowSampler,
        num_workers: int = 0,
        pin_memory: bool = False,
        epoch: int = 0,
        limit: int | None = None,
        prefetch_factor: int = 2,
        text: str | None = None,
    ) -> None:
        self.reader = reader
        self.text = text
        self.window_sampler = sampler  # an attribute `sampler` would make Lightning think of a DataLoader's
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.pin_memory = pin_memory
        self.limit = limit
        self._cursor = EpochCursor(epoch)

    def __len__(self) -> int:
        """Return the number of windows in an epoch."""
        return self.window_sampler.windows_per_epoch

    def __iter__(self) -> Iterator[Window]:
        """Yield windows from the current state on. Nothing happens before the first is requested."""
        stop = len(self) if self.limit is None else min(self.limit, len(self))
        self._cursor.begin(stop)
        keys = self.window_sampler.plan(self._cursor.epoch, self._cursor.delivered, stop)
        loader = build_loader(self.reader, keys, self.num_workers, self.pin_memory, self.prefetch_factor)
        for window in loader:
            self._cursor.delivered += 1
            self.window_sampler.deliver()
            yield window

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, delivered windows, the settings of the order, and the sampler's state."""
        place = {**self._cursor.state_dict(), "windows_per_epoch": len(self)}
        return {**place, "order": self._order(), "sampler": self.window_sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            UserError: If an epoch had another number of windows then, because text or settings have changed.
        """
        if state["windows_per_epoch"] != len(self):
            raise UserError(
                f"the checkpoint's epoch has {state['windows_per_epoch']} windows, this run's has "
                f"{len(self)}: text, block_size, sequences_per_update or `curriculum`, its "
                "updates_per_epoch perhaps, changed; put them back, or start "
                "from the weights alone with `init_from`"
            )
        if state["order"] != self._order():
            here, there = self._order(), state["order"]
            names = [name for name in here | there if here.get(name) != there.get(name)]
            were, are = ({name: each.get(name) for name in names} for each in (there, here))
            raise UserError(
                f"the checkpoint's order of windows comes from {were}, this run's from {are}: `seed`, "
                "`shuffle`, `sequences_per_update`, `curriculum`, a source's option, or the text "
                "changed; put them back, or start from the weights alone with `init_from`"
            )
        self._cursor.load_state_dict(state)
        self.window_sampler.load_state_dict(state.get("sampler", {}))

    def _order(self) -> dict[str, Any]:
        """Return the settings that decide the order of sequences."""
        lengths = hashlib.sha256(np.ascontiguousarray(self.reader.lengths).tobytes()).hexdigest()[:16]
        return {**self.window_sampler.settings(), "lengths": lengths, "text": self.text}


class MicroBatchLoader:
    """Yields every sequence once, in micro-batches of similar lengths, for evaluation.

    The micro-batches come in a fixed random order, so that the first few are a fair sample.

    On several ranks the micro-batches are distributed without repeats. A rank with one micro-batch less gets
    one without labels, so that all ranks take equally many steps.

    Args:
        reader: Provides dataset, lengths, collator and sizes.
        num_workers: Number of processes that read ahead.
        pin_memory: Whether to put micro-batches in pinned memory.
    """

    def __init__(self, reader: WindowReader, num_workers: int = 0, pin_memory: bool = False) -> None:
        self.reader = reader
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        cut = pack(reader.lengths, reader.micro_batch_tokens, reader.micro_batch_sequences)
        order = cast("list[int]", np.random.default_rng(0).permutation(len(cut)).tolist())
        cut = [cut[number] for number in order]
        self._share: list[list[int]] = cut[reader.rank :: reader.world_size]
        self._share += [[]] * (-(-len(cut) // reader.world_size) - len(self._share))

    def __len__(self) -> int:
        """Return the number of micro-batches of this rank."""
        return len(self._share)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches."""
        reader = _ShareReader(self.reader, self._share)
        return iter(build_loader(reader, list(range(len(self))), self.num_workers, self.pin_memory))


class _ShareReader(Dataset[MicroBatch]):
    def __init__(self, reader: WindowReader, share: list[list[int]]) -> None:
        self.reader = reader
        self.share = share

    def __getitem__(self, index: int) -> MicroBatch:
        return self.reader.collator([self.reader.dataset[number] for number in self.share[index]] or [FILLER])


def build_loader(
    dataset: Dataset[Any], keys: Iterable[Any], num_workers: int, pin_memory: bool, prefetch_factor: int = 2
) -> DataLoader[Any]:
    """Return a loader that reads `keys` in order, without using the global random generator."""
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=cast(Any, keys),
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        pin_memory=pin_memory,
        collate_fn=_as_it_is,
        generator=torch.Generator(),
        worker_init_fn=_leave_signals_to_the_run if num_workers else None,
    )


def _leave_signals_to_the_run(worker: int) -> None:
    """Keep a signal that is sent to all processes of a run from ending a worker before the run ends.

    Ignores SIGINT and SIGHUP, and also SIGTERM unless the run itself sends it to stop this worker.
    """
    del worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGHUP"):  # not on Windows
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # not on macOS
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_end_when_the_run_says_so, args=(os.getppid(),), daemon=True).start()


def _end_when_the_run_says_so(run: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != run:
        continue
    os._exit(128 + signal.SIGTERM)


def _as_it_is(item: Any) -> Any:
    return item
