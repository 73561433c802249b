"""Text from anywhere, made fit for a terminal: a value, a name or a message may be of any length and hold
control characters."""

from __future__ import annotations

import re
from collections.abc import Sequence

from common.errors import UserError

# escapes and other control characters, separators of lines, directions of writing, lone surrogates
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
SHOWN_CHARACTERS = 100  # of a value in a message: enough to recognize it
MESSAGE_CHARACTERS = 20_000  # of an error; the rest is no help to a reader


def plain(text: str) -> str:
    """The text with a question mark for each character that a terminal obeys instead of showing it. Line
    breaks and tabs stay."""
    return OBEYED.sub("?", text)


def one_line(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """plain() in one line of at most `most` characters."""
    # not more than what can be shown is worked on
    line = " ".join(plain(text[: 4 * most]).split())
    return shorten(line, most) if len(text) <= 4 * most else shorten(f"{line} ...", most)


def shorten(text: str, most: int) -> str:
    """The text, with '...' in place of its middle if it is longer than `most`."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def shown(value: object) -> str:
    """repr() for a message: one of many digits or characters is cut."""
    try:
        return shorten(repr(value), SHOWN_CHARACTERS)
    except ValueError:  # Python refuses to write an int of more than 4,300 digits
        return "an int of more than 4,300 digits"


def aligned(
    head: Sequence[str], rows: list[list[str]], text_columns: Sequence[str], form: str = "simple"
) -> list[str]:
    """The lines of a table in one of tabulate's formats. Columns of numbers, which are all that are not named
    in text_columns, are aligned on the right."""
    try:
        import tabulate
    except ImportError:
        raise UserError("tables need the tabulate library: pip install -r requirements.txt") from None
    tabulate.MIN_PADDING = 0  # else a column is at least two characters wider than its name
    sides = ["left" if name in text_columns else "right" for name in head]
    table = tabulate.tabulate(rows, head, form, disable_numparse=True, colalign=sides)
    return [line.rstrip() for line in table.splitlines()]
