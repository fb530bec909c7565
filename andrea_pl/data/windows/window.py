"""Windows: the micro-batches of one optimizer update, and how sequences are cut into them.

sampler: which sequences make update k, planned in the main process
    -> shard_window: which rank takes which, cut into micro-batches that fit
        -> collator: padded micro-batches -> Window, one batch of the training loop
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch.utils.data import DataLoader, DistributedSampler

from andrea_callbacks.numerics.host_transfer import is_distributed
from andrea_pl.errors import UserError


class Window(list[Any]):
    """The micro-batches of one update.

    Any other batch is treated as a window with one micro-batch.
    """

    @property
    def micro_batches(self) -> list[Any]:
        """The micro-batches, for callbacks."""
        return list(self)


class EpochCursor:
    """The position of a resumable loader: the epoch, and the number of its delivered windows.

    A new iteration is the next epoch. After loading a state it is the rest of that epoch, or the next one if
    nothing is left. Making an iterator changes nothing; taking its first window does.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.delivered = 0
        self.reached = 0
        """Lower bound of the next new epoch, from the progress of training."""
        self._restored = False

    def begin(self, length: int | None) -> None:
        """Start an iteration's epoch of `length` windows, None if unknown."""
        is_over = length is not None and self.delivered >= length
        if self.delivered and (is_over or not self._restored):
            self.epoch += 1
            self.delivered = 0
        if not self.delivered:
            self.epoch = max(self.epoch, self.reached)
        self._restored = False

    def finish(self) -> None:
        """Record the end of an epoch of unknown length."""
        self.epoch += 1
        self.delivered = 0

    def state_dict(self) -> dict[str, int]:
        """Return epoch and number of delivered windows."""
        return {"epoch": self.epoch, "delivered": self.delivered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.epoch = state["epoch"]
        self.delivered = state["delivered"]
        self._restored = True


class WindowSampler(Protocol):
    """Decides which sequences make which update, the same on every rank. Used only in the main process."""

    @property
    def windows_per_epoch(self) -> int:
        """Number of windows in an epoch."""
        ...

    def plan(self, epoch: int, start: int, stop: int) -> Iterator[NDArray[np.int64]]:
        """Yield the numbers of the sequences of windows `start` to `stop` of an epoch.

        Loaders that read ahead request windows ahead. After a resume, undelivered ones are requested again.
        """
        ...

    def deliver(self) -> None:
        """Record that the next planned window is handed to training."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return the settings that the windows depend on, besides the sequences' lengths."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that undelivered windows depend on, besides epoch and index."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        ...


class EpochSampler:
    """Draws the sequences of each update without replacement, in an order that depends on seed and epoch.

    Args:
        count: Number of sequences.
        sequences_per_update: Number of sequences in a window; the last window of an epoch may have fewer.
        seed: Seed of the orders.
        shuffle: Whether to shuffle each epoch.
        repeat: Whether every epoch has the order of the first, as for `overfit_batches`.
    """

    def __init__(
        self, count: int, sequences_per_update: int, seed: int = 0, shuffle: bool = True, repeat: bool = False
    ) -> None:
        self.count = count
        self.sequences_per_update = sequences_per_update
        self.seed = seed
        self.shuffle = shuffle
        self.repeat = repeat
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def windows_per_epoch(self) -> int:
        """Number of windows, including a shorter last one."""
        return -(-self.count // self.sequences_per_update)

    def plan(self, epoch: int, start: int, stop: int) -> Iterator[NDArray[np.int64]]:
        """Yield the numbers of the sequences of windows `start` to `stop` of an epoch."""
        order = self._epoch_order(0 if self.repeat else epoch)
        for index in range(start, stop):
            place = index * self.sequences_per_update
            yield order[place : place + self.sequences_per_update]

    def deliver(self) -> None:
        """Do nothing: windows do not depend on earlier deliveries."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that the windows depend on."""
        names = ("count", "sequences_per_update", "seed", "shuffle", "repeat")
        return {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: epoch and index suffice."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""
        del state

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            numbers = np.arange(self.count)
            if self.shuffle:
                numbers = np.random.default_rng((self.seed, epoch)).permutation(numbers)
            self._order = (epoch, numbers)
        return self._order[1]


def pack(lengths: Sequence[int] | NDArray[np.int64], budget: int, most: int | None = None) -> list[list[int]]:
    """Cut sequences, longest first, into micro-batches whose padded size fits a budget.

    Args:
        lengths: Number of tokens of each sequence.
        budget: Maximum number of padded tokens (rows times longest) in a micro-batch. A longer sequence gets
            its own micro-batch.
        most: Maximum number of sequences in a micro-batch, None for no limit.

    Returns:
        For each micro-batch indices into `lengths`; each index occurs once.
    """
    cut: list[list[int]] = []
    width = 0
    for position in cast("list[int]", np.argsort(-np.asarray(lengths), kind="stable").tolist()):
        rows = len(cut[-1]) + 1 if cut else 0
        if not cut or rows * width > budget or (most is not None and rows > most):
            cut.append([])
            width = int(lengths[position])
        cut[-1].append(position)
    return cut


def shard_window(
    lengths: Sequence[int] | NDArray[np.int64], budget: int, most: int | None, world_size: int
) -> list[list[list[int]]]:
    """Distribute the sequences of a window to the ranks, and cut each share into equally many micro-batches.

    Sequences are distributed longest first, so that ranks get similar work. A rank with fewer micro-batches
    gets empty ones, which the loader fills with a sequence without labels.

    Returns:
        For each rank its micro-batches, as indices into `lengths`; each index occurs once in total.
    """
    order: NDArray[np.int64] = np.argsort(-np.asarray(lengths), kind="stable")
    shares: list[list[list[int]]] = []
    for rank in range(world_size):
        share = cast("list[int]", order[rank::world_size].tolist())
        cut = pack([int(lengths[position]) for position in share], budget, most)
        shares.append([[share[position] for position in micro_batch] for micro_batch in cut])
    longest = max(len(share) for share in shares)
    return [share + [[] for _ in range(longest - len(share))] for share in shares]


class WindowLoader:
    """Turns a loader of micro-batches into a loader of windows.

    The last window of an epoch may be shorter. The order of every epoch is repeatable: a
    `torch.utils.data.DataLoader` that shuffles without its own generator gets one, seeded by `seed` and the
    epoch. The state counts delivered windows; a resume reads the inner loader again up to that window.

    Args:
        loader: Yields micro-batches. On several ranks it must be sharded: a `DataLoader` with a
            `DistributedSampler`, or any loader with a true attribute `sharded` that gives every rank equally
            many micro-batches.
        accumulate: Number of micro-batches in a window.
        seed: Seed of the order, if the inner loader does not determine it.

    Raises:
        UserError: If `accumulate` is less than 1, or on several ranks the loader is not sharded.
    """

    def __init__(self, loader: Iterable[Any], accumulate: int, seed: int = 0) -> None:
        if accumulate < 1:
            raise UserError(f"accumulate must be at least 1 micro-batch an update, got {accumulate}")
        self.loader = loader
        self.accumulate = accumulate
        self.seed = seed
        self.repeat = False
        """Whether every epoch has the order of the first, as for `overfit_batches`."""
        self.limit: int | None = None
        """Number of windows per epoch, if the trainer uses fewer than there are."""
        self._cursor = EpochCursor()
        self._start: dict[str, torch.Tensor] = {}
        self._restored: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
        self._generator: torch.Generator | None = None
        self._warn_if_short()

    def __len__(self) -> int:
        """Return the number of windows.

        Raises:
            TypeError: If the inner loader has no length.
        """
        return -(-len(cast(Sized, self.loader)) // self.accumulate)

    def __iter__(self) -> Iterator[Window]:
        """Yield windows from the current state on."""
        length = self._length()
        mid_epoch, between_epochs = self._restored
        self._restored = ({}, {})
        self._cursor.begin(length if self.limit is None or length is None else min(length, self.limit))
        self._check_sharding()
        self.set_epoch(0 if self.repeat else self._cursor.epoch)
        self._prepare_generators(mid_epoch if self._cursor.delivered else between_epochs)
        passed = self._cursor.delivered
        for number, window in enumerate(self._windows()):
            if number < passed:
                continue
            if length is None:
                # Lightning asks for one window more than it has trained on where it knows no length
                yield window
                self._cursor.delivered += 1
            else:
                self._cursor.delivered += 1
                yield window
        if length is None:
            self._cursor.finish()

    def _windows(self) -> Iterator[Window]:
        window = Window()
        for micro_batch in self.loader:
            window.append(micro_batch)
            if len(window) == self.accumulate:
                yield window
                window = Window()
        if window:
            yield window

    def reach_epoch(self, epoch: int) -> None:
        """Set the epoch of training, so that a newly made loader does not start with the first.

        A started epoch continues, and a loader that is further stays there, as in a second fit.
        """
        self._cursor.reached = epoch

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the inner loader's samplers and dataset, if they have it."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        inner = (
            self.loader,
            getattr(self.loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
            getattr(self.loader, "dataset", None),
        )
        for each in {id(part): part for part in inner}.values():
            method = getattr(each, "set_epoch", None)
            if callable(method):
                method(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, delivered windows, and the generators' states at the start of the epoch and now."""
        now = {name: generator.get_state() for name, generator in self._generators().items()}
        return {
            **self._cursor.state_dict(),
            "accumulate": self.accumulate,
            "epoch_start": dict(self._start),
            "now": now,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            UserError: If windows had another size then.
        """
        if state["accumulate"] != self.accumulate:
            raise UserError(
                f"the checkpoint was written with accumulate={state['accumulate']}, this run has "
                f"{self.accumulate}; windows would not line up: use the same value"
            )
        self._cursor.load_state_dict(state)
        self._restored = (dict(state["epoch_start"]), dict(state["now"]))

    def _length(self) -> int | None:
        try:
            return len(self)
        except (TypeError, NotImplementedError):
            return None

    def _warn_if_short(self) -> None:
        if self._length() == 1 and len(cast(Sized, self.loader)) < self.accumulate:
            warnings.warn(
                f"an epoch has {len(cast(Sized, self.loader))} micro-batches and a window takes "
                f"{self.accumulate}: every epoch is one shorter update",
                stacklevel=3,
            )

    def _check_sharding(self) -> None:
        if not is_distributed():
            return
        ranks = torch.distributed.get_world_size()
        samplers = (
            getattr(self.loader, "sampler", None),
            getattr(getattr(self.loader, "batch_sampler", None), "sampler", None),
        )
        sharded = getattr(self.loader, "sharded", False) or any(
            isinstance(each, DistributedSampler) for each in samplers
        )
        if ranks > 1 and not sharded:
            raise UserError(
                f"WindowLoader runs on {ranks} ranks and its loader is not sharded, so that all would train "
                "on the same windows; give the DataLoader a torch.utils.data.DistributedSampler, or set "
                "`sharded = True` on a loader that shards itself"
            )

    def _generators(self) -> dict[str, torch.Generator]:
        """Return the generators that decide the inner order; a DataLoader without one gets ours."""
        if not isinstance(self.loader, DataLoader):
            return {}
        loader = cast("DataLoader[Any]", self.loader)
        if self._generator is None:
            self._generator = torch.Generator()
        if loader.generator is None:
            loader.generator = self._generator
        found: dict[str, torch.Generator] = {"loader": cast(torch.Generator, loader.generator)}
        outer = cast(Any, loader)
        samplers = {"sampler": outer.sampler, "inner": getattr(outer.batch_sampler, "sampler", None)}
        for name, sampler in cast("dict[str, Any]", samplers).items():
            if not hasattr(sampler, "generator"):
                continue
            if sampler.generator is None:
                sampler.generator = self._generator
            found[name] = sampler.generator
        return found

    def _prepare_generators(self, restored: dict[str, torch.Tensor]) -> None:
        """Set every generator to its state at the epoch's start, and remember that state."""
        found = self._generators()
        if self._generator is not None:
            epoch = 0 if self.repeat else self._cursor.epoch
            self._generator.manual_seed(int(np.random.SeedSequence((self.seed, epoch)).generate_state(1)[0]))
        for name, generator in found.items():
            if name in restored and generator is not self._generator:
                generator.set_state(restored[name])
        if self.repeat and self._start:
            for name, generator in found.items():
                generator.set_state(self._start[name])
        self._start = {name: generator.get_state() for name, generator in found.items()}
