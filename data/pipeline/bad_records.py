"""Records that hold no document. They are counted and named, and never left out in silence."""

from collections.abc import Iterable

from common.errors import UserError
from common.text import one_line

BAD_LISTED = 20  # bad records that a message or a part's manifest describes; all are counted
SHOWN_COLUMNS = 500  # characters of the names that exist, where one is missing


class BadRecord(Exception):
    """Where a record is, and what is wrong with it."""


class MissingColumn(BadRecord):
    """A record without the name of the document. with_text: names that hold text, the longest first."""

    def __init__(self, place: object, text_key: str, columns: Iterable[str], with_text: list[str]):
        shown = one_line(", ".join(columns), SHOWN_COLUMNS) or "none"
        fix = f"; use --text_key={one_line(with_text[0])}" if with_text else ""
        super().__init__(f"no column {text_key!r:.100} in {place}; it has: {shown}{fix}")


def too_many_bad(count: int, reasons: list[str], max_bad: int) -> UserError:
    """reasons: of the first of them."""
    shown = "\n    ".join(reasons[:BAD_LISTED])
    return UserError(
        f"{count:,} bad records in all, more than --max_bad={max_bad}; look at them, and run the same "
        f"command with a larger one to leave them out:\n    {shown}"
    )
