"""What `python train.py --help` prints: every key by section, as TrainConfig says."""

from __future__ import annotations

import inspect
import re
from types import NoneType

from training.configuration.files_and_flags import USAGE
from training.configuration.keys import ALIASES, KEYS, Key, TrainConfig

INTRODUCTION = """
A config file is Python that sets keys; flags override it. Each key is shown with its default, and then the
values that it takes. A resume refuses another value of a guarded key, unless --allow_changes names the key.
Exit status: 0 completed, 1 failed, 2 an error that you can fix, 128 + n stopped by signal n, after saving."""

SECTION = r"# --- (.+) ---\n +(\w+):"  # a heading in the source of TrainConfig, and its first key


def help_text() -> str:
    """The usage and every key, without looking at a device or a file of the user's."""
    lines = [USAGE, INTRODUCTION]
    for section, names in sections().items():
        lines += ["", section]
        for name in names:
            lines += [f"  --{name}={KEYS[name].default}  ({values(KEYS[name])})", f"      {KEYS[name].help}"]
    lines += ["", "other names of keys"]
    for name, alias in ALIASES.items():
        lines += [f"  --{name}  ({type_names(alias.types)})", f"      {alias.help}"]
    return "\n".join(lines)


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
