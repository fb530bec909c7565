"""What a module, batch, strategy, datamodule or callback may offer to the callbacks.

Everything is optional and found by name. If a batch is a mapping, these keys are read: `input_ids` (B, S)
int, `labels` (B, S) int, `valid_mask` (B, S) bool, false for padding, `num_tokens` int, the number of valid
labels, and `source_id`, `document_id`, `offset` (B,) int.
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
    """A module that measures its own updates. Callbacks use its figures instead of computing them again.

    The module hands every report to `publish_report`, in order, once the update's outcome is known.
    """

    update_report: Mapping[str, Any] | None
    """The last report published, None before the first: an `UpdateReport`, or a mapping with its fields."""


def reports_updates(module: object) -> bool:
    """Return whether a module reports its updates, and does not use the attribute for something else."""
    if not isinstance(module, ReportsUpdates):
        return False
    report: Any = module.update_report
    return report is None or isinstance(report, Mapping)


@runtime_checkable
class FinalizesUpdates(Protocol):
    """A module that may know an update's outcome only after its training step."""

    def finalize_update(self) -> None:
        """Wait for the outcome of the last update, and publish its report."""
        ...


@runtime_checkable
class TakesReports(Protocol):
    """A callback or a datamodule that follows a module's updates."""

    def take_report(self, trainer: pl.Trainer, report: Mapping[str, Any]) -> None:
        """Handle an `UpdateReport`, which is also a mapping; `report["update"]` is its step."""
        ...


@runtime_checkable
class RefusesUpdates(Protocol):
    """A module that decides about its updates and can be told to skip one."""

    def refuse_update(self, fault: str) -> None:
        """Treat the coming update as not finite, because of the tensor named `fault`."""
        ...


@runtime_checkable
class HoldsMicroBatches(Protocol):
    """A batch of several micro-batches that form one update."""

    @property
    def micro_batches(self) -> Sequence[Any]:
        """The micro-batches in order."""
        ...


def micro_batches_of(batch: Any) -> list[Any]:
    """Return the micro-batches of a batch, or the batch itself if it has none."""
    try:
        return list(batch.micro_batches) if isinstance(batch, HoldsMicroBatches) else [batch]
    except Exception:  # a batch of somebody's own, whose attributes raise
        return [batch]


@runtime_checkable
class SequenceLosses(Protocol):
    """A module that computes each sequence's loss, so that an update can be attributed to its sequences."""

    def sequence_losses(self, micro_batch: Any) -> Tensor:
        """Return (B,) losses attached to the graph. Up to a factor, their sum over an update is its loss."""
        ...


@runtime_checkable
class SumsLosses(Protocol):
    """A module that computes a micro-batch's loss, but not the loss of each sequence."""

    def loss_sum(self, micro_batch: Any) -> Tensor:
        """Return the summed loss, 0-d, attached to the graph."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """A module that counts the labels of a micro-batch."""

    def count_tokens(self, micro_batch: Any) -> int | Tensor:
        """Return the number of valid labels: an int, or a 0-d tensor."""
        ...


@runtime_checkable
class SaysFlops(Protocol):
    """A module that knows its cost per token."""

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations per valid token, in forward and backward pass."""
        ...


@runtime_checkable
class HasHyperparameters(Protocol):
    """A module or datamodule that lists its options."""

    @property
    def hyperparameters(self) -> Mapping[str, int | float | str | bool]:
        """Names and values."""
        ...


@runtime_checkable
class NamesSources(Protocol):
    """A datamodule with several text sources."""

    @property
    def source_names(self) -> Sequence[str]:
        """Names; the index is the `source_id` in batches."""
        ...


@runtime_checkable
class DescribesDocuments(Protocol):
    """A datamodule that knows where a document comes from."""

    def describe(self, document_id: int) -> str:
        """Return the place, such as file and line."""
        ...


@runtime_checkable
class LocatesText(Protocol):
    """A datamodule that knows which part of a document a sequence comes from."""

    def locate(self, document_id: int, offset: int) -> str:
        """Return the place of the token `offset` of a document, such as file and line."""
        ...


@runtime_checkable
class MixesSources(Protocol):
    """A datamodule that mixes sources by weights, which change from phase to phase."""

    def source_figures(self, update: int) -> Mapping[str, Any]:
        """Return the mixture's figures of a just reported update; empty if sources are not mixed.

        Keys: `phase` int, from 1; `phase_length` in updates; and mappings by source name: `weight`, `epochs`
        (passes so far), and `reward`, if the update gave one.
        """
        ...


@runtime_checkable
class KnowsWords(Protocol):
    """A datamodule that knows the words of its training text."""

    def known_words(self) -> Collection[str]:
        """Return the distinct `andrea_callbacks.forensics.coherence_score.units` of the training text."""
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
        """Return norms and non-finite counts of the gradients, cached until a gradient changes."""
        ...


@runtime_checkable
class ClipsGradients(MeasuresGradients, Protocol):
    """A strategy that clips gradients too."""

    def clip_gradients(self, optimizer: Optimizer, max_norm: float, skip: Tensor | None = None) -> Tensor:
        """Clip the gradients, at the latest in the optimizer's next step; return the coefficient, 0-d.

        If `skip`, 0-d float32, is 1, the device skips that step and nothing changes.
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
