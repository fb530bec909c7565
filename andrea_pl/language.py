"""The language model as a Lightning module: network, loss, optimizer, schedule, evaluation, generation."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from andrea_callbacks.protocols import NamesSources
from andrea_callbacks.scalars import scalar_buffer
from andrea_pl.block import KEY, ModelBlock, read_block, read_weights, refuse_nonfinite
from andrea_pl.checkpoint import read_checkpoint
from andrea_pl.data.continuation import continuation
from andrea_pl.data.dataset import IGNORED
from andrea_pl.data.module import TextDataModule
from andrea_pl.data.tokenizer import TextTokenizer
from andrea_pl.errors import UserError
from andrea_pl.evaluation import EvaluationTable
from andrea_pl.metrics import TokenMean
from andrea_pl.network import RoPELanguageModel, Sampling, TransformerConfig, generate
from andrea_pl.network.layout import is_right_padded
from andrea_pl.optim import build_optimizer, warmup_cosine
from andrea_pl.optim.rates import change_base_rate, keep_cycled_values
from andrea_pl.optim.schedules import FactorLR, check_schedule
from andrea_pl.unbuilt import UnbuiltNetwork, compare, complete, knows_sizes, require_memory
from andrea_pl.update import TokenWeightedModule

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
SchedulerCallable = Callable[[Optimizer], LRScheduler]

EVALUATION_STAGES = ("val", "test")


class LanguageModule(TokenWeightedModule):
    """Trains `RoPELanguageModel` by exact, token-weighted updates.

    Args:
        network: Shape of the network. `vocab_size` and `block_size` may be left out: the network is built in
            `configure_model` then, with the sizes of the datamodule.
        optimizer: A class of optimizer with its options, given all parameters; AdamW by `lr`, `weight_decay`
            and `betas` when left out.
        schedule: `cosine` for linear warm-up and a cosine over the whole run, `constant` for none, or a class
            of scheduler with its options, stepped once an update; ReduceLROnPlateau once an epoch, by
            `val/loss`.
        lr: Base learning rate of AdamW.
        weight_decay: Decoupled weight decay of matrices; vectors do not decay.
        betas: Decay of AdamW's first and second moment.
        warmup_updates: Updates of the warm-up.
        lr_floor: Factor of the base rate at the end of the cosine.
        label_smoothing: Share of the label's probability that is spread over the vocabulary in training.
        max_norm: Global L2 norm that the averaged gradient of an update is clipped to; null (None) only
            measures it.
        on_nonfinite: What a NaN or Inf in loss or gradient does: `raise` stops, `skip` passes over the
            update.
        max_consecutive_skips: More skipped updates in a row than this raise.
        min_loss_scale: With a GradScaler, an overflow at this scale or below raises.

    Raises:
        UserError: If a value is out of range.
    """

    def __init__(
        self,
        network: TransformerConfig,
        optimizer: OptimizerCallable | None = None,
        schedule: Literal["cosine", "constant"] | SchedulerCallable = "cosine",
        lr: float = 3e-4,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        warmup_updates: int = 0,
        lr_floor: float = 0.0,
        label_smoothing: float = 0.0,
        max_norm: float | None = 1.0,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        max_consecutive_skips: int = 10,
        min_loss_scale: float = 1e-4,
    ) -> None:
        super().__init__(max_norm, on_nonfinite, max_consecutive_skips, min_loss_scale)
        if not 0.0 <= label_smoothing < 1.0:
            raise UserError(f"model.label_smoothing must lie in [0, 1), got {label_smoothing}")
        require_memory(network)
        built = UnbuiltNetwork(network) if network.missing else RoPELanguageModel(network)
        self.network: RoPELanguageModel = cast(RoPELanguageModel, built)
        self.tokenizer: TextTokenizer | None = None
        """The tokenizer of the data or of the checkpoint, None where it is not known."""
        self.evaluation = TokenMean()
        self._table = EvaluationTable()
        self._optimizer = optimizer
        self._schedule = schedule
        self._lr = lr
        self._weight_decay = weight_decay
        self._betas = betas
        self._warmup_updates = warmup_updates
        self._lr_floor = lr_floor
        self._label_smoothing = label_smoothing
        self._total_updates: int | None = None
        self._built_with: list[dict[str, Any]] = []
        self._restored_options: list[dict[str, Any]] | None = None
        self._bytes_per_token: Tensor | None = None
        self._source_names: list[str] = []

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of forward and backward pass for one token, 6N + 12LDS/2.

        N are the weights that multiply (all but the embedding's), and attention is causal over sequences of
        `block_size`; shorter ones cost less (Chowdhery et al., 2022, appendix B, halved for the causal mask).
        """
        config = self.network.config
        vocab_size, block_size = config.sizes
        weights = sum(each.numel() for each in self.network.parameters() if each.ndim > 1)
        if not config.tie_output:
            weights -= vocab_size * config.d_model
        return 6.0 * weights + 6.0 * config.n_layers * config.d_model * block_size

    @property
    def hyperparameters(self) -> dict[str, int | float | str | bool]:
        """Shape and options, for TensorBoard."""
        options = {f"network.{key}": value for key, value in self.network.config.to_dict().items()}
        options |= {
            "weight_decay": self._weight_decay,
            "warmup_updates": self._warmup_updates,
            "lr_floor": self._lr_floor,
            "label_smoothing": self._label_smoothing,
            "max_norm": str(self.max_norm) if self.max_norm is None else self.max_norm,
            "on_nonfinite": self.on_nonfinite,
            "parameters": self.network.count_parameters(),
        }
        return {key: value for key, value in options.items() if value is not None}

    @override
    def forward(self, input_ids: Tensor, valid_mask: Tensor | None = None) -> Tensor:
        """Return logits (B, S, V); see `RoPELanguageModel.forward`."""
        return self.network(input_ids, valid_mask)

    @override
    def count_tokens(self, micro_batch: dict[str, Any]) -> int | Tensor:
        """Return the labels that count, as the collator counted them on the host where it did."""
        counted = micro_batch.get("num_tokens")
        return (micro_batch["labels"] != IGNORED).sum() if counted is None else counted

    @override
    def loss_sum(self, micro_batch: dict[str, Any]) -> Tensor:
        """Return the cross entropy summed over the labels that count, in nats."""
        logits, labels, rows = self._predict_labels(micro_batch)
        losses = F.cross_entropy(
            logits, labels, ignore_index=IGNORED, reduction="none", label_smoothing=self._label_smoothing
        )
        if self.notes_losses and "source_id" in micro_batch:
            self.note_losses(micro_batch["source_id"][rows], losses, labels != IGNORED)
        return losses.sum()

    def sequence_losses(self, micro_batch: dict[str, Any]) -> Tensor:
        """Return the summed cross entropy of each sequence, (B,) in nats, without label smoothing."""
        logits, labels, rows = self._predict_labels(micro_batch)
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        return losses.new_zeros(len(micro_batch["labels"])).index_add(0, rows, losses)

    def _predict_labels(self, micro_batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (N, V), labels (N,) and the row of each, for the places with a label."""
        labels = micro_batch["labels"]
        index = self._token_index(micro_batch)
        flat = labels.flatten()
        if index is not None:
            flat = flat[index]
        places = torch.arange(labels.numel(), device=labels.device) if index is None else index
        chosen = None
        if self._has_unlabelled_places(micro_batch, flat):
            chosen = (flat != IGNORED).nonzero().squeeze(1)
            flat, places = flat[chosen], places[chosen]
        # through __call__, which network.compile() and hooks of the network act on
        logits = self.network(
            micro_batch["input_ids"], micro_batch.get("valid_mask"), token_index=index, chosen=chosen
        )
        return logits.flatten(0, -2), flat, places // labels.shape[1]

    def _token_index(self, micro_batch: dict[str, Any]) -> Tensor | None:
        """Return where the valid tokens lie, if nothing has to wait for an accelerator to know."""
        index = micro_batch.get("token_index")
        mask = micro_batch.get("valid_mask")
        if index is not None or mask is None or mask.device.type != "cpu" or not is_right_padded(mask):
            return index
        return mask.flatten().nonzero().squeeze(1)

    @staticmethod
    def _has_unlabelled_places(micro_batch: dict[str, Any], labels: Tensor) -> bool:
        counted = micro_batch.get("num_tokens")
        if counted is None:
            return labels.device.type == "cpu"
        return bool(counted) and counted < len(labels)

    def build_network(self, datamodule: Any = None) -> None:
        """Build the network, unless that is done, with sizes that were left out taken from a datamodule.

        Args:
            datamodule: Has `vocab_size` and `block_size`, as `TextDataModule` does.

        Raises:
            UserError: If a size is not known, or one that was given is too small for the data.
        """
        compare(self.network.config, datamodule)
        self._build_from(datamodule)

    def _build_from(self, source: Any) -> None:
        wrapped: Any = getattr(self.network, "_orig_mod", None)  # torch.compile(module.network)
        network = cast(nn.Module, self.network if wrapped is None else wrapped)
        if not isinstance(network, UnbuiltNetwork):
            return
        config = complete(network.config, source)
        if wrapped is not None or config.missing:
            network.refuse()
        network.config = config
        self.network = network.build().to(self.device, cast(torch.dtype, self.dtype))

    def _build_if_known(self) -> None:
        datamodule = getattr(self.trainer, "datamodule", None)
        if self.network.config.missing and knows_sizes(self.network.config, datamodule):
            self.build_network(datamodule)

    @override
    def configure_callbacks(self) -> Sequence[Callback]:
        """Build the network where its sizes are known already: callbacks may copy the module in `setup`."""
        self._build_if_known()
        return super().configure_callbacks()

    @override
    def configure_model(self) -> None:
        """Build the network with the data's sizes, where its own were left out.

        Without a datamodule that has them a checkpoint may, which Lightning loads later. Under
        ModelParallelStrategy (FSDP2) share parameters out among ranks, by layers. A second call does nothing.
        """
        datamodule = getattr(self._trainer, "datamodule", None)
        may_load = self._trainer is not None and self.device_mesh is None
        if not may_load or knows_sizes(self.network.config, datamodule):
            self.build_network(datamodule)
        if self.device_mesh is None:
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard

        mesh = self.device_mesh["data_parallel"]
        network = self.network
        for layer in (network.embedding, *network.blocks, network.final_norm, network.output):
            if not isinstance(layer, FSDPModule) and any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)

    @override
    def configure_optimizers(self) -> Any:
        """Return the optimizer and, unless the rate is constant, its scheduler."""
        self._build_from(None)
        if self._optimizer is None:
            optimizer: Optimizer = build_optimizer(self.network, self._lr, self._weight_decay, self._betas)
        else:
            optimizer = self._build_named_optimizer(self._optimizer)
        self._built_with = [_options(group) for group in optimizer.param_groups]
        if self._schedule == "constant":
            return optimizer
        if self._schedule == "cosine":
            scheduler: LRScheduler = FactorLR(optimizer, self._lr_factor)
        else:
            scheduler = cast(SchedulerCallable, self._schedule)(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _build_named_optimizer(self, build: OptimizerCallable) -> Optimizer:
        try:
            return build([each for each in self.parameters() if each.requires_grad])
        except ValueError as error:
            hint = ""
            if "2D" in str(error):
                hint = "; model.network.norm_weight=false and bias=false leave matrices alone, as Muon asks"
            raise UserError(f"model.optimizer refuses its options or parameters: {error}{hint}") from error

    def _lr_factor(self, index: int) -> float:
        """Return the factor for an update; the run's length matters, and is known, from the second on."""
        total = self._total_updates or max(index, self._warmup_updates) + 1
        return warmup_cosine(index, total, self._warmup_updates, self._lr_floor)

    @override
    def on_train_start(self) -> None:
        """Learn how long the run is, now that loops and loaders are restored."""
        super().on_train_start()
        self._apply_changed_options()
        scheduler = self._scheduler()
        if any(map(self._is_own_schedule, (scheduler, *getattr(scheduler, "_schedulers", ())))):
            self._total_updates = self._count_updates()
            check_schedule(self._total_updates, self._warmup_updates, self._lr_floor)
        if self._is_own_schedule(scheduler):
            cast(FactorLR, scheduler).refresh()  # a checkpoint has the rate of the run that wrote it

    def _scheduler(self) -> Any | None:
        """Return the scheduler of this fit, None where there is none."""
        configs = self.trainer.lr_scheduler_configs
        return configs[0].scheduler if configs else None

    def _is_own_schedule(self, scheduler: Any) -> bool:
        """Say whether a scheduler is the one that `configure_optimizers` of this class built."""
        return isinstance(scheduler, FactorLR) and scheduler.lr_lambdas[0] == self._lr_factor

    def _apply_changed_options(self) -> None:
        """Set the optimizer's options that this module was built with and the checkpoint's was not.

        What a checkpoint restores are its own values, of which a callback may have changed some.
        """
        before, self._restored_options = self._restored_options, None
        optimizer, scheduler = self.trainer.optimizers[0], self._scheduler()
        for number, (there, here) in enumerate(zip(before or [], self._built_with, strict=False)):
            group = optimizer.param_groups[number]
            changed = {name: here[name] for name in here if name in there and here[name] != there[name]}
            for name, value in changed.items():
                if name == "lr":
                    change_base_rate(optimizer, scheduler, number, there["lr"], value)
                else:
                    group[name] = keep_cycled_values(scheduler, group, name, there[name], value)
                rank_zero_info(f"optimizer, group {number}: {name} is {value}, and was {there[name]}")

    def _count_updates(self) -> int:
        """Return the updates of the run: windows an epoch times epochs, no more than `max_steps`."""
        limits: list[int] = []
        if self.trainer.max_steps > 0:
            limits.append(self.trainer.max_steps)
        windows, epochs = self.trainer.num_training_batches, self.trainer.max_epochs
        if epochs is not None and epochs > 0 and math.isfinite(windows):
            limits.append(int(windows) * epochs)
        if not limits:
            raise UserError(
                "the length of the cosine schedule is not known: set trainer.max_steps, or "
                "trainer.max_epochs with a loader that has a length, or model.schedule=constant"
            )
        return min(limits)

    @override
    def setup(self, stage: str) -> None:
        """Take the tokenizer from the data; stop where the weights were trained with another."""
        super().setup(stage)
        self._build_if_known()
        if stage == "fit":
            self._built_with = []
        datamodule = getattr(self.trainer, "datamodule", None)
        self._source_names = list(datamodule.source_names) if isinstance(datamodule, NamesSources) else []
        groups = len(self._source_names) + 1 if len(self._source_names) > 1 else 1
        if self.evaluation.groups != groups:
            self.evaluation = TokenMean(groups)
        self.evaluation.reset()  # of a validation that an exception broke off
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
        if isinstance(tokenizer, TextTokenizer):
            self._adopt_tokenizer(tokenizer)

    @override
    def _reset_counters(self) -> None:
        super()._reset_counters()
        self._restored_options = self._total_updates = None

    def _adopt_tokenizer(self, tokenizer: TextTokenizer) -> None:
        if self.tokenizer is not None and self.tokenizer.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"the data's tokenizer ({tokenizer.fingerprint[:12]}, {tokenizer.vocab_size} ids) is not the "
                f"one that the weights were trained with ({self.tokenizer.fingerprint[:12]}, "
                f"{self.tokenizer.vocab_size} ids); set data.tokenizer to the tokenizer.json in that run's "
                "log folder"
            )
        vocab_size, _ = self.network.config.sizes
        if tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} ids and the network "
                f"vocab_size={vocab_size}; make them equal"
            )
        self.tokenizer = tokenizer
        table = tokenizer.bytes_per_token()
        if table is not None:
            self._bytes_per_token = torch.zeros(vocab_size, dtype=torch.int64)
            self._bytes_per_token[: len(table)] = torch.from_numpy(table)

    def _evaluate(self, batch: dict[str, Any]) -> None:
        losses = self.sequence_losses(batch).double()
        labels = batch["labels"]
        counts = labels != IGNORED
        by_row = [losses, counts.sum(1)]
        if self._bytes_per_token is not None:
            self._bytes_per_token = self._bytes_per_token.to(losses.device)
            by_row.append((self._bytes_per_token[labels.clamp(min=0)] * counts).sum(1))
        self.evaluation.update(*(self._by_source(batch, each) for each in by_row))

    def _by_source(self, batch: dict[str, Any], figures: Tensor) -> Tensor:
        """Add up (B,) figures of sequences to those of sources, and of no known source, (K + 1,).

        Where sources are not told apart K is 0.
        """
        known = self.evaluation.groups - 1
        sources = batch.get("source_id")
        if not known or sources is None:
            return F.pad(figures.sum()[None], (known, 0))
        groups = torch.where((sources >= 0) & (sources < known), sources, known)
        is_of = groups[:, None] == torch.arange(known + 1, device=figures.device)
        return torch.where(is_of, figures[:, None], 0).sum(0)

    def _report_evaluation(self, stage: str) -> None:
        means = self.evaluation.compute()
        self.evaluation.reset()
        figures = {f"{stage}/loss": means["loss"], f"{stage}/perplexity": means["loss"].exp()}
        if "bits_per_byte" in means:
            figures[f"{stage}/bits_per_byte"] = means["bits_per_byte"]
        overall = {name: value.float() for name, value in figures.items()}
        self.log_dict(overall, prog_bar=True, logger=False, batch_size=1)
        told_apart = self._source_names if self.evaluation.groups > 1 else []
        for number, name in enumerate(told_apart):
            for figure in ("loss", "bits_per_byte"):
                if f"group_{figure}" in means and float(means["group_tokens"][number]):
                    figures[f"{stage}/{name}/{figure}"] = means[f"group_{figure}"][number]
        by_source = {name: value.float() for name, value in figures.items() if name not in overall}
        self.log_dict(by_source, logger=False, batch_size=1)
        if not self.trainer.sanity_checking:
            self._table.keep(self.trainer, figures)
            buffer = scalar_buffer(self.trainer)
            buffer.record(self.trainer.global_step or self.updates_applied + self.updates_skipped, figures)
            buffer.flush()

    @override
    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add one micro-batch to the evaluation, which is of all loaders together."""
        self._evaluate(batch)

    @override
    def on_validation_epoch_end(self) -> None:
        """Record `val/loss`, `val/perplexity` and `val/bits_per_byte` at the last update, also by source."""
        self._report_evaluation("val")

    @override
    def on_validation_end(self) -> None:
        """Have `trainer.validate()` return and print the figures."""
        self._table.fill()

    @override
    def test_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add one micro-batch to the evaluation, which is of all loaders together."""
        self._evaluate(batch)

    @override
    def on_test_epoch_end(self) -> None:
        """Record `test/loss`, `test/perplexity` and `test/bits_per_byte`, also by source."""
        self._report_evaluation("test")

    @override
    def on_test_end(self) -> None:
        """Have `trainer.test()` return and print the figures."""
        self._table.fill()

    @override
    def predict_step(
        self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0
    ) -> list[dict[str, float | int]]:
        """Return for every sequence where it is from, its label tokens and its loss per token in nats."""
        sums = cast("list[float]", self.sequence_losses(batch).tolist())
        tokens = (batch["labels"] != IGNORED).sum(1).tolist()
        rows = zip(batch["document_id"].tolist(), batch["offset"].tolist(), tokens, sums, strict=True)
        return [
            {"document_id": document, "offset": offset, "tokens": count, "loss": total / count}
            for document, offset, count, total in rows
            if count
        ]

    def generate(
        self,
        prompts: list[str],
        max_new_tokens: int,
        generator: torch.Generator | None = None,
        sampling: Sampling | None = None,
    ) -> list[str]:
        """Continue texts until their document ends or `max_new_tokens` are written.

        Args:
            prompts: Texts; an empty one starts a document.
            max_new_tokens: Most tokens added to each.
            generator: Makes draws repeatable.
            sampling: How tokens are chosen.

        Returns:
            Continuations: a prompt followed by its continuation is the whole text, spaces included.

        Raises:
            UserError: If no tokenizer is known, or a prompt is too long.
        """
        self._build_from(None)
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise UserError(
                "no tokenizer is known: the model was trained on token files without data.tokenizer"
            )
        encoded = [tokenizer.encode(prompt) for prompt in prompts]
        rows = generate(
            self.network,
            [[tokenizer.end_id, *ids] for ids in encoded],
            max_new_tokens,
            sampling,
            end_id=tokenizer.end_id,
            usable_ids=tokenizer.vocab_size,
            generator=generator,
        )
        return [
            continuation(tokenizer, prompt, ids, row)
            for prompt, ids, row in zip(prompts, encoded, rows, strict=True)
        ]

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the block from which `load_from_checkpoint` and `andrea generate` rebuild the model."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[KEY] = ModelBlock(network=self.network.config, tokenizer=self.tokenizer).to_dict()
        checkpoint["andrea_optimizer"] = self._built_with

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Stop where the checkpoint is of another model than this one; have the text be its run's."""
        super().on_load_checkpoint(checkpoint)
        datamodule = getattr(self._trainer, "datamodule", None)
        if isinstance(datamodule, TextDataModule) and self.trainer.state.fn == "fit":
            datamodule.keep_text_of(checkpoint, self.trainer.ckpt_path or "the checkpoint")
            self.tokenizer = datamodule.tokenizer
        block = read_block(checkpoint)
        if "state_dict" in checkpoint:  # ModelParallelStrategy has loaded the weights by itself
            weights = read_weights(checkpoint, block, "the checkpoint", is_strict=False)
            if self._trainer is not None:
                refuse_nonfinite(weights)
        self._build_from(block.network)
        self.check_block(block)
        self._restored_options = checkpoint.get("andrea_optimizer")

    def check_block(self, block: ModelBlock) -> None:
        """Raise `UserError`, naming both values, where a checkpoint's shape or tokenizer differs."""
        here, there = _decisive(self.network.config), _decisive(block.network)
        changed = [
            f"{key}: checkpoint {there[key]}, here {here[key]}" for key in here if here[key] != there[key]
        ]
        if changed:
            raise UserError(
                f"the checkpoint is of another network ({'; '.join(changed)}); use its values "
                "(data.vocab_size gives model.network.vocab_size)"
            )
        if block.tokenizer is not None and self.tokenizer is None:
            self._adopt_tokenizer(block.tokenizer)
        elif block.tokenizer is not None and self.tokenizer is not None:
            kept, self.tokenizer = self.tokenizer, block.tokenizer
            self._adopt_tokenizer(kept)

    @classmethod
    @override
    def load_from_checkpoint(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **options: Any,
    ) -> "LanguageModule":
        """Rebuild a module from a checkpoint alone.

        Args:
            checkpoint_path: A local file.
            map_location: Device of the module; the CPU when left out.
            hparams_file: Not read, and must be None: the checkpoint has the shape, and `options` the rest.
            strict: False passes over weights that the checkpoint or the module lacks, with a warning;
                the module's `strict_loading` when left out.
            weights_only: Must not be False: only tensors and plain values are ever loaded.
            options: Arguments of `LanguageModule` besides `network`, which the checkpoint gives.

        Raises:
            UserError: If the file is no checkpoint of a LanguageModule, or an argument has no meaning.
        """
        if hparams_file is not None:
            raise UserError(
                f"hparams_file={str(hparams_file)!r} is not read: the checkpoint has the network's shape; "
                "pass other options of the model by name, such as lr=1e-4"
            )
        if weights_only is False:
            raise UserError(
                "weights_only=False would run code that the file holds, which no checkpoint of a "
                "LanguageModule needs; leave it out"
            )
        return cls._rebuild(
            read_checkpoint(checkpoint_path), checkpoint_path, map_location, strict, **options
        )

    @classmethod
    def load_verified(cls, path: str | Path) -> "LanguageModule":
        """Rebuild a module from a checkpoint alone, if every weight is there and finite.

        Raises:
            UserError: If the file is no checkpoint of a LanguageModule, or weights do not fit.
            NonFiniteError: If a weight is NaN or infinite.
        """
        checkpoint = read_checkpoint(path)
        refuse_nonfinite(read_weights(checkpoint, read_block(checkpoint, path), path), path)
        return cls._rebuild(checkpoint, path)

    @classmethod
    def _rebuild(
        cls,
        checkpoint: dict[str, Any],
        checkpoint_path: str | Path,
        map_location: Any = None,
        strict: bool | None = None,
        **options: Any,
    ) -> "LanguageModule":
        block = read_block(checkpoint, checkpoint_path)
        read_weights(checkpoint, block, checkpoint_path, is_strict=False)
        module = cls(block.network, **options)
        module.on_load_checkpoint(checkpoint)
        strict = module.strict_loading if strict is None else strict
        left_out = module.load_state_dict(checkpoint["state_dict"], strict=strict)
        if left_out.missing_keys or left_out.unexpected_keys:
            rank_zero_warn(
                f"{checkpoint_path}: loaded without strict; not in the file: "
                f"{left_out.missing_keys or 'none'}, not in the module: {left_out.unexpected_keys or 'none'}"
            )
        return module if map_location is None else module.to(map_location)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's options for a group, those that are numbers, words or tuples of them."""
    return {
        name: list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
        for name, value in group.items()
        if name not in ("params", "initial_lr") and isinstance(value, (bool, int, float, str, tuple))
    } | {name: float(value) for name, value in group.items() if name == "lr" and isinstance(value, Tensor)}


def _decisive(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields that decide what weights compute; others may differ from a checkpoint's."""
    free = {"dropout", "init_std", "activation_checkpointing", "block_size", "d_ff"}
    fields = {key: value for key, value in config.to_dict().items() if key not in free}
    return {**fields, "d_ff": config.feed_forward_width}
