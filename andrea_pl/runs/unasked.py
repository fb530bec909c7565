"""No checkpoint is resumed that nobody named: under SLURM, Lightning takes any `hpc_ckpt_N.ckpt` it finds.

It looks into the trainer's root folder, the working folder by default, when `fit` has no `ckpt_path`. Such a
file has no manifest, and its settings are compared with nothing. A run here goes on by `--resume`, a path, or
as the SLURM job that was requeued.
"""

from importlib import import_module
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from andrea_callbacks.hooks.packages import twin_of

PATH, SELECT = "_hpc_resume_path", "_parse_ckpt_path"
"""Where Lightning finds such a file, and what it chooses a checkpoint by."""


def never_resume_unasked() -> None:
    """Have Trainers leave those files alone that have an attribute or a callback `resumes_only_when_asked`.

    All other Trainers do what they did. It holds for both packages of Lightning that are imported by now.
    """
    module = import_module("lightning.pytorch.trainer.connectors.checkpoint_connector")
    kind = cast(type, cast(Any, module)._CheckpointConnector)
    for each in (kind, twin_of(kind)):
        if each is not None and not hasattr(each, "_is_asked"):
            _guard(each)


def _guard(connector: Any) -> None:
    find, select = connector.__dict__[PATH].fget, connector.__dict__[SELECT]

    def guarded_select(self: Any, state_fn: Any, ckpt_path: Any, *rest: Any, **named: Any) -> Any:
        self._is_asked = ckpt_path is not None
        return select(self, state_fn, ckpt_path, *rest, **named)

    def guarded_find(self: Any) -> str | None:
        found = find(self)
        if found is None or self._is_asked or not _asks(self.trainer):
            return found
        if not self._is_told:
            self._is_told = True
            rank_zero_info(
                f"{found} is not resumed, since nobody asked for it: give it as ckpt_path to do so"
            )
        return None

    connector._is_asked, connector._is_told = True, False
    setattr(connector, PATH, property(guarded_find))
    setattr(connector, SELECT, guarded_select)


def _asks(trainer: pl.Trainer) -> bool:
    marked = [trainer, *cast("list[Any]", cast(Any, trainer).callbacks)]
    return any(getattr(each, "resumes_only_when_asked", False) for each in marked)
