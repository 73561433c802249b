"""Types of command-line options, for argparse: numbers within limits, and paths."""

from __future__ import annotations

import glob
import math
import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from common.errors import UserError
from common.text import shown

INT64_MAX = 2**63 - 1


def whole_number(least: int, most: int = INT64_MAX) -> Callable[[str], int]:
    """An int between these two."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:  # also one of more than 4,300 digits
            raise ArgumentTypeError(f"{shown(text)} is not a whole number") from None
        if not least <= number <= most:
            raise ArgumentTypeError(f"{shown(number)} is not between {least:,} and {most:,}")
        return number

    return read


def real_number(least: float, most: float) -> Callable[[str], float]:
    """A float between these two."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ArgumentTypeError(f"{shown(text)} is not a number") from None
        if not least <= value <= most:  # also NaN
            raise ArgumentTypeError(f"{value:g} is not between {least:g} and {most:g}")
        return value

    return read


def user_path(text: str) -> str:
    """A path as a shell would read it: it leaves the ~ of --output=~/x to us. '' would be this folder."""
    if not text.strip():
        raise ArgumentTypeError("it is empty; name a file or a folder")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ArgumentTypeError(f"{shown(text)}: there is no user of this name; a folder is ./{text}")
    return path


def user_folder(text: str) -> Path:
    return Path(user_path(text))


def matching_files(pattern: str) -> list[Path]:
    """What a glob matches, sorted. A folder at its beginning that exists is meant as it is written, also if
    its name has brackets."""
    folder = next(place for place in Path(pattern).parents if place.is_dir())
    below = str(Path(pattern).relative_to(folder))
    return sorted(folder / name for name in glob.glob(below, root_dir=folder, recursive=True))


def check_output(folder: str | Path, option: str = "--output") -> None:
    """Raises UserError if nothing can be written into the folder that the option names, which need not be
    there yet: to be said before the work, not after it."""
    folder = Path(folder)
    nearest = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise UserError(f"{option}={folder} cannot be a folder, because {nearest} is none; name another one")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{option}={folder}: you may not write into {nearest}; name another folder")


def target_losses(text: str) -> list[float]:
    """Of the key loss_targets: '3.5,3.28' or '3.28 3.5', the highest first. Raises ValueError, which names
    the fault."""
    losses = []
    for word in text.replace(",", " ").split():
        try:
            loss = float(word)
        except ValueError:
            loss = math.nan
        if not (math.isfinite(loss) and loss > 0):
            raise ValueError(f"{word[:40]!r} is not a positive number")
        if loss in losses:
            raise ValueError(f"{loss:g} is there twice")
        losses.append(loss)
    return sorted(losses, reverse=True)
