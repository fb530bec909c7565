"""Loads a checkpoint's weights into a module."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from andrea_pl.errors import UserError


def refuse_loading_options(hparams_file: Any, weights_only: bool | None) -> None:
    """Refuse options of `load_from_checkpoint` that do not apply to these checkpoints."""
    if hparams_file is not None:
        raise UserError(
            f"hparams_file={str(hparams_file)!r} is not read: the checkpoint has the network's shape; pass "
            "other options of the model by name, such as lr=1e-4"
        )
    if weights_only is False:
        raise UserError(
            "weights_only=False would run code that the file holds, which no checkpoint of a LanguageModule "
            "needs; leave it out"
        )


def load_weights(
    module: pl.LightningModule, checkpoint: Mapping[str, Any], path: str | Path, strict: bool | None
) -> None:
    """Load the weights of a checkpoint. Without `strict`, warn of missing and unexpected ones."""
    strict = module.strict_loading if strict is None else strict
    left_out = module.load_state_dict(checkpoint["state_dict"], strict=strict)
    if left_out.missing_keys or left_out.unexpected_keys:
        rank_zero_warn(
            f"{path}: loaded without strict; not in the file: {left_out.missing_keys or 'none'}, not in the "
            f"module: {left_out.unexpected_keys or 'none'}"
        )
