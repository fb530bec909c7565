"""The language model as a Lightning module: network, loss, optimizer, schedule, evaluation, generation."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from andrea_callbacks.hooks.protocols import NamesSources
from andrea_pl.data.module import TextDataModule
from andrea_pl.data.store.tokenizer import TextTokenizer
from andrea_pl.data.windows.dataset import IGNORED, MicroBatch
from andrea_pl.deprecation import old_options
from andrea_pl.errors import UserError
from andrea_pl.language.changed_options import ChangedOptions
from andrea_pl.language.continuation import continue_texts
from andrea_pl.language.evaluation import EvaluatedModule, Evaluation
from andrea_pl.language.loading import load_weights, refuse_loading_options
from andrea_pl.language.model_spec import (
    KEY,
    ModelBlock,
    compare_networks,
    read_block,
    read_weights,
    refuse_nonfinite,
    refuse_other_tokenizer,
)
from andrea_pl.language.unbuilt import UnbuiltNetwork, built, compare, knows_sizes, require_memory, shard
from andrea_pl.language.warmup_cosine import WarmupCosine
from andrea_pl.network import RoPELanguageModel, Sampling, TransformerConfig
from andrea_pl.network.transformer import flops_per_token
from andrea_pl.optim.groups import build_named_optimizer, build_optimizer
from andrea_pl.optim.schedules import FactorLR
from andrea_pl.runs.checkpoint_io import read_checkpoint

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
SchedulerCallable = Callable[[Optimizer], LRScheduler]


@old_options(lr_floor="min_lr_ratio")
class LanguageModule(EvaluatedModule):
    """Trains `RoPELanguageModel` by exact, token-weighted updates.

    Args:
        network: Shape of the network. If you leave out `vocab_size` or `block_size`, the network is built in
            `configure_model` with the datamodule's sizes.
        optimizer: An optimizer class with its options, for all parameters. The default is AdamW with `lr`,
            `weight_decay` and `betas`.
        schedule: `cosine` for linear warm-up and a cosine over the whole run, `constant` for none, or a
            scheduler class with its options. It moves once per update; ReduceLROnPlateau once per epoch, by
            `val/loss`.
        lr: Base learning rate of AdamW.
        weight_decay: Decoupled weight decay of matrices; vectors do not decay.
        betas: Decay of AdamW's first and second moment.
        warmup_updates: Updates of the warm-up.
        min_lr_ratio: Learning rate at the end of the cosine, as a factor of the base rate.
        label_smoothing: Share of the label's probability that is spread over the vocabulary in training.
        max_norm: Global L2 norm that an update's averaged gradient is clipped to; null (None) only measures
            the norm.
        on_nonfinite: What to do about a NaN or Inf in loss or gradient: `raise` stops the run, `skip` skips
            the update.
        max_consecutive_skips: Consecutive skipped updates above which an error is raised.
        min_loss_scale: With a GradScaler, an overflow at this scale or below raises an error.

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
        min_lr_ratio: float = 0.0,
        label_smoothing: float = 0.0,
        max_norm: float | None = 1.0,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        max_consecutive_skips: int = 10,
        min_loss_scale: float = 1e-4,
    ) -> None:
        super().__init__(max_norm, on_nonfinite, max_consecutive_skips, min_loss_scale)
        if not 0.0 <= label_smoothing < 1.0:
            raise UserError(f"`label_smoothing` must lie in [0, 1), got {label_smoothing}")
        require_memory(network)
        built = UnbuiltNetwork(network) if network.missing else RoPELanguageModel(network)
        self.network: RoPELanguageModel = cast(RoPELanguageModel, built)
        self.tokenizer: TextTokenizer | None = None
        """The tokenizer of the data or of the checkpoint, None if unknown."""
        self.evaluation = Evaluation()
        self._optimizer = optimizer
        self._schedule = schedule
        self._lr = lr
        self._weight_decay = weight_decay
        self._betas = betas
        self._cosine = WarmupCosine(warmup_updates, min_lr_ratio)
        self._label_smoothing = label_smoothing
        self._changed_options = ChangedOptions()

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations per token, in forward and backward pass."""
        return flops_per_token(self.network)

    @property
    def hyperparameters(self) -> dict[str, int | float | str | bool]:
        """Shape and options, for TensorBoard."""
        options = {f"network.{key}": value for key, value in self.network.config.to_dict().items()}
        options |= {
            "weight_decay": self._weight_decay,
            "warmup_updates": self._cosine.warmup_updates,
            "min_lr_ratio": self._cosine.min_lr_ratio,
            "label_smoothing": self._label_smoothing,
            "max_norm": str(self.max_norm) if self.max_norm is None else self.max_norm,
            "on_nonfinite": self.on_nonfinite,
            "parameters": self.network.count_parameters(),
        }
        return {key: value for key, value in options.items() if value is not None}

    @override
    def loss_sum(self, micro_batch: MicroBatch) -> Tensor:
        """Return the cross entropy summed over the valid labels, in nats."""
        logits, labels, rows = self.predict_labels(micro_batch)
        losses = F.cross_entropy(
            logits, labels, ignore_index=IGNORED, reduction="none", label_smoothing=self._label_smoothing
        )
        if self.tracks_sources and "source_id" in micro_batch:
            self.record_source_losses(micro_batch["source_id"][rows], losses, labels != IGNORED)
        return losses.sum()

    def build_network(self, datamodule: Any = None) -> None:
        """Build the network if it is not built yet, with missing sizes from a datamodule.

        Args:
            datamodule: An object with `vocab_size` and `block_size`, such as `TextDataModule`.

        Raises:
            UserError: If a size is unknown, or a given size is too small for the data.
        """
        compare(self.network.config, datamodule)
        self._build_from(datamodule)

    def _build_from(self, source: Any) -> None:
        self.network = built(self.network, source, self.device, cast(torch.dtype, self.dtype))

    def _build_if_known(self) -> None:
        datamodule = getattr(self.trainer, "datamodule", None)
        if self.network.config.missing and knows_sizes(self.network.config, datamodule):
            self.build_network(datamodule)

    @override
    def configure_callbacks(self) -> Sequence[Callback]:
        """Build the network if its sizes are known already: callbacks may copy the module in `setup`."""
        self._build_if_known()
        return super().configure_callbacks()

    @override
    def configure_model(self) -> None:
        """Build the network, with missing sizes from the data.

        Without such a datamodule, a checkpoint that Lightning loads later may have the sizes. Under
        ModelParallelStrategy (FSDP2) this also shards the parameters by layers. A second call does nothing.
        """
        datamodule = getattr(self._trainer, "datamodule", None)
        may_load = self._trainer is not None and self.device_mesh is None
        if not may_load or knows_sizes(self.network.config, datamodule):
            self.build_network(datamodule)
        if self.device_mesh is not None:
            shard(self.network, self.device_mesh["data_parallel"])

    @override
    def configure_optimizers(self) -> Any:
        """Return the optimizer and, unless the rate is constant, its scheduler."""
        self._build_from(None)
        if self._optimizer is None:
            optimizer: Optimizer = build_optimizer(self.network, self._lr, self._weight_decay, self._betas)
        else:
            optimizer = build_named_optimizer(self._optimizer, self.parameters())
        self._changed_options.note_built(optimizer)
        if self._schedule == "constant":
            return optimizer
        if self._schedule == "cosine":
            scheduler: LRScheduler = FactorLR(optimizer, self._cosine.factor)
        else:
            scheduler = cast(SchedulerCallable, self._schedule)(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @override
    def on_train_start(self) -> None:
        """Set the schedule's length, now that loops and loaders are restored."""
        super().on_train_start()
        self._changed_options.apply(self.trainer)
        self._cosine.begin(self.trainer)

    @override
    def setup(self, stage: str) -> None:
        """Take the tokenizer from the data; refuse it if the weights were trained with another."""
        super().setup(stage)
        self._build_if_known()
        if stage == "fit":
            self._changed_options.begin()
        datamodule = getattr(self.trainer, "datamodule", None)
        self.evaluation.begin(datamodule.source_names if isinstance(datamodule, NamesSources) else ())
        tokenizer = getattr(datamodule, "tokenizer", None)
        if isinstance(tokenizer, TextTokenizer):
            self._adopt_tokenizer(tokenizer)

    @override
    def _reset_counters(self) -> None:
        super()._reset_counters()
        self._changed_options.reset()
        self._cosine.total_updates = None

    def _adopt_tokenizer(self, tokenizer: TextTokenizer) -> None:
        vocab_size, _ = self.network.config.sizes
        refuse_other_tokenizer(tokenizer, self.tokenizer, vocab_size)
        self.tokenizer = tokenizer
        self.evaluation.count_bytes_of(tokenizer, vocab_size)

    def generate(
        self,
        prompts: list[str],
        max_new_tokens: int,
        generator: torch.Generator | None = None,
        sampling: Sampling | None = None,
    ) -> list[str]:
        """Continue texts until the document ends or `max_new_tokens` are written.

        Args:
            prompts: Texts; an empty text starts a document.
            max_new_tokens: Maximum number of tokens added to each text.
            generator: Random generator, for repeatable samples.
            sampling: How to choose tokens.

        Returns:
            Continuations. A prompt followed by its continuation is the whole text, including spaces.

        Raises:
            UserError: If the tokenizer is unknown, or a prompt is too long.
        """
        self._build_from(None)
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise UserError("no tokenizer is known: the model was trained on token files without `tokenizer`")
        return continue_texts(self.network, tokenizer, prompts, max_new_tokens, generator, sampling)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the block from which `load_from_checkpoint` and `andrea generate` rebuild the model."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[KEY] = ModelBlock(network=self.network.config, tokenizer=self.tokenizer).to_dict()
        self._changed_options.save(checkpoint)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model; make the datamodule use the text of the checkpoint's run."""
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
        self._changed_options.load(checkpoint)

    def check_block(self, block: ModelBlock) -> None:
        """Raise `UserError`, naming both values, if a checkpoint's shape or tokenizer differs."""
        compare_networks(self.network.config, block.network)
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
            map_location: Device of the module; by default the CPU.
            hparams_file: Must be None: the checkpoint holds the shape, and `options` the rest.
            strict: Whether missing and unexpected weights are errors instead of warnings; by default the
                module's `strict_loading`.
            weights_only: Must not be False: only tensors and plain values are ever loaded.
            options: Arguments of `LanguageModule` except `network`, which the checkpoint holds.

        Raises:
            UserError: If the file is not a checkpoint of a LanguageModule, or an argument does not apply.
        """
        refuse_loading_options(hparams_file, weights_only)
        checkpoint = read_checkpoint(checkpoint_path)
        return cls._rebuild(checkpoint, checkpoint_path, map_location, strict, **options)

    @classmethod
    def load_verified(cls, path: str | Path) -> "LanguageModule":
        """Rebuild a module from a checkpoint alone, if every weight exists and is finite.

        Raises:
            UserError: If the file is not a checkpoint of a LanguageModule, or weights do not fit.
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
        load_weights(module, checkpoint, checkpoint_path, strict)
        return module if map_location is None else module.to(map_location)
