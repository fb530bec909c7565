"""Lightning's Trainer with the commands' own arguments."""

from typing import Any, cast

import lightning.pytorch as pl
from typing_extensions import override

from andrea_callbacks.hooks.terminal import escaped
from andrea_pl.data.module import TextDataModule
from andrea_pl.data.store.pruning import prune as prune_cache
from andrea_pl.errors import UserError
from andrea_pl.language.model_spec import read_block, read_weights, refuse_nonfinite
from andrea_pl.language.module import LanguageModule
from andrea_pl.runs.checkpoint_io import read_checkpoint
from andrea_pl.runs.restoring import restoring


class CommandTrainer(pl.Trainer):
    """Lightning's Trainer with the command's additions."""

    resumes_only_when_asked = True

    @override
    def fit(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: pl.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | None = None,
        init_from: str | None = None,
        resume: str | None = None,
        allow_drift: list[str] | None = None,
    ) -> None:
        """Train a model. Prepares its text first if needed.

        Args:
            model: The model.
            train_dataloaders: Not used by the command.
            val_dataloaders: Not used by the command.
            datamodule: The text.
            ckpt_path: Checkpoint to resume from in a new log folder: weights, optimizer, schedule, position
                in the text, random states.
            init_from: Checkpoint to take only the weights from, for fine-tuning.
            resume: Continue a run in its own log folder, from its newest valid checkpoint. Without a folder,
                continue the newest run.
            allow_drift: A setting that may differ from the checkpoint's, with everything below it. Other
                differences stop the run. May be given several times.
        """
        del resume, allow_drift  # the command has acted on them
        if init_from is not None:
            _load_weights(cast(LanguageModule, model), init_from)
        with restoring(ckpt_path):
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only=True)

    @override
    def validate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a checkpoint on the held-out documents."""
        _require_checkpoint(kwargs)
        with restoring(kwargs["ckpt_path"]):
            return super().validate(
                *args, **kwargs | {"verbose": False}
            )  # the command prints lines of its own

    @override
    def test(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a checkpoint on the test documents."""
        _require_checkpoint(kwargs)
        with restoring(kwargs["ckpt_path"]):
            return super().test(*args, **kwargs | {"verbose": False})  # the command prints lines of its own

    @override
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Write the loss of every held-out sequence under a checkpoint, as JSON lines."""
        _require_checkpoint(kwargs)
        with restoring(kwargs["ckpt_path"]):
            return super().predict(*args, **kwargs)

    def prepare(
        self,
        model: pl.LightningModule,
        datamodule: TextDataModule,
        verify: bool = False,
        prune: bool = False,
    ) -> None:
        """Prepare the text: learn the tokenizer, write the token stores. Nothing is trained.

        Args:
            model: Not used.
            datamodule: The text.
            verify: Compare every document with the prepared text, even if no size or time has changed.
            prune: Then remove old stores from the cache that no run needs any more.
        """
        del model
        datamodule.prepare_data(verify=verify)
        datamodule.setup()
        print(escaped(f"prepared in {datamodule.preparation.folder}"))
        if prune:
            removed = prune_cache(datamodule.preparation.cache_dir)
            for each in removed:
                print(escaped(f"removed {each.path} ({each.size:,} bytes)"))
            print(f"removed {sum(each.size for each in removed):,} bytes in all")


def _load_weights(module: LanguageModule, path: str) -> None:
    checkpoint = read_checkpoint(path)
    block = read_block(checkpoint, path)
    weights = read_weights(checkpoint, block, path)
    refuse_nonfinite(weights, path)
    module.check_block(block)
    module.network.load_state_dict(weights)


def _require_checkpoint(options: dict[str, Any]) -> None:
    if options.get("ckpt_path") is None:
        raise UserError("--ckpt_path is needed, a file: without a checkpoint the weights would be random")
