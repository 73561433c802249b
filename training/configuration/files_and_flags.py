"""Reads a config file and flags into a checked TrainConfig.

    python train.py config/FILE.py --key=value ...

The file is Python that this program executes: run only files that you would run yourself. Every public name
it leaves must be a key of TrainConfig; it may import, compute and use _private names.
"""

from __future__ import annotations

import ast
import os
import re
import traceback
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from common.errors import UserError
from common.text import shown
from training.configuration.batch import BATCH, check_tokens
from training.configuration.dataset_name import check_dataset
from training.configuration.flags import is_setting, not_a_flag, place, take_flags, unknown_setting
from training.configuration.key_line import FLOAT_MAX
from training.configuration.keys import KEYS, ROOT, TrainConfig
from training.configuration.other_names import ALIASES
from training.configuration.rules import PATHS, check

USAGE = "usage: python train.py config/FILE.py [--key=value ...]"


class Settings(NamedTuple):
    """What a user states."""

    values: dict[str, Any]  # {key: value}
    places: dict[str, str]  # {key: the line of the file, or the flag, that states it}
    of_file: dict[str, Any]  # {key: value} of the file, without the flags


def load_config(argv: list[str], world_size: int = 1) -> TrainConfig:
    """Reads argv (a config file and flags) into a checked TrainConfig. Raises UserError.

    With init_weights, the keys of the model are in the weights' folder: training/pretrained/settings.py."""
    return make_config(read_settings(argv), world_size)


def read_settings(argv: list[str]) -> Settings:
    """What the config file and the flags state, typed and with aliases resolved. Raises UserError."""
    flags, rest = take_flags(argv)
    files = [word for word in rest if not word.startswith("-")]
    for word in rest:
        if word.startswith("-"):
            raise not_a_flag(word)
    if len(files) != 1:
        shipped = ", ".join(sorted(f"config/{path.name}" for path in (ROOT / "config").glob("*.py")))
        got = "no config file given" if not files else f"one config file expected, got {' '.join(files)}"
        raise UserError(f"{got}\n{USAGE}\nshipped configs: {shipped}")
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    split = [flag.removeprefix("--").partition("=") for flag in flags]  # the text may itself contain '='
    typed_flags = [(name, _Text(text), place(name)) for name, _, text in split]
    for entries, are_flags in ((_read_file(Path(files[0])), False), (typed_flags, True)):  # a flag wins
        of_file = dict(values)
        named: dict[str, str] = {}  # {key: the name that set it here}
        for name, value, where in sorted(entries, key=lambda one: one[0] in ALIASES):  # one may add to a key
            adds = name in ALIASES and ALIASES[name].adds
            for key, typed in _checked(name, value, where, values).items():
                if are_flags and not adds and named.get(key, name) != name and values[key] != typed:
                    raise UserError(
                        f"{where} contradicts --{named[key]}: both set {key}, to {shown(typed)} and to "
                        f"{shown(values[key])}; leave one of them out"
                    )
                values[key], places[key], named[key] = typed, where, name
    values |= {name: _home(values[name]) for name in PATHS if name in values}
    return Settings(values, places, of_file)


def make_config(settings: Settings, world_size: int) -> TrainConfig:
    """The checked TrainConfig that has these values. Raises UserError."""
    config = TrainConfig(**settings.values)
    numbers = {name: settings.of_file.get(name, KEYS[name].default) for name in BATCH}
    check_tokens(config, TrainConfig(**settings.values | numbers), world_size)
    check(config, world_size)
    check_dataset(config)
    return config


def _read_file(path: Path) -> list[tuple[str, object, str]]:
    """(name, value, 'file:line') for every public name that executing the file leaves behind."""
    try:
        source = path.read_text(encoding="utf-8-sig")  # an editor may have begun it with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the config file {path}: {error}\n{USAGE}") from None
    namespace = {"__file__": str(path), "__name__": "__config__"}
    try:
        tree = ast.parse(source, str(path))
        exec(compile(tree, str(path), "exec"), namespace)
    except SyntaxError as error:
        at = f":{error.lineno}" if error.lineno else ""
        raise UserError(f"{path}{at}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = frames[-1].lineno if frames else "?"
        raise UserError(f"{path}:{line}: the config file raised {type(error).__name__}: {error}") from None
    lines, imported = _assignments(tree)
    return [
        (name, value, f"{path}:{lines.get(name, '?')}")
        for name, value in namespace.items()
        if name in KEYS or not (name.startswith("_") or name in imported or callable(value))
    ]


def _assignments(tree: ast.AST) -> tuple[dict[str, int], set[str]]:
    """Line of the last assignment of each name, and the names that imports bind."""
    lines, imported = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            lines[node.id] = node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return lines, imported - set(lines)


class _Text(str):
    """A value from the command line, not yet typed."""


def _home(paths: str) -> str:
    """The text with ~ expanded where a path begins, as a shell does; a mixture names several."""
    return re.sub(r"(?:^|(?<=,))(\s*)(~[^/,:]*)", lambda m: m[1] + os.path.expanduser(m[2]), paths)


# --- typing ---


def _checked(name: str, value: object, where: str, stated: dict[str, Any]) -> dict[str, object]:
    """{key: typed value}, aliases resolved. stated: the values so far. Raises UserError naming the place and
    the nearest key."""
    if not is_setting(name):
        raise unknown_setting(name, where)
    if name in ALIASES:
        return ALIASES[name].sets(_typed(name, value, ALIASES[name].types, where), stated)
    return {name: _typed(name, value, KEYS[name].types, where, KEYS[name].words)}


def _typed(
    name: str, value: object, allowed: tuple[type, ...], where: str, words: tuple[str, ...] = ()
) -> object:
    if isinstance(value, str) and value in words:
        return str(value)
    if isinstance(value, _Text):
        value = _parse(str(value), allowed)
    if type(value) in allowed:
        return value
    if float in allowed and type(value) is int and abs(value) <= FLOAT_MAX:  # 10**400 is no float
        return float(value)
    wanted = " or ".join(["None" if t is NoneType else t.__name__ for t in allowed] + list(map(repr, words)))
    hint = ""
    if int in allowed and type(value) is float and value.is_integer():
        hint = f"; write {int(value)}"
    if dict in allowed:
        hint = "; write it as {'rope_type': 'linear', 'factor': 2.0}, on the command line in quotes"
    if float in allowed and type(value) is int:
        raise UserError(f"{name}={shown(value)} in {where} is beyond {FLOAT_MAX:g}, the limit")
    raise UserError(f"{name}={shown(value)} in {where} is {type(value).__name__}, expected {wanted}{hint}")


def _parse(text: str, allowed: tuple[type, ...]) -> object:
    """Command-line text as the first reading that the key allows, else as text."""
    if bool in allowed and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last: '[[[[...'
        return text
    fits = type(value) in allowed or (float in allowed and type(value) is int)
    return text if str in allowed and not fits else value
