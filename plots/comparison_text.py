"""What compare_runs prints: names of the runs, a table, the verdict on their speed, and what differs.

No line is longer than WIDTH. A run is called by its letter: A is the baseline. Several equal runs are one
side: A1 and A2 are the runs of A.
"""

from __future__ import annotations

import itertools
import string
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np

from common.errors import UserError
from common.text import aligned, one_line, shorten
from plots import verdict
from plots.facts import COLUMNS, GPU, cells, describe, median
from plots.run_record import LARGEST, Run, throttled
from plots.verdict import RUN_NOISE, Verdict

WIDTH = 100
CELL, VALUE = 22, 40  # characters of a cell of the table, and of a value that differs
STALLS = 0.003  # share from which the cost of slow rows is mentioned beside the verdict
MORE_ROWS = (
    "Train for longer or lower log_interval, or repeat both runs and compare all records: "
    "compare_runs.py B1.json B2.json B3.json --baseline A1.json A2.json A3.json"
)

ASSUMED = (
    "Noise assumed: each side has one run, which cannot show by how much equal runs differ. "
    f"{100 * RUN_NOISE:g} % (standard deviation) was measured on quiet GPUs; repeat both where it is more."
)
MOST_NAMES = 300  # characters of the names that a record lacks: one of older code may lack many

Sides = list[list[Run]]
Facts = dict[str, Any]


# --- names ---


def letters(number: int) -> list[str]:
    """A to Z, then AA, AB and so on."""
    more = (first + last for first in string.ascii_uppercase for last in string.ascii_uppercase)
    return list(itertools.islice(itertools.chain(string.ascii_uppercase, more), number))


def run_names(sides: Sides) -> list[str]:
    """A name for each run, in their order."""
    names = []
    for letter, side in zip(letters(len(sides)), sides, strict=True):
        names += [letter] if len(side) == 1 else [f"{letter}{i}" for i in range(1, len(side) + 1)]
    return names


def legend(runs: list[Run], names: list[str]) -> list[str]:
    """What each name stands for."""
    about = [describe(run) for run in runs]
    is_same = len(runs) > 1 and len({*about}) == 1
    lines = []
    for name, run, facts in zip(names, runs, about, strict=True):
        lines += wrapped(f"{name}  {run.label}" + f": {facts}" * (not is_same))
    return lines + wrapped(f"All: {about[0]}") * is_same


def wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ")


# --- the table ---


def table(runs: list[Run], names: list[str]) -> list[str]:
    """A column for each figure that a run has; the last ones are left out if they do not fit."""
    columns = {"run": names, **cells(runs, COLUMNS, CELL)}
    while True:
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        lines = aligned(list(columns), rows, ("run", "status"))
        if max(map(len, lines)) <= WIDTH:
            return lines
        columns.popitem()


# --- the verdict ---


def verdict_lines(sides: Sides) -> list[str]:
    """Each side against the first, with what may explain a difference. Lines are not wrapped; those about
    another line begin with spaces."""
    (first, *names), lines, advice = letters(len(sides)), [], set()
    baseline = [speeds(run) for run in sides[0]]
    for name, side in zip(names, sides[1:], strict=True):
        try:
            found = verdict.compare([speeds(run) for run in side], baseline)
        except UserError as error:
            lines.append(f"{name} against {first}: {error}")
            advice.add(MORE_ROWS)
            continue
        lines.append(shorten(found.text(name, first), WIDTH))
        advice |= {ASSUMED} if found.noise_is_assumed else set()
        more = {"per GPU, of which they have different numbers": per_gpu(found, side, sides[0])}
        if abs(found.with_stalls - found.change) > STALLS:
            more["with slow rows in full, as all tokens over all seconds"] = found.with_stalls
        told = {text: change for text, change in more.items() if change is not None}
        lines += [f"  {text}: {shorten(f'{100 * change:+.1f}', 40)} %" for text, change in told.items()]
    return lines + sorted(advice)


def per_gpu(found: Verdict, side: list[Run], other: list[Run]) -> float | None:
    """The change of tokens/s per GPU; None where the sides have equally many GPUs, or it is not known."""
    here, there = ({run.num_gpus for run in runs} for runs in (side, other))
    if here == there or len(here) != 1 or len(there) != 1:
        return None
    gpus, others = here.pop(), there.pop()
    return (1 + found.change) * others / gpus - 1 if gpus and others else None


def speeds(run: Run) -> np.ndarray:
    values = run.columns["tokens_per_sec"][run.timed]
    return values[values > 1 / LARGEST]  # NaN is not, and nothing real is slower


# --- what differs ---


def differences(runs: list[Run], names: list[str]) -> list[str]:
    """Settings, software, machine, clocks: of each the facts that are not the same in all runs, and those
    that a record lacks; the kind with the fewest lines first."""
    if len(runs) < 2:
        return []
    kinds: dict[str, list[Facts]] = {
        # the labels of the runs show their folders
        "Settings": [{k: v for k, v in run.config.items() if k != "out_dir"} for run in runs],
        "Software": [flat({name: run.startup.get(name) for name in ("software", "git")}) for run in runs],
        "Machine": [flat({name: run.startup.get(name) for name in ("hardware", "machine")}) for run in runs],
        "Clocks and power": [gpu_facts(run) for run in runs],
    }
    lines = []
    if not any(differing(kinds["Settings"], names)):
        settings = [name for facts in kinds["Settings"] for name in facts]
        same = "The settings that these records share are the same, but for out_dir."
        lines = [same if len(settings) > len({*settings}) else "These records share no settings.", ""]
    found = {kind: [*differing(facts, names), *lacking(facts, names)] for kind, facts in kinds.items()}
    for kind in sorted(filter(found.get, found), key=lambda kind: len(found[kind])):
        wrapped_lines = (part for line in found[kind] for part in wrapped(line, "  "))
        lines += [f"{kind}: what differs", *wrapped_lines, ""]
    return lines[:-1]


def differing(facts: list[Facts], names: list[str]) -> Iterator[str]:
    """'batch_size: 16 (A), 22 (B, C)' for each fact whose value differs between the records that have it."""
    for fact in dict.fromkeys(fact for each in facts for fact in each):
        users: dict[str, list[str]] = {}
        for each, name in zip(facts, names, strict=True):
            if fact in each:
                users.setdefault(str(each[fact]), []).append(name)
        if len(users) > 1:
            texts = (f"{one_line(value, VALUE) or repr('')} ({', '.join(users[value])})" for value in users)
            yield f"{one_line(fact, VALUE)}: {', '.join(texts)}"


def lacking(facts: list[Facts], names: list[str]) -> Iterator[str]:
    """'not recorded in B: seed, d_ff', of facts that other records have."""
    every = dict.fromkeys(fact for each in facts for fact in each)
    users: dict[tuple[str, ...], list[str]] = {}
    for each, name in zip(facts, names, strict=True):
        users.setdefault(tuple(fact for fact in every if fact not in each), []).append(name)
    for missing in filter(None, users):
        listed = one_line(", ".join(missing), MOST_NAMES) if len(missing) < len(every) else "everything"
        yield f"not recorded in {', '.join(users[missing])}: {listed}"


def flat(facts: Any, place: str = "") -> Facts:
    """{'hardware.peak.source': text, ...} of nested facts. Of facts about several GPUs, each name has the
    values that occur: {'machine.gpus.power_limit_w': '700.0'}."""
    if isinstance(facts, list) and facts and all(isinstance(item, dict) for item in facts):
        keys = dict.fromkeys(key for item in facts for key in item)
        facts = {key: ", ".join(dict.fromkeys(str(item.get(key)) for item in facts)) for key in keys}
    if not isinstance(facts, dict):
        return {} if facts is None else {place: facts}
    inner = (flat(item, f"{place}.{name}" if place else name) for name, item in facts.items())
    return dict(pair for each in inner for pair in each.items())


def gpu_facts(run: Run) -> Facts:
    """Medians over the timed rows, and why the clock was lowered."""
    facts = {text: median(name, ",.0f")(run) for name, text in GPU.items()}
    facts["clock lowered by"] = throttled(run) or "-"
    return {text: value for text, value in facts.items() if value != "-"}
