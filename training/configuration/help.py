"""What `python train.py --help` prints: every key by section.

train.py calls this before it imports torch, which takes seconds. So nothing here may import torch or numpy.
"""

from __future__ import annotations

import inspect
import re
from types import NoneType

from common.text import plain
from training.configuration.files_and_flags import USAGE
from training.configuration.key_line import Key
from training.configuration.keys import KEYS, TrainConfig
from training.configuration.other_names import ALIASES

HELP_FLAGS = ("--help", "-h")
INTRODUCTION = """       python train.py --help | grep -A1 WORD
       complete -o default -W "$(python train.py --help | grep -oE '^  --\\w+=')" -o nospace python

The last of these lets Tab complete keys in bash. What people set first comes first here, then every key.

A config file is Python that sets keys; flags override it. A flag is --key=value or --key value; --key alone
means True, and only for a boolean. Each key is shown with its default, and then the values that it takes. A
resume refuses another value of a guarded key, unless --allow_changes names the key.
Exit status: 0 completed, 1 failed, 2 an error that you can fix, 128 + n stopped by signal n, after saving."""

FIRST = {
    "what to train": ("arch_preset", "n_layer", "n_head", "n_embd", "dataset", "block_size"),
    "how long, and what stays": ("max_iters", "eval_interval", "out_dir", "init_from"),
    "the batch": ("batch_size", "gradient_accumulation_steps", "tokens_per_iter"),
    "how it learns": ("learning_rate", "warmup_iters", "weight_decay", "dropout"),
    "where, and how fast": ("device", "dtype", "compile", "use_zero1", "use_fsdp"),
    "memory, time and cost before a run": ("dry_run", "gpu", "price"),
}
SECTION = r"# --- (.+) ---\n +(\w+):"  # a heading in the source of TrainConfig, and its first key


def wants_help(argv: list[str]) -> bool:
    return any(word.partition("=")[0] in HELP_FLAGS for word in argv)


def print_help(argv: list[str]) -> None:
    """The whole output of `train.py --help`, without looking at a device or a file of the user's."""
    print(plain(help_text()))


def help_text() -> str:
    """The usage and every key."""
    of_keys = {name: (f"={key.default}  ({values(key)})", key.help) for name, key in KEYS.items()}
    of_aliases = {name: (f"  ({type_names(one.types)})", one.help) for name, one in ALIASES.items()}
    parts = [f"{USAGE}\n{INTRODUCTION}"]
    for title, names in FIRST.items():
        parts.append("\n".join([title, *(f"  --{k}={KEYS[k].default}: {KEYS[k].help}" for k in names)]))
    parts.append("--- every key ---")
    for section, listed in {**sections(), "other names of keys": [*ALIASES]}.items():
        facts = [(name, *{**of_keys, **of_aliases}[name]) for name in listed]
        parts.append("\n".join([section, *(f"  --{k}{fact}\n      {text}" for k, fact, text in facts)]))
    return "\n\n".join(parts)


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
    facts = [" | ".join([*kinds, *map(repr, key.choices + key.words), *["package.module"] * key.modules])]
    if key.minimum is not None:
        facts.append(f"at least {key.minimum}")
    if key.maximum is not None:
        facts.append(f"at most {key.maximum:g}" if key.maximum > 9999999 else f"at most {key.maximum:,.0f}")
    if key.below is not None:
        facts.append(f"below {key.below}")
    if key.guarded:
        facts.append("guarded")
    return ", ".join(facts)


def type_names(types: tuple[type, ...]) -> str:
    return " | ".join("None" if t is NoneType else t.__name__ for t in types)
