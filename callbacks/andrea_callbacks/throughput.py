"""How fast a run is, and where an update's time goes."""

import time
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from andrea_callbacks.forensics.sample_identity import field
from andrea_callbacks.hooks.protocols import CountsTokens, SaysFlops, micro_batches_of, reports_updates
from andrea_callbacks.hooks.reports import ReportCallback, UpdateReport
from andrea_callbacks.numerics.bounds import require_at_least
from andrea_callbacks.numerics.host_transfer import HostCopy, reduce_over_ranks, widest

PHASES: tuple[str, ...] = ("data", "forward", "backward", "clip", "step", "other")


MOST_SPANS = 100_000
"""Most marks kept between two records; a run whose steps are never seen has no record."""


class _Clock:
    """Marks moments on the host, and on a CUDA device, which works later than the host asks for it."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def mark(self) -> Any:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        if self._is_cuda:
            end.synchronize()
            return start.elapsed_time(end) / 1000.0
        return end - start


class Throughput(ReportCallback):
    """Records tokens per second, padding, and the seconds of each phase of an update, as means.

    The phases are `data` (the host waits for the batch), `forward`, `backward`, `clip`, `step`, and `other`
    (the rest between two batches, with checkpoints and other callbacks). If the module does not report the
    time of its clip, `step` includes it. On a CUDA device all times but `data` and `clip` are measured on the
    device and read every `every` updates. On other accelerators they are the host's, which runs ahead of the
    device. The time of a validation is not counted.

    Tokens are label tokens: as the module reports them, or as it counts them (`count_tokens(micro_batch)`),
    or as batches say (`num_tokens`). Padding needs a `valid_mask` in the batches, and FLOP/s a module with
    `flops_per_token`. Unknown figures are absent.

    Args:
        every: Updates per record.
        name: Tells instances in the same trainer apart.

    Raises:
        ValueError: If `every` is less than 1.

    Metrics recorded:
        throughput/tokens_per_second: Label tokens over all ranks.
        throughput/updates_per_second: Updates.
        throughput/padding_share: Share of positions that are padding.
        throughput/flops_per_second: Achieved FLOP/s of all ranks together.
        throughput/seconds_<phase>: Mean seconds per update.
    """

    def __init__(self, every: int = 25, name: str | None = None) -> None:
        super().__init__(name=name)
        require_at_least(1, "Throughput", every=every)
        self.every = every
        self._clock = _Clock(torch.device("cpu"))
        self._begin()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._clock = _Clock(pl_module.device)
        self._begin(trainer.global_step)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Mark the arrival of the batch."""
        if self._ended is not None:
            self._data += time.perf_counter() - self._ended
        self._mark = self._clock.mark()
        parts = micro_batches_of(batch)
        for micro_batch in parts:
            self._count(pl_module, micro_batch)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Mark the end of a forward pass."""
        self._pass("forward")

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Mark the end of a backward pass."""
        self._pass("backward")

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Mark the start of clip and step."""
        self._pass("other")

    @override
    def on_report(self, trainer: pl.Trainer, report: UpdateReport) -> None:
        """Take the module's own figures."""
        self._clip += report.clip_seconds or 0.0
        self._tokens += int(report.tokens)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Mark the end of clip and step; record when due."""
        if trainer.global_step != self._step:
            self._updates += 1
            self._step = trainer.global_step
            self._pass("step")
        else:
            self._pass("other")
        self._ended = time.perf_counter()
        if self._updates >= self.every:
            self._report(trainer, pl_module)
            self._begin(self._step)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock during validation."""
        super().on_validation_start(trainer, pl_module)
        self._paused = time.perf_counter()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock again."""
        pause = time.perf_counter() - self._paused
        self._since += pause
        if self._ended is not None:
            self._ended += pause

    def _begin(self, step: int | None = None) -> None:
        self._since = time.perf_counter()
        self._step = 0 if step is None else step
        self._updates = 0
        self._tokens: int = 0
        self._counted: Tensor | None = None
        self._valid: Tensor | None = None
        self._places = 0
        self._data = 0.0
        self._clip = 0.0
        self._spans: list[tuple[str, Any, Any]] = []
        self._mark: Any = None
        self._paused = self._since
        self._ended: float | None = self._since if step is not None else None

    def _pass(self, phase: str) -> None:
        now = self._clock.mark()
        if self._mark is not None and len(self._spans) < MOST_SPANS:
            self._spans.append((phase, self._mark, now))
        self._mark = now

    def _count(self, pl_module: pl.LightningModule, micro_batch: Any) -> None:
        if not reports_updates(pl_module):
            counted = field(micro_batch, "num_tokens")
            if isinstance(pl_module, CountsTokens) and callable(pl_module.count_tokens):
                counted = pl_module.count_tokens(micro_batch)
            if isinstance(counted, Tensor) and not counted.ndim:
                self._counted = counted if self._counted is None else self._counted + counted
            elif isinstance(counted, int):
                self._tokens += counted
        mask = field(micro_batch, "valid_mask")
        if isinstance(mask, Tensor) and not mask.is_floating_point():
            self._places += mask.numel()
            valid = (mask != 0).sum()
            self._valid = valid if self._valid is None else self._valid + valid

    def _report(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        elapsed = time.perf_counter() - self._since
        reports = reports_updates(pl_module)
        tokens, valid, places = self._totals(pl_module.device, reports)
        seconds = dict.fromkeys(PHASES, 0.0)
        for phase, start, end in self._spans:
            seconds[phase] += self._clock.seconds(start, end)
        seconds["data"] = self._data
        seconds["other"] = max(elapsed - sum(seconds[each] for each in PHASES if each != "other"), 0.0)
        if reports:
            seconds["clip"] = self._clip
            seconds["step"] = max(seconds["step"] - self._clip, 0.0)
        else:
            del seconds["clip"]
        values = {f"throughput/seconds_{phase}": each / self._updates for phase, each in seconds.items()}
        values["throughput/updates_per_second"] = self._updates / elapsed
        if tokens:
            values["throughput/tokens_per_second"] = tokens / elapsed
            if isinstance(getattr(pl_module, "flops_per_token", None), (int, float)):
                flops = cast(SaysFlops, pl_module).flops_per_token
                values["throughput/flops_per_second"] = flops * tokens / elapsed
        if places:
            values["throughput/padding_share"] = 1.0 - valid / places
        self.record(trainer, trainer.global_step, values)

    def _totals(self, device: torch.device, is_global: bool) -> list[float]:
        """Return label tokens, valid tokens and positions over all ranks; reported tokens already are."""
        own = torch.zeros(3, dtype=widest(device), device=device)
        own[0] += self._tokens
        for place, counted in ((0, self._counted), (1, self._valid)):
            if counted is not None:
                own[place] += counted
        own[2] += self._places
        reduce_over_ranks(own[1:] if is_global else own, "sum")
        return HostCopy(own).read()
