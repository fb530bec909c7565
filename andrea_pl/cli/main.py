"""The entry point. Every outcome is one line on standard error and an exit code.

0    done
1    the user must fix something: input, configuration, checkpoint, machine
2    the arguments or a configuration cannot be parsed
3    a loss, a gradient or a weight is not finite
4    a callback stopped the run
128+ a signal ended it: 143 SIGTERM, 130 SIGINT, 129 SIGHUP
"""

import logging
import sys
import warnings
from typing import cast

from lightning.fabric.utilities.exceptions import MisconfigurationException

from andrea_callbacks import NonFiniteError
from andrea_pl.cli.app import AndreaCLI
from andrea_pl.cli.arguments import given_texts, restrict
from andrea_pl.cli.commands import STANDALONE
from andrea_pl.cli.faults import dead_worker, encoding_hint
from andrea_pl.cli.interrupting import EXIT_INTERRUPTED
from andrea_pl.cli.parser import RefusedArguments, explain
from andrea_pl.cli.renamed import UsageError
from andrea_pl.cli.starting import say_error, start_command
from andrea_pl.data.sources.listing import listed_once
from andrea_pl.errors import UserError
from andrea_pl.runs.output import survive_dead_output
from andrea_pl.runs.signals import EndedBySignal, StoppedBySignal, ending_in_order

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_NONFINITE = 3
EXIT_STOPPED = 4


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        0; 1 if the user must fix something; 3 if loss, gradients or weights were not finite; 4 if a callback
        stopped the run; 128 plus the signal's number if a signal did. Wrong usage raises SystemExit(2).
    """
    survive_dead_output()
    start_command()
    given = sys.argv[1:] if argv is None else argv
    _quieten_lightning()
    try:
        arguments = restrict(given)
        with ending_in_order(), listed_once():
            if arguments and arguments[0] in STANDALONE:
                STANDALONE[arguments[0]](arguments[1:])
                return 0
            stopped = AndreaCLI(arguments).stop_reason.event
    except StoppedBySignal as stop:
        say_error(f"andrea: {stop}; the same command with --resume goes on")
        return int(cast(int, stop.code))
    except RefusedArguments as refused:
        say_error(f"andrea: error: {explain(refused, given_texts(given))}")
        raise
    except (NonFiniteError, UserError, MisconfigurationException, OSError, UnicodeError) as error:
        hint = encoding_hint() if isinstance(error, UnicodeError) else ""
        say_error(f"andrea: error: {dead_worker(error) or error}{hint}")
        if isinstance(error, UsageError):
            raise SystemExit(EXIT_USAGE) from error
        return EXIT_NONFINITE if isinstance(error, NonFiniteError) else EXIT_ERROR
    except Exception as error:  # torch says that a worker died within whatever the run just did
        fault = dead_worker(error)
        if fault is None:
            raise
        say_error(f"andrea: error: {fault}")
        return EXIT_ERROR
    except (KeyboardInterrupt, SystemExit) as end:
        if not isinstance(end, (KeyboardInterrupt, EndedBySignal)) and not isinstance(
            end.__context__, KeyboardInterrupt
        ):
            raise
        say_error("andrea: interrupted outside of training, where there is nothing to save")
        return int(cast(int, end.code)) if isinstance(end, EndedBySignal) else EXIT_INTERRUPTED
    if stopped is not None:
        say_error(f"andrea: stopped by {stopped.kind}: {stopped.message}")
        return EXIT_STOPPED
    return 0


def _quieten_lightning() -> None:
    """Hide messages of Lightning that do not apply here: advertisements, and advice for other modules."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip: For seamless" not in record.getMessage()
    )
    for message in (
        "Using ModelCheckpoint with manual optimization",
        "LightningCLI's args parameter is intended to run from within Python",
        "Experiment logs directory .* exists",  # metrics.csv has been given another name
        "`isinstance",  # Lightning 2.6 on a newer torch
    ):
        warnings.filterwarnings("ignore", message=message)
