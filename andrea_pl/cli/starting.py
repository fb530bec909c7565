"""What the command does first: streams that accept any text, and one process per task."""

import getpass
import logging
import os
import sys
import warnings
from typing import Any, TextIO

from andrea_callbacks.hooks.terminal import escaped
from andrea_pl.cli.interrupting import give_interrupts_back
from andrea_pl.cli.keys import with_full_keys

LOGGER = "lightning.pytorch.utilities.rank_zero"
"""The standard streams of the command."""


def start_command() -> None:
    """Make interrupts raise KeyboardInterrupt again; make streams accept any text, escaped for terminals."""
    give_interrupts_back()
    _name_user()
    logging.getLogger(LOGGER).addFilter(_escape_record)
    warnings.formatwarning = _format_warning
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _name_user() -> None:
    """Give this process's user a name if it has none, as in containers, for libraries that ask for it."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid-{os.getuid()}"


def shown(text: str, stream: TextIO) -> str:
    """Return a text for a stream: unchanged for a file or a pipe, escaped for a terminal."""
    return escaped(text) if stream.isatty() else text


def say_error(message: str) -> None:
    """Print a line on standard error, escaped, with the full keys of options."""
    print(escaped(with_full_keys(message)), file=sys.stderr)


def _escape_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = escaped(with_full_keys(record.getMessage())), ()
    return True


_python_format = warnings.formatwarning


def _format_warning(*args: Any, **kwargs: Any) -> str:
    return escaped(with_full_keys(_python_format(*args, **kwargs)))


def slurm_fault() -> str | None:
    """Return what is wrong with SLURM's tasks, None if each task has its own process."""
    given = os.environ.get("SLURM_NTASKS", "1")
    if not given.isdecimal():
        return f"SLURM_NTASKS={given}: no number of tasks; unset it outside of a job"
    if int(given) <= 1:
        return None
    if "SLURM_STEP_ID" not in os.environ and "SLURM_STEPID" not in os.environ:
        return (
            f"SLURM_NTASKS={given}: this job has {given} tasks and no srun started them; write srun andrea …,"
            " ask for one task (--ntasks=1), or unset SLURM_NTASKS to run this process by itself"
        )
    if "SLURM_NTASKS_PER_NODE" not in os.environ:
        return f"SLURM_NTASKS={given} without --ntasks-per-node; give srun or sbatch --ntasks-per-node too"
    return None
