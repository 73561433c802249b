"""Records that hold no document. They are counted and named, and never left out in silence."""

from collections.abc import Iterable

from common.text import one_line

SHOWN_COLUMNS = 500  # characters of the names that exist, where one is missing


class BadRecord(Exception):
    """Where a record is, and what is wrong with it."""


class MissingColumn(BadRecord):
    """A record without the name of the document. with_text: names that hold text, the longest first."""

    def __init__(self, place: object, text_key: str, columns: Iterable[str], with_text: list[str]):
        shown = one_line(", ".join(columns), SHOWN_COLUMNS) or "none"
        fix = f"; use --text_key={one_line(with_text[0])}" if with_text else ""
        super().__init__(f"no column {text_key!r:.100} in {place}; it has: {shown}{fix}")
