"""Text on its way to a terminal: what would move the cursor, colour or retitle it is shown instead.

File names, documents, samples of a model and errors about any of them can hold such signs.
"""

import unicodedata
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

KEPT = "\n\t\u200c\u200d\u00ad"
"""Newline and tab; and joiners and the soft hyphen, which words are written with."""


def escaped(text: str) -> str:
    r"""Return a text with every sign that steers a terminal written as an escape, such as ``\x1b``.

    Control characters but newline and tab are, C1 controls among them; marks that turn the direction of
    writing or are not seen; and halves of surrogate pairs, by which Python holds file names that are no
    UTF-8.

    Example:
        >>> print(escaped("a\x1b[31mb"))
        a\x1b[31mb
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(sign if _is_harmless(sign) else _escape(sign) for sign in text)


def say(message: str) -> None:
    """Log a message on rank zero, escaped."""
    rank_zero_info(escaped(message))


def warn(message: str, category: Any = UserWarning) -> None:
    """Warn on rank zero, escaped."""
    rank_zero_warn(escaped(message), stacklevel=5, category=category)


def _is_harmless(sign: str) -> bool:
    return sign in KEPT or unicodedata.category(sign) not in ("Cc", "Cf", "Cs")


def _escape(sign: str) -> str:
    code = ord(sign)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
