"""Whether the token files will fit on the disk, checked before hours of work instead of failing during them.

Nothing is read: the sizes of the input files tell it within a factor of two or three.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from common.errors import UserError
from data.pipeline.units import Unit

BYTES_PER_TOKEN = 4  # of text, about: prose has 4 to 5, source code and small vocabularies 2 to 3
GB = 1e9


def check_disk_space(units: list[Unit], folder: Path, itemsize: int, size_of: Callable[[str], int]) -> None:
    """Warns if the token files of these units may not fit; UserError if they cannot."""
    free, needed = shutil.disk_usage(folder).free, 0.0
    for unit in units:
        tokens = unit.text_size(size_of) / BYTES_PER_TOKEN
        needed += itemsize * (tokens if unit.max_tokens is None else min(tokens, unit.max_tokens))
    state = (
        f"the token files will take about {needed / GB:,.2f} GB and the disk of {folder} has "
        f"{free / GB:,.2f} GB free"
    )
    fix = "make room, or use another --output or --max_tokens"
    if needed > 3 * free:
        raise UserError(f"{state}; {fix}")
    if needed > free / 2:
        print(f"warning: {state}. If it fills, what is complete is kept: {fix}")
