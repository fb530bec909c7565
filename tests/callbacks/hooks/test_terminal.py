"""What is printed steers no terminal."""

import io
import logging
import warnings

import pytest

from andrea_callbacks.hooks.terminal import escaped, say, warn
from andrea_pl.cli.starting import LOGGER, say_error, shown, start_command

EVIL = "a\x1b]0;owned\x07\x1b[31mred\r\x9bx\u202eb\udcff.txt"
SHOWN = r"a\x1b]0;owned\x07\x1b[31mred\x0d\x9bx\u202eb\udcff.txt"


def test_what_steers_a_terminal_is_shown() -> None:
    """Escapes, bells, returns, C1 controls, turned writing, and bytes of names that are no UTF-8."""
    assert escaped(EVIL) == SHOWN
    assert escaped("line\n\tnaïve 日本語 👩\u200d🚀 fin") == "line\n\tnaïve 日本語 👩\u200d🚀 fin"
    assert escaped("\u2066x\u2069\u200b\ufeff\x7f\x00") == r"\u2066x\u2069\u200b\ufeff\x7f\x00"


def test_callbacks_say_it_escaped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    say(f"sample: {EVIL}")
    assert caplog.messages == [f"sample: {SHOWN}"]
    with pytest.warns(UserWarning, match="owned") as caught:
        warn(EVIL)
    assert str(caught[0].message) == SHOWN
    assert caught[0].filename == __file__


def test_logs_errors_and_warnings_of_the_command(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of files and documents come through all three."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    logger = logging.getLogger(LOGGER)
    before = list(logger.filters)
    try:
        start_command()
        caplog.set_level("INFO")
        logger.info("no text in %s", EVIL)
        assert caplog.messages == [f"no text in {SHOWN}"]
    finally:
        logger.filters[:] = before
    assert SHOWN in warnings.formatwarning(EVIL, UserWarning, "x.py", 1)
    say_error(f"andrea: error: {EVIL}")
    assert capsys.readouterr().err == f"andrea: error: {SHOWN}\n"


def test_a_pipe_gets_the_text_as_it_is() -> None:
    """What the model wrote, to a file or a program; a terminal gets it escaped."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert shown(EVIL, io.StringIO()) == EVIL
    assert shown(EVIL, Terminal()) == SHOWN
