"""What the `dataset` key names: a folder in data/, a path to one, or several folders with their weights."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

from common.errors import UserError
from data.folders import dataset_folder
from training.configuration.keys import TrainConfig

WEIGHT = re.compile(r"\d{1,9}|\d{0,9}\.\d{1,9}|\d{1,9}/[1-9]\d{0,8}")  # 3, 0.3 or 3/10


def parse_dataset(text: str) -> dict[str, Fraction]:
    """{name: weight} of what the `dataset` key says, in its order; the weights add up to 1. A name alone is
    one dataset; 'a:0.7,b:0.3' samples from several. Raises UserError."""
    if ":" not in text:
        return {text: Fraction(1)}
    weights = {}
    for part in text.split(","):
        name, _, weight = (word.strip() for word in part.rpartition(":"))
        if not name or not WEIGHT.fullmatch(weight) or not Fraction(weight):
            raise _mixture_error(text, f"{part.strip()!r:.80} is not NAME:WEIGHT, with a weight above 0")
        if name in weights:
            raise _mixture_error(text, f"{name!r} is there twice")
        weights[name] = Fraction(weight)
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def check_dataset(config: TrainConfig) -> None:
    """Raises UserError. In a mixture there is no number of samples after which all text was seen."""
    if len(parse_dataset(config.dataset)) > 1 and config.max_epochs is not None:
        raise UserError(
            f"max_epochs={config.max_epochs:g} with a mixture: each of its datasets has epochs of its own, "
            "which the start-up report shows; set --max_iters and leave max_epochs out"
        )


def _mixture_error(text: str, why: str) -> UserError:
    return UserError(
        f"dataset={text!r:.200}: {why}; write NAME:WEIGHT,NAME:WEIGHT, as in 'a:0.7,b:0.3', where a "
        "weight counts relative to their sum"
    )


def first_folder(dataset: str) -> Path:
    """Of the first dataset of what the `dataset` key says; all of a mixture have one tokenizer."""
    return dataset_folder(next(iter(parse_dataset(dataset))))
