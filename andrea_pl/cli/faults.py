"""Recognises faults of the machine that libraries report in their own words or inside other errors."""

import locale
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

WORKER = re.compile(r"DataLoader worker \(pid\(?s?\)? ?([\d, ]+)\)(?: is killed by signal: ([\w ]+)| exited)")
"""torch's message about a dead DataLoader worker. Any call of the run may raise it."""


def dead_worker(error: BaseException) -> str | None:
    """Return a message if a DataLoader worker has died, None for other errors.

    Args:
        error: The error that ended the run. Its causes are searched, since torch may raise in any call.
    """
    for each in _chain(error):
        found = WORKER.search(str(each))
        if found is None and not _is_cut_connection(each):
            continue
        pids, how = (found[1].strip(), found[2]) if found else ("unknown", None)
        if how and how.startswith("Bus"):
            why = "ran out of shared memory"
            remedy = "give the container more of it (docker run --shm-size=8g), or set data.num_workers to 0"
        else:
            why = f"was ended by the signal {how}" if how else "ended by itself"
            remedy = (
                "most often the machine was short of memory: lower data.num_workers or data.prefetch_factor, "
                "or free some"
            )
        return (
            f"a process that reads text ahead (DataLoader worker, pid {pids}) {why}; {remedy}. "
            "The same command with --resume goes on from the last checkpoint"
        )
    return None


def _is_cut_connection(error: BaseException) -> bool:
    """Return whether a loader lost the connection to a worker before torch noticed that it was dead."""
    return isinstance(error, (ConnectionError, EOFError)) and any(
        Path(frame.filename).name == "dataloader.py" for frame in traceback.extract_tb(error.__traceback__)
    )


def encoding_hint() -> str:
    """Return advice if this process uses an encoding that cannot represent the text."""
    encoding = locale.getpreferredencoding(False)
    is_whole = encoding.lower().replace("-", "").replace("_", "") == "utf8"
    return "" if is_whole else f"; this process takes text for {encoding}: set PYTHONUTF8=1"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: list[BaseException | None] = [error]
    while following:
        each = following.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        following += [each.__cause__, each.__context__]
