"""The folder of prepared text."""

import os
from pathlib import Path

from andrea_pl.errors import UserError


def cache_folder(given: str | None) -> Path:
    """Return the given folder, or `andrea_pl` in the user's cache.

    Raises:
        UserError: If there is no home folder.
    """
    if given is not None:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base).expanduser() if base else Path.home() / ".cache") / "andrea_pl"
    except RuntimeError as error:
        raise UserError(
            "no home folder is known here to keep prepared text in; set `cache_dir`, or the environment "
            "variable HOME or XDG_CACHE_HOME"
        ) from error
