"""Reads JSON that anybody may have written or damaged as dataclasses: every value is of the type that its
field states, or there is one error that names the file and the path of the field. A type is

    None, bool, int, float, str    a bool is no number; a float is finite, and may be written as an int
    Literal["a", True]             one of these values, each of its own type
    A | B, list[T], dict[K, T]
    a dataclass                    an object; a field without a default must be there, other names are ignored
    Annotated[T, Check(...)]       a T for which something more holds
    Any                            still to be checked
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from common.errors import UserError
from common.json_file import parse_object, read_regular
from common.text import shown

T = TypeVar("T")
LARGEST = 1 << 53  # JSON keeps whole numbers exactly up to here
UNIONS = Union, types.UnionType
WORDS = {type(None): "null", bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Check(NamedTuple):
    """A condition on a value. `expected` completes the sentence 'it is not ...'."""

    expected: str
    holds: Callable[[Any], object]


Count = Annotated[int, Check("a whole number from 0 to 2^53", lambda number: 0 <= number < LARGEST)]
Positive = Annotated[int, Check("a whole number above 0, below 2^53", lambda number: 0 < number < LARGEST)]
Sha256 = Annotated[str, Check("64 digits of a sha256", re.compile("[0-9a-f]{64}").fullmatch)]
Plain = bool | int | float | str | None  # what can be compared and shown


def read(kind: type[T], path: Path, max_bytes: int) -> T:
    """The JSON object in a file as this dataclass. Raises UserError."""
    with naming(path):
        # unique: of a name that is there twice, Python would take the last value
        return parse(kind, parse_object(read_regular(path, max_bytes), unique=True))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Around the reading of a file: whatever is wrong with it is one UserError with its name."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None


def parse(kind: Any, value: Any, path: str = "") -> Any:
    """The value as this type. `path`: where it is in the file. Raises ValueError."""
    if not _is_like(kind, value):
        got = f"a {type(value).__name__}" if isinstance(value, dict | list) else shown(value)
        raise ValueError(f"{path or 'it'} is {'null' if value is None else got}, not {_words(kind)}")
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return parse(inside[0], value, path)
    if origin in UNIONS:
        return parse(next(one for one in inside if _is_like(one, value)), value, path)
    if origin is list:
        return [parse(inside[0], one, f"{path}[{number}]") for number, one in enumerate(value)]
    if origin is dict:
        names = [parse(inside[0], name, f"a name in {path or 'it'}") for name in value]
        return {name: parse(inside[1], value[name], f"{path}.{name}".strip(".")) for name in names}
    return _object(kind, value, path) if dataclasses.is_dataclass(kind) else value


def _is_like(kind: Any, value: Any) -> bool:
    """Whether the value is of this type, apart from what is inside an object or a list."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _is_like(inside[0], value) and bool(inside[1].holds(value))
    if origin in UNIONS:
        return any(_is_like(one, value) for one in inside)
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in inside)
    if kind is float:
        return type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max
    if origin in (dict, list) or dataclasses.is_dataclass(kind):
        return isinstance(value, (origin or dict, origin or kind))
    return kind is Any or type(value) is kind


def _object(kind: Any, value: Any, path: str) -> Any:
    """The dataclass. A value that is one already stays as it is, and so does null where it is the default."""
    if not isinstance(value, dict):
        return value
    kinds, found = _types(kind), {}
    for field in dataclasses.fields(kind):
        name = f"{path}.{field.name}".strip(".")
        if field.name in value and (value[field.name] is not None or field.default is not None):
            found[field.name] = parse(kinds[field.name], value[field.name], name)
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name} is missing")
    try:
        return kind(**found)
    except ValueError as error:  # of its own checks
        raise ValueError(f"{path or 'it'} is refused: {error}") from None


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _words(kind: Any) -> str:
    """What a value of this type is."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return inside[1].expected
    if origin in UNIONS or origin is Literal:
        return " or ".join(_words(one) if origin in UNIONS else repr(one) for one in inside)
    return WORDS.get(kind) or ("a list" if origin is list else "an object")
