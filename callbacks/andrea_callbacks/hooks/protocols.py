"""What a module, a batch, a strategy, a datamodule or a callback may offer here.

All of it is optional and found by name alone. A batch may be a mapping, and of its keys these are read:
`input_ids` (B, S) int, `labels` (B, S) int, `valid_mask` (B, S) bool, true where a token is no padding,
`num_tokens` int, the labels that count, and `source_id`, `document_id`, `offset` (B,) int.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from andrea_callbacks.numerics.gradient_norm import GradientNorm


@runtime_checkable
class ReportsUpdates(Protocol):
    """A module that measures its own updates; callbacks take its figures instead of computing them again.

    It hands every report to `publish_report`, in the order of updates, each once its outcome is known.
    """

    update_report: Mapping[str, Any] | None
    """The last report published, None before the first: an `UpdateReport`, or a mapping with its fields."""


def reports_updates(module: object) -> bool:
    """Say whether a module reports its updates; one that has another thing by that name does not."""
    if not isinstance(module, ReportsUpdates):
        return False
    report: Any = module.update_report
    return report is None or isinstance(report, Mapping)


@runtime_checkable
class FinalizesUpdates(Protocol):
    """A module that may learn of an update's outcome after its training step."""

    def finalize_update(self) -> None:
        """Wait for the outcome of the last update, and publish its report."""
        ...


@runtime_checkable
class TakesReports(Protocol):
    """A callback or a datamodule that follows a module's updates."""

    def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
        """Take an `UpdateReport`, which is a mapping too; `report["update"]` is its step."""
        ...


@runtime_checkable
class RefusesUpdates(Protocol):
    """A module that decides about its updates, and can be told that one must change nothing."""

    def refuse_update(self, fault: str) -> None:
        """Treat the update that is about to step as not finite, because of `fault`, a tensor's name."""
        ...


@runtime_checkable
class HoldsMicroBatches(Protocol):
    """A batch that consists of several micro-batches, all of one update."""

    @property
    def micro_batches(self) -> Sequence[Any]:
        """The micro-batches, in the order in which they are run."""
        ...


def micro_batches_of(batch: Any) -> list[Any]:
    """Return the micro-batches of a batch: itself, unless it holds several."""
    try:
        return list(batch.micro_batches) if isinstance(batch, HoldsMicroBatches) else [batch]
    except Exception:  # a batch of somebody's own, whose attributes raise
        return [batch]


@runtime_checkable
class SequenceLosses(Protocol):
    """A module that gives each sequence's loss, so that an update can be attributed to its sequences."""

    def sequence_losses(self, micro_batch: Any) -> Tensor:
        """Return (B,) losses with their graph; up to a factor, their sum over an update is its loss."""
        ...


@runtime_checkable
class SumsLosses(Protocol):
    """A module that gives a micro-batch's loss, where it does not tell sequences apart."""

    def loss_sum(self, micro_batch: Any) -> Tensor:
        """Return the summed loss, 0-d, with its graph."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """A module that counts the labels of a micro-batch."""

    def count_tokens(self, micro_batch: Any) -> int | Tensor:
        """Return how many labels count: an int, or a 0-d tensor."""
        ...


@runtime_checkable
class SaysFlops(Protocol):
    """A module that says what a token costs."""

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of forward and backward pass for one valid token."""
        ...


@runtime_checkable
class HasHyperparameters(Protocol):
    """A module or datamodule that says how it was made, in numbers and words."""

    @property
    def hyperparameters(self) -> Mapping[str, int | float | str | bool]:
        """Names and values."""
        ...


@runtime_checkable
class NamesSources(Protocol):
    """A datamodule of several sources of text."""

    @property
    def source_names(self) -> Sequence[str]:
        """Names; the position is the `source_id` of a batch."""
        ...


@runtime_checkable
class DescribesDocuments(Protocol):
    """A datamodule that knows where a document is from."""

    def describe(self, document_id: int) -> str:
        """Return the place, such as file and line."""
        ...


@runtime_checkable
class LocatesText(Protocol):
    """A datamodule that knows where in a document a sequence is from."""

    def locate(self, document_id: int, offset: int) -> str:
        """Return the place of the token `offset` of a document, such as file and line."""
        ...


@runtime_checkable
class MixesSources(Protocol):
    """A datamodule that mixes sources by weights, and changes these from phase to phase."""

    def source_figures(self, update: int) -> Mapping[str, Any]:
        """Return what is known of an update that was just reported; nothing where sources are not mixed.

        Keys: `phase` int, from 1; `phase_length` in updates; and by name of the source `weight`, `epochs`
        gone through so far, and `reward`, where the update gave one.
        """
        ...


@runtime_checkable
class KnowsWords(Protocol):
    """A datamodule that knows the words of its training text."""

    def known_words(self) -> Collection[str]:
        """Return what `andrea_callbacks.coherence_gate.units` makes of the training text, each once."""
        ...


@runtime_checkable
class DecodesTokens(Protocol):
    """A tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        ...


@runtime_checkable
class MeasuresGradients(Protocol):
    """A strategy or a module that measures gradients itself."""

    def gradient_norm(self, optimizer: Optimizer) -> GradientNorm:
        """Return norms and non-finite counts of the gradients; kept until a gradient changes."""
        ...


@runtime_checkable
class ClipsGradients(MeasuresGradients, Protocol):
    """A strategy that clips gradients too."""

    def clip_gradients(self, optimizer: Optimizer, max_norm: float, skip: Tensor | None = None) -> Tensor:
        """Clip the gradients, at the latest in the optimizer's next step, and return the coefficient, 0-d.

        With `skip`, 0-d float32, the device skips that step where it is 1: nothing changes.
        """
        ...


@runtime_checkable
class GeneratesText(Protocol):
    """A module that continues text."""

    def generate(
        self, prompts: list[str], max_new_tokens: int, generator: torch.Generator | None = None
    ) -> list[str]:
        """Return a continuation of each prompt; an empty prompt starts a document."""
        ...
