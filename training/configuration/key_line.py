"""What one line of training/configuration/keys.py says of a key: its default, its meaning, its limits."""

from __future__ import annotations

import dataclasses
import typing
from types import NoneType, UnionType
from typing import Literal, NamedTuple, TypeVar, Union

from training.configuration.choices import CHOICES, names_of

T = TypeVar("T")

# Greatest values. A key without one of its own has that of its type.
INT_MAX = 2**63 - 1  # other programs that read the record and torch have 64 bits
FLOAT_MAX = 1e18  # a product of two is still a number in float32, in which a GPU computes
WORKERS_MAX = 1024  # each is a process, on a machine that has at most some hundred cores
READ_AHEAD_MAX = 1024  # so many iterations of each worker are held in memory
BATCH_MAX = 2**20  # sequences, held in memory together
YEAR = 525_600.0  # minutes; timers of the system end at some hundred years


def key(default: T, help: str, **limits: float | None) -> T:
    """A field of TrainConfig; limits are `minimum`, `maximum`, `below` and `guarded` of Key."""
    return dataclasses.field(default=default, metadata={"help": help, **limits})


class Key(NamedTuple):
    """What the line of one key says."""

    types: tuple[type, ...]  # that a value may have, besides the words; None comes last
    choices: tuple[str | None, ...]  # () where the type allows any value
    modules: bool  # beside its choices, package.module is one (training/configuration/choices.py)
    words: tuple[str, ...]  # that may stand in place of a number: 'auto'
    default: object
    help: str
    minimum: float | None = None
    maximum: float | None = None
    below: float | None = None  # what a value must not reach
    guarded: bool = False  # a resume may change it only if allow_changes names it

    def most(self, value: float) -> float:
        """The greatest value of this value's type."""
        return self.maximum or (FLOAT_MAX if isinstance(value, float) else INT_MAX)


def read_line(hint: object, field: dataclasses.Field) -> Key:
    """`int | None` allows two types; Literal["a", "b"] allows these choices, of type str; `int |
    Literal["auto"]` allows numbers and this word."""
    is_union = typing.get_origin(hint) in (UnionType, Union)
    alternatives = typing.get_args(hint) if is_union else (hint,)
    literals = [value for one in alternatives for value in typing.get_args(one)]
    types = [one for one in alternatives if typing.get_origin(one) is not Literal]
    choices, words = (literals, []) if not types else ([], literals)
    modules = field.name in CHOICES
    choices = [*names_of(field.name)] if modules else choices
    allowed = types or dict.fromkeys(type(choice) for choice in choices)
    ordered = tuple(sorted(allowed, key=lambda t: t is NoneType))
    return Key(ordered, tuple(choices), modules, tuple(words), field.default, **field.metadata)
