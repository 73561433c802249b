"""What the `dataset` key names: a folder in data/, a path to one, or several folders with their weights."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

from common.errors import UserError
from training.configuration.keys import ROOT, TrainConfig


def parse_dataset(text: str) -> dict[str, Fraction]:
    """{name: weight} of what the `dataset` key says, in its order; the weights add up to 1. A name alone is
    one dataset; 'a:0.7,b:0.3' samples from several. Raises UserError."""
    if ":" not in text:
        return {text: Fraction(1)}
    weights = {}
    for part in text.split(","):
        name, _, weight = (word.strip() for word in part.rpartition(":"))
        try:
            weights[name], known = Fraction(weight), name in weights
        except (ValueError, ZeroDivisionError):
            raise _mixture_error(text, f"{part.strip()!r} is not NAME:WEIGHT") from None
        if not name or known:
            raise _mixture_error(text, f"{name!r} is there twice" if known else f"{part!r} has no name")
        if weights[name] <= 0:
            raise _mixture_error(text, f"the weight of {name!r} is not above 0")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _mixture_error(text: str, why: str) -> UserError:
    return UserError(
        f"dataset={text!r}: {why}; write NAME:WEIGHT,NAME:WEIGHT, as in 'a:0.7,b:0.3', where a weight counts "
        "relative to their sum"
    )


def dataset_folder(config: TrainConfig) -> Path:
    """data/NAME, or the path itself if `dataset`, which names one, contains a slash."""
    name = config.dataset
    if "/" in name or os.sep in name:
        return Path(os.path.expanduser(name))  # leaves the name of an unknown user as it is
    if not is_plain_name(name):
        raise UserError(f"dataset={name!r} is no name of a folder in data/; a path contains a slash")
    return ROOT / "data" / name


def is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0", os.sep} & set(name)
