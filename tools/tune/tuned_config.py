"""Writes the chosen settings as a config of train.py: plain assignments under a header that says what was
measured, where and when.
"""

from __future__ import annotations

import datetime
import json
import os
import textwrap
from pathlib import Path
from typing import Any

from common.durable_file import write_bytes
from common.errors import UserError
from tools.tune.dimensions import Keys
from tools.tune.report import COLUMNS, explanation, spread_text, table
from tools.tune.search import Ladder
from training.configuration.keys import AUTO, KEYS, ROOT

MARK = "# Found by tools.tune"  # how the file begins; another file of this name is not replaced
WIDTH = 110


def path_for(config: Path, processes: int) -> Path:
    """config/tuned_NAME.py, with the number of GPUs if there are several."""
    several = f"_{processes}gpu" if processes > 1 else ""
    return ROOT / "config" / f"tuned_{config.stem.removeprefix('tuned_')}{several}.py"


def check_path(path: Path) -> None:
    """Raises UserError if somebody else's file would be replaced."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"{path} is no regular file; name another one with --write")
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(MARK):
        raise UserError(f"{path} was not written by tools.tune; rename it, or name another one with --write")
    if not path.parent.is_dir():
        raise UserError(f"the folder {path.parent} is not there; name another file with --write")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"the folder {path.parent} cannot be written to; name another file with --write")


def write(path: Path, ladder: Ladder, stated: dict[str, Any], command: str) -> None:
    lines = [*header(ladder, command), *assignments(ladder, stated, ladder.chosen())]
    write_bytes(path, ("\n".join(lines) + "\n").encode())


def header(ladder: Ladder, command: str) -> list[str]:
    space, chosen = ladder.space, ladder.chosen()
    versions, memory = space.machine.versions, space.machine.memory
    name = versions["gpu_name"] or memory.device
    machine = f"GPU: {space.processes} x {name}" if space.machine.gpus else f"GPU: none, {name}"
    trial = space.trial_keys(chosen)
    steps = space.sequences // space.batch_size(chosen)
    paragraphs = [
        f"{MARK}, for the most {'tokens per second' if ladder.goal != 'memory' else 'free memory'}:",
        f"    {command}",
        f"{machine}, {memory.gib:.1f} GiB for each process. Measured {datetime.date.today()}, torch "
        f"{versions['torch']}: {spread_text(ladder, chosen)}.",
    ]
    if trial["gradient_accumulation_steps"] != steps:
        paragraphs.append(
            f"Trials had {trial['gradient_accumulation_steps']} of the {steps} micro-steps of an iteration."
        )
    lines = []
    for text in [*paragraphs, *explanation(ladder)[1:]]:
        lines += [text] if text.startswith((MARK, "    ")) else textwrap.wrap(text, WIDTH - 2)
    lines += ["", *table(ladder, "simple", COLUMNS[:-1])]  # the notes are too long for a line of a file
    return [text if text.startswith(MARK) else f"# {text}".rstrip() for text in lines]


def assignments(ladder: Ladder, stated: dict[str, Any], chosen: Keys) -> list[str]:
    """The tuned keys, then what else the config and the flags state. A tuned key that was not stated and has
    its default value is left out."""
    batch = {"batch_size": chosen["batch_size"], "gradient_accumulation_steps": AUTO}
    batch["tokens_per_iter"] = ladder.space.tokens
    tuned = {key: value for key, value in chosen.items() if key in stated or value != KEYS[key].default}
    if stated.get("eval_batch_size") is None:
        batch["eval_batch_size"] = ladder.space.eval_batch
    tuned = {**batch, **{key: value for key, value in tuned.items() if key not in batch}}
    rest = {key: value for key, value in stated.items() if key not in tuned and key not in chosen}
    lines = ["", "# what was tuned; the tokens per iteration stay"]
    lines += [f"{key} = {_literal(value)}" for key, value in tuned.items()]
    lines += ["", "# as in the config"]
    return lines + [f"{key} = {_literal(value)}" for key, value in rest.items()]


def _literal(value: object) -> str:
    """As the configs of this project write it."""
    if isinstance(value, str):
        return json.dumps(value)
    is_long = type(value) is int and abs(value) >= 100_000
    return f"{value:_}" if is_long else repr(value)
