"""What `python train.py --help [WORD]` prints: every key by section, or those about WORD.

train.py calls this before it imports torch, which takes seconds. So nothing here may import torch or numpy.
"""

from __future__ import annotations

import difflib
import inspect
import re
from types import NoneType

from common.errors import UserError
from common.text import SHOWN_CHARACTERS, plain, shorten, shown
from training.configuration.files_and_flags import USAGE
from training.configuration.key_line import Key
from training.configuration.keys import KEYS, TrainConfig
from training.configuration.other_names import ALIASES

HELP_FLAGS = ("--help", "-h")
INTRODUCTION = """       python train.py --help [WORD]

WORD selects keys: by name or a part of it, by section, or by a word of the text.

A config file is Python that sets keys; flags override it. A flag is --key=value or --key value; --key alone
means True, and only for a boolean. Each key is shown with its default, and then the values that it takes. A
resume refuses another value of a guarded key, unless --allow_changes names the key.
Exit status: 0 completed, 1 failed, 2 an error that you can fix, 128 + n stopped by signal n, after saving."""

SECTION = r"# --- (.+) ---\n +(\w+):"  # a heading in the source of TrainConfig, and its first key
OTHER_NAMES = "other names of keys"


def wants_help(argv: list[str]) -> bool:
    return any(word.partition("=")[0] in HELP_FLAGS for word in argv)


def print_help(argv: list[str]) -> None:
    """The whole output of `train.py --help`; a word after --help selects keys. Raises UserError if there is
    no key about it."""
    at = next(i for i, word in enumerate(argv) if word.partition("=")[0] in HELP_FLAGS)
    word = argv[at].partition("=")[2] or "".join(argv[at + 1 : at + 2])
    word = "" if word.endswith(".py") else word.lstrip("-").partition("=")[0]  # a config file, a flag
    print(plain(help_about(word) if word else help_text()))


def help_text() -> str:
    """The usage and every key, without looking at a device or a file of the user's."""
    listed = [f"{section}\n{_lines(names)}" for section, names in {**sections(), **_other_names()}.items()]
    return "\n\n".join([f"{USAGE}\n{INTRODUCTION}", *listed])


def help_about(word: str) -> str:
    """The keys that have the word in their name or text, and those of the section that it names."""
    wanted = _searchable(word)
    found = {}
    for section, names in {**sections(), **_other_names()}.items():
        title = section.partition(";")[0]
        about = names if wanted in (title, *title.split()) else [n for n in names if wanted in _text_of(n)]
        if about:
            found[section] = about
    if not found:
        titles = [section.partition(";")[0] for section in sections()]
        near = difflib.get_close_matches(wanted, [*KEYS, *ALIASES, *titles], n=3, cutoff=0.4)
        nearest = f"; the nearest names are {', '.join(near)}" if near else ""
        raise UserError(
            f"no key, section or text of the help has {shown(shorten(word, SHOWN_CHARACTERS))}{nearest}; "
            "python train.py --help lists every key"
        )
    return "\n\n".join(f"{section}\n{_lines(names)}" for section, names in found.items())


def _searchable(text: str) -> str:
    """Words as a user may write them: learning-rate, 'Learning rate', learning_rate."""
    return text.lower().replace("_", " ").replace("-", " ")


def _text_of(name: str) -> str:
    return _searchable(_lines([name]))


def _lines(names: list[str]) -> str:
    lines = []
    for name in names:
        if name in ALIASES:
            facts, text = f"--{name}  ({type_names(ALIASES[name].types)})", ALIASES[name].help
        else:
            facts, text = f"--{name}={KEYS[name].default}  ({values(KEYS[name])})", KEYS[name].help
        lines += [f"  {facts}", f"      {text}"]
    return "\n".join(lines)


def _other_names() -> dict[str, list[str]]:
    return {OTHER_NAMES: list(ALIASES)}


def sections() -> dict[str, list[str]]:
    """{section: its keys}, in the order of keys.py."""
    section_at = {first: title for title, first in re.findall(SECTION, inspect.getsource(TrainConfig))}
    found: dict[str, list[str]] = {}
    for name in KEYS:
        if name in section_at:
            found[section_at[name]] = names = []
        names.append(name)
    return found


def values(key: Key) -> str:
    """'int, at least 1, guarded', or the choices: "'stream' | 'truncate', guarded"."""
    kinds = [] if key.choices else [type_names(key.types)]
    facts = [" | ".join([*kinds, *map(repr, key.choices + key.words)])]
    if key.minimum is not None:
        facts.append(f"at least {key.minimum}")
    if key.maximum is not None:
        facts.append(f"at most {key.maximum:g}" if key.maximum > 9999999 else f"at most {key.maximum:,.0f}")
    if key.guarded:
        facts.append("guarded")
    return ", ".join(facts)


def type_names(types: tuple[type, ...]) -> str:
    return " | ".join("None" if t is NoneType else t.__name__ for t in types)
