"""Keeps Lightning from resuming a checkpoint that nobody asked for.

Under SLURM, when `fit` has no `ckpt_path`, Lightning resumes any `hpc_ckpt_N.ckpt` in the trainer's root
folder, by default the working folder. Such a file has no manifest, and nothing compares its settings. Here a
run continues only by `--resume`, by a path, or as a requeued SLURM job.
"""

from importlib import import_module
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from andrea_callbacks.hooks.packages import twin_of

PATH, SELECT = "_hpc_resume_path", "_parse_ckpt_path"
"""Lightning's functions that find such a file, and that choose a checkpoint."""


def never_resume_unasked() -> None:
    """Make Trainers ignore such files if they, or one of their callbacks, have `resumes_only_when_asked`.

    Other Trainers are not affected. This covers both packages of Lightning if they are imported.
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
