"""What a data command says if the disk refuses: a full disk, no permission, a folder in place of a file."""

import contextlib
from collections.abc import Iterator

from common.errors import UserError


@contextlib.contextmanager
def disk_errors_are_shown() -> Iterator[None]:
    """An error of the system becomes a UserError."""
    try:
        yield
    except BrokenPipeError:  # of our output, which run_command() knows
        raise
    except OSError as error:
        where = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise UserError(f"{where}; run the same command again when that is in order") from None
