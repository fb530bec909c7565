"""Searches where a NaN or Inf came from: first in the batches, then by running the update again."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from andrea_callbacks.forensics.batch_faults import Fault, faults_in
from andrea_callbacks.forensics.nonfinite_origin import Origin, find_origin
from andrea_callbacks.forensics.options import ReportOptions
from andrea_callbacks.forensics.replay import (
    ReplayUnavailable,
    loss_function,
    replay_failed,
)
from andrea_callbacks.forensics.report import Bundle, write_bundle
from andrea_callbacks.forensics.sample_identity import (
    Identity,
    decoder,
    gather_rows,
    identity_of,
    row_names,
    rows_in,
    spell,
    text_of,
    unit_of,
)
from andrea_callbacks.hooks.terminal import warn
from andrea_callbacks.hooks.update_window import UpdateWindow
from andrea_callbacks.numerics.gradient_norm import (
    local_gradient,
    optimizer_parameters,
    real_values,
    squared_norms,
)
from andrea_callbacks.numerics.host_transfer import HostCopy, reduce_over_ranks


class NonFiniteWarning(UserWarning):
    """A NaN or Inf was seen in a loss, a gradient, a weight or the optimizer's state."""


class NonFiniteError(RuntimeError):
    """A NaN or Inf was seen; weights, optimizer state and schedule are as they were before the update."""


class Investigation:
    """Searches for the origin of a NaN or Inf and writes the report; all ranks must search together.

    Args:
        options: Those of the callback; see `FiniteGuard`.
    """

    def __init__(self, options: ReportOptions) -> None:
        self._options = options

    def search(
        self,
        trainer: pl.Trainer,
        update: int,
        fault: str,
        state: Tensor | None,
        window: UpdateWindow | None,
        sound: UpdateWindow | None,
    ) -> str | None:
        """Search for the origin of a fault and write a report; return the finding in words.

        Args:
            trainer: The trainer.
            update: The update's number.
            fault: What was not finite.
            state: The bad tensor of the weights or the optimizer state. It is only reported, since its fault
                has no origin in this update. None for a loss or a gradient.
            window: The update's micro-batches; None if they are gone.
            sound: The micro-batches of an earlier update that was sound.
        """
        report: dict[str, Any] = {"kind": "nonfinite", "update": update, "fault": fault}
        bundle, found, failed = Bundle(figures=report), list[dict[str, Any]](), list[str]()
        if state is not None:
            bundle.tensors["state"] = state
        else:
            in_batch = gather_rows(self.look_into_batches(trainer, window, sound))
            report |= {"batch": in_batch} if in_batch else {}
            try:
                found = self._replay(trainer, window, bundle)
            except ReplayUnavailable as reason:
                failed = [str(reason)]
            except Exception as error:  # the user's code, or what it was given: the run goes on
                failed = [replay_failed(error)]
                warn(f"update {update}: {failed[0]}", category=NonFiniteWarning)
            found, failed = [*in_batch, *gather_rows(found)], gather_rows(failed)
            bundle.texts = gather_rows(bundle.texts)
            nowhere = "the fault did not come again when the update was run again"
            origins = found[len(in_batch) :]
            report["origin"] = origins or ({"unavailable": failed[0]} if failed else nowhere)
        lines = [each["words"] for each in found]
        place = write_bundle(trainer, self._options.folder, f"update-{update:06d}-nonfinite", bundle)
        if place is not None:
            lines.append(f"report: {place}")
        return "; ".join(lines) or None

    def look_into_batches(
        self, trainer: pl.Trainer, window: UpdateWindow | None, sound: UpdateWindow | None
    ) -> list[dict[str, Any]]:
        """Return what is not finite in this rank's micro-batches themselves.

        Faults that the previous update's batches had too do not count if that update was sound: NaN may stand
        for a missing target.
        """
        micro_batches = [] if window is None else window.micro_batches
        before = [] if sound is None else sound.micro_batches
        usual = {(fault.key, fault.value) for each in before for fault in faults_in(each)}
        return [
            self._describe_fault(trainer, micro_batch, number, len(micro_batches), fault)
            for number, micro_batch in enumerate(micro_batches, start=1)
            for fault in faults_in(micro_batch)
            if (fault.key, fault.value) not in usual
        ]

    def _describe_fault(
        self, trainer: pl.Trainer, micro_batch: Any, number: int, count: int, fault: Fault
    ) -> dict[str, Any]:
        names = row_names(micro_batch, self._options.identify)
        count_of_rows = rows_in(micro_batch, names)
        if count_of_rows is not None and fault.length != count_of_rows:
            names = micro_batch = None  # the tensor's rows are not those of the batch
        rows = [identity_of(trainer, micro_batch, number, row, names) for row in fault.rows]
        where = _spell_rows(number, count, rows)
        key = f", under {fault.key}" if fault.key else ""
        return {
            "words": f"{where}: {fault.value} in the batch itself{key}",
            "value": fault.value,
            "key": fault.key,
            "rank": trainer.global_rank,
            "micro_batch": number,
            "rows": rows,
        }

    def _replay(
        self, trainer: pl.Trainer, window: UpdateWindow | None, bundle: Bundle
    ) -> list[dict[str, Any]]:
        """Return this rank's findings about the fault's origin."""
        module = trainer.lightning_module
        losses_of = loss_function(module, self._options.replay)
        if window is None:
            raise ReplayUnavailable("attribution is not available: the micro-batches are not all at hand")
        origin = find_origin(trainer, module, window, losses_of)
        return [] if origin is None else [self._describe(trainer, window, origin, bundle)]

    def _describe(
        self, trainer: pl.Trainer, window: UpdateWindow, origin: Origin, bundle: Bundle
    ) -> dict[str, Any]:
        micro_batch = window.micro_batches[origin.micro_batch - 1]
        names = row_names(micro_batch, self._options.identify) if origin.rows else None
        rows = [identity_of(trainer, micro_batch, origin.micro_batch, row, names) for row in origin.rows]
        decode = decoder(trainer, trainer.lightning_module, self._options.decode)
        for row, identity in zip(origin.rows, rows, strict=True):
            text = text_of(micro_batch, row, decode)
            if text is not None:
                bundle.texts.append((spell(identity), text))
        bundle.tensors |= origin.tensors
        where = _spell_rows(origin.micro_batch, len(window.micro_batches), rows)
        return {
            "words": f"{where}: {origin.spell()}",
            "phase": origin.phase,
            "value": origin.value,
            "rank": trainer.global_rank,
            "micro_batch": origin.micro_batch,
            "micro_batches": len(window.micro_batches),
            "sequences": rows,
            "module": origin.module,
            "parameter": origin.parameter,
            "negative_infinity_before": origin.negative,
        }


def _spell_rows(number: int, count: int, rows: list[Identity]) -> str:
    """Return a readable description of a micro-batch and its rows, the first of them by name."""
    where = f"micro-batch {number} of {count}"
    if rows:
        first, rest = rows[0], f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        called = first.get("name") or (spell(first) if "document" in first else None)
        where += f", {unit_of(first)} {first['row']}{f' ({called})' if called else ''}{rest}"
    return where


def spell_bad_loss(flags: list[float]) -> str:
    """Return which loss was not finite, given one flag per micro-batch of this rank."""
    bad = next((place for place, flag in enumerate(flags, start=1) if flag), None)
    if bad is None:
        return "the loss of another rank's micro-batch"
    return f"the loss of micro-batch {bad} of {len(flags)}" if len(flags) > 1 else "the loss"


def first_bad_state(module: pl.LightningModule, optimizer: Optimizer) -> tuple[str, Tensor] | None:
    """Return name and values of the first tensor of weights and optimizer state with a NaN or Inf.

    Waits for the device. The result is the same on all ranks, which must call this together.
    """
    named = list(_state_tensors(module, optimizer))
    if not named:
        return None
    counts = HostCopy(reduce_over_ranks(_nonfinite_counts([tensor for _, tensor in named]))).read()
    return next((each for each, count in zip(named, counts, strict=True) if count), None)


def _state_tensors(pl_module: pl.LightningModule, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of the floating-point tensors of weights and optimizer state."""
    names = {id(each): name for name, each in pl_module.named_parameters()}
    for parameter in optimizer_parameters(optimizer):
        name = names.get(id(parameter), "a parameter")
        state = optimizer.state.get(parameter, {})
        for label, tensor in [(name, parameter), *((f"{key} of {name}", state[key]) for key in state)]:
            if not isinstance(tensor, Tensor) or not tensor.numel():
                continue
            if tensor.is_floating_point() or tensor.is_complex():
                yield label, local_gradient(tensor.detach())


def _nonfinite_counts(tensors: list[Tensor]) -> Tensor:
    """Return (T,) numbers of NaN and Inf elements of each tensor, on the first one's device."""
    return squared_norms([real_values(each) for each in tensors])[:, 1].contiguous()
