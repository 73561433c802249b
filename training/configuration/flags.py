"""Finds the flags of train.py's keys among the arguments of a command, in each form that a flag may have.

    --key=value    --key value    --key (of a boolean: True)

A boolean never takes the next word, so `--dry_run config/FILE.py` is a flag and a config file.
"""

from __future__ import annotations

from collections.abc import Collection

from common.errors import UserError
from common.text import SHOWN_CHARACTERS, shorten, shown
from training.configuration.keys import KEYS
from training.configuration.other_names import ALIASES, OTHER_FLAGS, REMOVED_KEYS
from training.configuration.rules import did_you_mean


def take_flags(argv: list[str], others: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """(the flags of keys, each as --key=value; the other arguments, in their order). `others` names options
    that the command itself has, although they are keys, too. Raises UserError if a value is missing."""
    flags: list[str] = []
    rest: list[str] = []
    words = list(reversed(argv))
    while words:
        word = words.pop()
        name, equals, _ = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name in others or not is_setting(name):
            rest.append(word)
        elif equals:
            flags.append(word)
        else:
            flags.append(f"{word}={_value_after(name, words)}")
    return flags, rest


def is_setting(name: str) -> bool:
    return name in KEYS or name in ALIASES


def _value_after(name: str, words: list[str]) -> str:
    """The value of --name without '='; takes the next word, which is the last of `words`, if it is that."""
    if bool in (ALIASES[name] if name in ALIASES else KEYS[name]).types:
        return "True"
    if not words or words[-1].startswith("--") or words[-1].endswith(".py"):
        raise UserError(f"--{name} has no value; write --{name}=VALUE")
    return words.pop()


def not_a_flag(word: str) -> UserError:
    """The error about an argument that is no flag of a key."""
    name = word.removeprefix("--").partition("=")[0]
    if word.startswith("--") and name:
        return unknown_setting(name, place(name))
    return UserError(f"cannot read {shown(word)}: flags are written --key=value, for example --max_iters=100")


def unknown_setting(name: str, where: str) -> UserError:
    """The error about a name that is no key, with the nearest key."""
    if name in REMOVED_KEYS:
        return UserError(f"{name} in {where} was removed: {REMOVED_KEYS[name].instead}; leave it out")
    if theirs := OTHER_FLAGS.get(name.rpartition(".")[2]):
        hint = f"; here it is {theirs}, if you come from another program: docs/coming_from.md"
    else:
        listed = "; python train.py --help lists every key, docs/coming_from.md what other programs call them"
        hint = did_you_mean(name, [*KEYS, *ALIASES]) or listed
    return UserError(f"unknown setting {shown(name)} in {where}{hint}")


def place(name: str) -> str:
    """How an error names the flag."""
    return f"the flag --{shorten(name, SHOWN_CHARACTERS)}"
