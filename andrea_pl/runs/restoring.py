"""Turns errors from a checkpoint with unusable state into one readable line."""

import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from andrea_pl.errors import UserError

RESTORERS = ("load_state_dict", "on_load_checkpoint", "compare_settings", "_load_combined_loader_states")
"""Functions, ours and Lightning's, that read state from a checkpoint."""

CONNECTOR = "checkpoint_connector.py"
"""Lightning's file that hands a checkpoint's parts to trainer, loops, callbacks and optimizers."""


PARTS: dict[str, type] = {
    "pytorch-lightning_version": str,
    "global_step": int,
    "epoch": int,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
}
"""What a resume needs besides the weights. Without some of it Lightning would silently start over."""


def require_state(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Refuse a checkpoint that cannot be resumed.

    Raises:
        UserError: If a part of the state is missing or has the wrong type; the message names it.
    """
    wrong = [name for name, kind in PARTS.items() if not isinstance(checkpoint.get(name), kind)]
    if not wrong:
        loop: Any = checkpoint["loops"].get("fit_loop")
        wrong += [] if isinstance(loop, dict) and "state_dict" in loop else ["loops.fit_loop"]
        states = cast("dict[Any, Any]", checkpoint["callbacks"])
        wrong += [f"callbacks.{name}" for name, state in states.items() if not isinstance(state, dict)]
    if wrong:
        raise UserError(
            f"{path}: its state cannot be restored (missing, or of another kind: {', '.join(wrong):.200}); "
            "take another checkpoint, or take its weights alone with `init_from`"
        )


@contextmanager
def restoring(path: str | Path | None) -> Generator[None]:
    """Turn an error while restoring a checkpoint's state into one line.

    An edited file may lack any part of the state, or hold values of other types. `UserError`, and errors
    raised elsewhere, pass unchanged.

    Args:
        path: The checkpoint, or None.

    Raises:
        UserError: If the state cannot be restored; the message names the first fault.
    """
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        if path is None or not _is_in_restoring(error):
            raise
        fault = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"{path}: its state cannot be restored ({fault:.200}); take another checkpoint, or take its "
            "weights alone with `init_from`"
        ) from error


def _is_in_restoring(error: BaseException) -> bool:
    return any(
        frame.name in RESTORERS or Path(frame.filename).name == CONNECTOR
        for frame in traceback.extract_tb(error.__traceback__)
    )
