"""What a resume does with a checkpoint whose state is not what it should be."""

import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from andrea_pl.errors import UserError

RESTORERS = ("load_state_dict", "on_load_checkpoint", "compare_settings", "_load_combined_loader_states")
"""Functions that take state from a checkpoint, ours and Lightning's."""

CONNECTOR = "checkpoint_connector.py"
"""Where Lightning hands a checkpoint's parts to trainer, loops, callbacks, optimizers."""


PARTS: dict[str, type] = {
    "pytorch-lightning_version": str,
    "global_step": int,
    "epoch": int,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
}
"""What a resume needs besides the weights; Lightning would start afresh without some of it, in silence."""


def require_state(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Refuse a checkpoint that nothing can go on from.

    Raises:
        UserError: If a part of the state is missing or of another kind; the message names it.
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
    """Say in one line that a checkpoint's state cannot be restored, where that is what failed.

    A file that somebody edited may lack any part of the state, or have another kind of value there. Errors
    raised elsewhere, and ours, go through as they are.

    Args:
        path: The checkpoint; None where there is none.

    Raises:
        UserError: If the state cannot be restored; the message has the first fault.
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
