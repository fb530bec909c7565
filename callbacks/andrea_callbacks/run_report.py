"""A report at the end of a fit: where logs and checkpoints are, and a sample from the model."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from typing_extensions import override

from andrea_callbacks.hooks.packages import is_kind
from andrea_callbacks.hooks.protocols import GeneratesText
from andrea_callbacks.hooks.scalars import add_text, without_module
from andrea_callbacks.hooks.terminal import say
from andrea_callbacks.numerics.gradient_norm import is_sharded


class RunReport(Callback):
    """Prints at the end of a fit where logs and checkpoints are, and shows a sample from the model.

    A separate generator draws the sample, so that the run's random state does not change. The sample also
    goes to loggers that accept text, such as TensorBoard, under `sample`.

    Args:
        prompts: Texts that the model continues; an empty prompt starts a document.
        max_new_tokens: Length of each sample in tokens; 0 for none.
        seed: Seed of the draws.
    """

    def __init__(self, prompts: list[str] | None = None, max_new_tokens: int = 80, seed: int = 0) -> None:
        super().__init__()
        self.prompts = [""] if prompts is None else prompts
        self.max_new_tokens = max_new_tokens
        self.seed = seed

    def __getstate__(self) -> dict[str, Any]:
        """Leave the module out of pickles and copies."""
        return without_module(self.__dict__)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report, on rank zero; where the model is sharded, all ranks write the sample together."""
        folder = trainer.log_dir  # all ranks must ask
        if trainer.is_global_zero:
            self._say_where(trainer, folder)
        if (
            self.max_new_tokens
            and isinstance(pl_module, GeneratesText)
            and not getattr(trainer, "fast_dev_run", False)
            and (trainer.is_global_zero or any(map(is_sharded, pl_module.parameters())))
        ):
            self._show_sample(trainer, pl_module)

    def _say_where(self, trainer: pl.Trainer, folder: str | None) -> None:
        lines = [f"{trainer.global_step:,} updates done"]
        if trainer.loggers and folder is not None:
            has_curves = any(is_kind(each, TensorBoardLogger) for each in trainer.loggers)
            lines.append(f"logs: {folder}" + (f" (tensorboard --logdir {folder})" if has_curves else ""))
        saved = _newest_checkpoint(trainer)
        if saved is not None:
            lines.append(f"checkpoint: {saved}")
        say("\n".join(lines))

    def _show_sample(self, trainer: pl.Trainer, module: GeneratesText) -> None:
        device = next((each.device for each in _tensors(module)), torch.device("cpu"))
        generator = torch.Generator(device).manual_seed(self.seed)
        try:
            texts = module.generate(self.prompts, self.max_new_tokens, generator)
        except Exception as error:  # a generate that means something else, or a prompt that is too long
            named = (
                "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            )  # else it speaks for itself
            say(f"no sample: {named}{error}")
            return
        for prompt, text in zip(self.prompts, texts, strict=True):
            say(f"sample: {prompt}{text}")
        samples = "\n\n".join(prompt + text for prompt, text in zip(self.prompts, texts, strict=True))
        add_text(trainer, "sample", samples, trainer.global_step)


def _newest_checkpoint(trainer: pl.Trainer) -> Path | None:
    folder = getattr(trainer.checkpoint_callback, "dirpath", None)
    files = list(Path(folder).glob("*.ckpt")) if folder else []
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=None)


def _tensors(module: Any) -> list[Tensor]:
    return list(module.parameters())
