"""Saves a run's configuration beside the logs and in every checkpoint."""

from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import yaml
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from typing_extensions import override

from andrea_pl.cli.parser import RECORDS
from andrea_pl.data.module import TextDataModule
from andrea_pl.runs.settings import KEY as SETTINGS_KEY
from andrea_pl.runs.settings import ONLY_THIS_CALL


class KeepConfig(SaveConfigCallback):
    """Saves configuration and tokenizer beside the logs, and the configuration in every checkpoint.

    Options of a single call, such as `ckpt_path`, are left out, so that the saved configuration can be run
    again. The tokenizer in the cache changes with the text; this copy stays that of the run. A resumed run
    keeps its files.
    """

    def __init__(self, parser: LightningArgumentParser, config: Any, *args: Any, **kwargs: Any) -> None:
        config = config.clone()
        for key in ONLY_THIS_CALL:
            config.pop(key, None)
        super().__init__(parser, config, *args, **kwargs)
        self.settings: dict[str, Any] = _plain(parser, config)
        """The configuration as plain values."""

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the settings."""
        return _plain(self.parser, self.parser.get_defaults(skip_validation=True))

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the configuration."""
        checkpoint[SETTINGS_KEY] = self.settings

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Save on the first call."""
        if not trainer.loggers:
            return
        folder = trainer.log_dir  # all ranks must ask
        has_it = folder is not None and (Path(folder) / self.config_filename).exists()
        if trainer.strategy.broadcast(has_it):
            return
        super().setup(trainer, pl_module, stage)
        tokenizer = cast(TextDataModule, cast(Any, trainer).datamodule).tokenizer
        if trainer.is_global_zero and tokenizer is not None and folder is not None:
            (Path(folder) / "tokenizer.json").write_text(tokenizer.definition, encoding="utf-8")


def _plain(parser: LightningArgumentParser, config: Any) -> dict[str, Any]:
    """Return a configuration as plain values. Long lists of records are converted one by one, for speed."""
    config = config.clone()
    records = {key: config.pop(key) for key in RECORDS if config.get(key)}
    text = parser.dump(config, skip_unset=False, skip_validation=True)
    plain = cast("dict[str, Any]", yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))  # noqa: S506
    for key, value in records.items():
        place = plain
        *above, last = key.split(".")
        for part in above:
            place = place.setdefault(part, {})
        place[last] = [each.as_dict() for each in value]
    return plain
