"""Escapes control sequences in text for a terminal, which could move the cursor, colour it or retitle it.

File names, documents, model samples, and error messages about them can contain such sequences.
"""

import unicodedata
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

KEPT = "\n\t\u200c\u200d\u00ad"
"""Newline and tab; and the joiners and the soft hyphen, which occur within words."""


def escaped(text: str) -> str:
    r"""Return a text with every character that controls a terminal written as an escape, such as ``\x1b``.

    Escapes all control characters but newline and tab (C1 controls too), invisible marks and marks that
    change the direction of writing, and lone surrogates, by which Python represents file names that are not
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
