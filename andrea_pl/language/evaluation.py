"""The figures of a validation or a test: summed by source, reported once.

add      losses of a micro-batch, with their label tokens and, if known, bytes
report   figures go to monitors, and to loggers with the update as step (see `andrea_callbacks.hooks.scalars`)
         Lightning would write them to loggers with another step
fill     figures join what `trainer.validate()` and `trainer.test()` return and print
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from andrea_callbacks import scalar_buffer
from andrea_callbacks.hooks.lightning_state import evaluation_rows
from andrea_pl.data.store.tokenizer import TextTokenizer
from andrea_pl.data.windows.dataset import IGNORED, MicroBatch
from andrea_pl.language.losses import count_labels, predict_labels
from andrea_pl.language.token_mean import TokenMean
from andrea_pl.network import RoPELanguageModel
from andrea_pl.training.module import TokenWeightedModule


class Evaluation(nn.Module):
    """Sums the losses of an evaluation over all its loaders, in total and by source."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = TokenMean()
        self._table = EvaluationTable()
        self._names: list[str] = []
        self._bytes_per_token: Tensor | None = None

    def begin(self, names: Sequence[str]) -> None:
        """Set the sources to report, if there are several; drop an interrupted evaluation."""
        self._names = list(names) if len(names) > 1 else []
        groups = len(self._names) + 1
        if self.mean.groups != groups:
            self.mean = TokenMean(groups)
        self.mean.reset()

    def count_bytes_of(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        """Report bits per byte too, if the tokenizer's tokens have known sizes in bytes."""
        table = tokenizer.bytes_per_token()
        if table is not None:
            self._bytes_per_token = torch.zeros(vocab_size, dtype=torch.int64)
            self._bytes_per_token[: len(table)] = torch.from_numpy(table)

    def add(self, batch: MicroBatch, losses: Tensor) -> None:
        """Add a micro-batch and the (B,) summed losses of its sequences, in nats."""
        losses, labels = losses.double(), batch["labels"]
        counts = labels != IGNORED
        by_row = [losses, counts.sum(1)]
        if self._bytes_per_token is not None:
            self._bytes_per_token = self._bytes_per_token.to(losses.device)
            by_row.append((self._bytes_per_token[labels.clamp(min=0)] * counts).sum(1))
        self.mean.update(*(self._by_source(batch, each) for each in by_row))

    def _by_source(self, batch: MicroBatch, figures: Tensor) -> Tensor:
        """Sum (B,) figures of sequences into (K + 1,): the K sources, and sequences of unknown source."""
        known = len(self._names)
        sources = batch.get("source_id")
        if not known or sources is None:
            return F.pad(figures.sum()[None], (known, 0))
        groups = torch.where((sources >= 0) & (sources < known), sources, known)
        is_of = groups[:, None] == torch.arange(known + 1, device=figures.device)
        return torch.where(is_of, figures[:, None], 0).sum(0)

    def report(self, module: pl.LightningModule, stage: str, update: int) -> None:
        """Report and reset at the end of an evaluation's epoch.

        Args:
            module: The module that logs the figures for monitors.
            stage: `val` or `test`, the first part of the figures' names.
            update: The last update, which is the figures' step in loggers.
        """
        means = self.mean.compute()
        self.mean.reset()
        figures = {f"{stage}/loss": means["loss"], f"{stage}/perplexity": means["loss"].exp()}
        if "bits_per_byte" in means:
            figures[f"{stage}/bits_per_byte"] = means["bits_per_byte"]
        overall = {name: value.float() for name, value in figures.items()}
        module.log_dict(overall, prog_bar=True, logger=False, batch_size=1)
        for number, name in enumerate(self._names):
            for figure in ("loss", "bits_per_byte"):
                if f"group_{figure}" in means and float(means["group_tokens"][number]):
                    figures[f"{stage}/{name}/{figure}"] = means[f"group_{figure}"][number]
        by_source = {name: value.float() for name, value in figures.items() if name not in overall}
        module.log_dict(by_source, logger=False, batch_size=1)
        if not module.trainer.sanity_checking:
            self._table.keep(module.trainer, figures)
            buffer = scalar_buffer(module.trainer)
            buffer.record(update, figures)
            buffer.flush()

    def fill(self) -> None:
        """Make `trainer.validate()` or `trainer.test()` return and print the figures."""
        self._table.fill()


class EvaluationTable:
    """Adds one evaluation's figures to the rows that Lightning returns."""

    def __init__(self) -> None:
        self._figures: Mapping[str, Tensor] = {}
        self._rows: list[dict[str, Any]] = []

    def keep(self, trainer: pl.Trainer, figures: Mapping[str, Tensor]) -> None:
        """Keep the figures at the end of the evaluation's epoch, and the rows that Lightning will return.

        Lightning returns a row for each loader. At the end of the epoch it writes the rows to the loggers, so
        the figures must be added later.
        """
        self._figures = figures
        self._rows = evaluation_rows(trainer)

    def fill(self) -> None:
        """Add the figures to the rows, once Lightning has written them."""
        for row in self._rows:
            row.update(self._figures)
        self._figures, self._rows = {}, []


class EvaluatedModule(TokenWeightedModule):
    """A `TokenWeightedModule` that evaluates its network by the loss of each sequence."""

    network: RoPELanguageModel
    evaluation: Evaluation

    @override
    def forward(self, input_ids: Tensor, valid_mask: Tensor | None = None) -> Tensor:
        """Return logits (B, S, V); see `RoPELanguageModel.forward`."""
        return self.network(input_ids, valid_mask)

    @override
    def count_tokens(self, micro_batch: MicroBatch) -> int | Tensor:
        """Return the number of valid labels; the collator's count on the host, if there is one."""
        return count_labels(micro_batch)

    def predict_labels(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (N, V), labels (N,) and row indices (N,) of the positions with a label."""
        return predict_labels(self.network, micro_batch)

    def sequence_losses(self, micro_batch: MicroBatch) -> Tensor:
        """Return the summed cross entropy of each sequence, (B,) in nats, without label smoothing."""
        logits, labels, rows = self.predict_labels(micro_batch)
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        return losses.new_zeros(len(micro_batch["labels"])).index_add(0, rows, losses)

    def _report_evaluation(self, stage: str) -> None:
        update = self.trainer.global_step or self.updates_applied + self.updates_skipped
        self.evaluation.report(self, stage, update)

    @override
    def validation_step(self, batch: MicroBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add one micro-batch to the evaluation, which is of all loaders together."""
        self.evaluation.add(batch, self.sequence_losses(batch))

    @override
    def on_validation_epoch_end(self) -> None:
        """Record `val/loss`, `val/perplexity` and `val/bits_per_byte`, in total and by source."""
        self._report_evaluation("val")

    @override
    def on_validation_end(self) -> None:
        """Make `trainer.validate()` return and print the figures."""
        self.evaluation.fill()

    @override
    def test_step(self, batch: MicroBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add one micro-batch to the evaluation, which is of all loaders together."""
        self.evaluation.add(batch, self.sequence_losses(batch))

    @override
    def on_test_epoch_end(self) -> None:
        """Record `test/loss`, `test/perplexity` and `test/bits_per_byte`, in total and by source."""
        self._report_evaluation("test")

    @override
    def on_test_end(self) -> None:
        """Make `trainer.test()` return and print the figures."""
        self.evaluation.fill()

    @override
    def predict_step(
        self, batch: MicroBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> list[dict[str, float | int]]:
        """Return each sequence's place in the text, its label tokens, and its loss per token in nats."""
        counts = (batch["labels"] != IGNORED).sum(1)
        nowhere = torch.full_like(counts, -1)
        columns = (batch.get("document_id", nowhere), batch.get("offset", nowhere), counts)
        places = [cast("list[int]", each.tolist()) for each in columns]
        rows = zip(*places, cast("list[float]", self.sequence_losses(batch).tolist()), strict=True)
        return [
            {"document_id": document, "offset": offset, "tokens": count, "loss": total / count}
            for document, offset, count, total in rows
            if count
        ]
