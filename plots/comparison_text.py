"""What compare_runs prints: names of the runs, a table, the verdict on their speed, and what differs.

No line is longer than WIDTH. A run is called by its letter: A is the baseline. Several equal runs are one
side: A1 and A2 are the runs of A.
"""

from __future__ import annotations

import string
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from common.errors import UserError
from common.text import aligned, one_line, shorten
from plots import run_record, verdict
from plots.record_values import LARGEST, as_dict
from plots.run_record import Run
from plots.verdict import RUN_NOISE, Verdict

WIDTH = 100
CELL, VALUE = 22, 40  # characters of a cell of the table, and of a value that differs
STALLS = 0.003  # share from which the cost of slow rows is mentioned beside the verdict
GPU_FIGURES = {"sm_clock_mhz": "SM clock, MHz", "power_w": "power, W", "temperature_c": "temperature, °C"}
MORE_ROWS = (
    "Train for longer or lower log_interval, or repeat both runs and compare all records: "
    "compare_runs.py B1.json B2.json B3.json --baseline A1.json A2.json A3.json"
)

ASSUMED = (
    "Noise assumed: each side has one run, which cannot show by how much equal runs differ. "
    f"{100 * RUN_NOISE:g} % (standard deviation) was measured on quiet GPUs; repeat both where it is more."
)
MOST_KEYS = 12  # of those that some record lacks: one of older code may lack many

Sides = list[list[Run]]


# --- names ---


def letters(number: int) -> list[str]:
    """A to Z, then AA, AB and so on."""
    names = list(string.ascii_uppercase)
    while len(names) < number:
        names += [first + last for first in names for last in string.ascii_uppercase]
    return names[:number]


def run_names(sides: Sides) -> list[str]:
    """A name for each run, in their order."""
    names = []
    for letter, side in zip(letters(len(sides)), sides, strict=True):
        names += [letter] if len(side) == 1 else [f"{letter}{i}" for i in range(1, len(side) + 1)]
    return names


def legend(runs: list[Run], names: list[str], labels: list[str]) -> list[str]:
    """What each name stands for."""
    about = [describe(run) for run in runs]
    is_same = len(set(about)) == 1
    lines = []
    for name, label, facts in zip(names, labels, about, strict=True):
        lines += wrapped(f"{name}  {label}" + ("" if is_same and len(runs) > 1 else f": {facts}"))
    return lines + (wrapped(f"All: {about[0]}") if is_same and len(runs) > 1 else [])


def describe(run: Run) -> str:
    facts = [run.model, run.machine, run.precision]
    if run.mfu_methods:
        facts.append(f"MFU by {' and '.join(run.mfu_methods)}")
    if peak := run.peak_tflops_per_gpu:
        kind = " 2:4 sparse" * run.sparse + " measured" * run.measured_peak
        facts.append(f"peak {peak:,.6g}{kind} TFLOPS/GPU")
    return ", ".join(facts)


def wrapped(text: str, indent: int = 4) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent)


# --- the table ---


def table(runs: list[Run], names: list[str]) -> list[str]:
    """A column for each figure that a run has; the last ones are left out if they do not fit."""
    columns = {name: [column(run) for run in runs] for name, column in COLUMNS.items()}
    columns = {"run": names, **{name: texts for name, texts in columns.items() if {*texts} != {"-"}}}
    while True:
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        lines = aligned(list(columns), rows, ("run", "status"))
        if max(map(len, lines)) <= WIDTH:
            return lines
        columns.popitem()


def median_text(run: Run, name: str, number: str) -> str:
    spread = run_record.spread(run, name)
    return "-" if spread is None else shorten(format(spread[0], number), CELL)


def p10_to_p90(run: Run) -> str:
    spread = run_record.spread(run, "tokens_per_sec")
    return "-" if spread is None else shorten(f"{spread[1]:,.0f} to {spread[2]:,.0f}", CELL)


def memory_text(run: Run) -> str:
    memory = run_record.finite(np.fmax(run.columns["max_allocated_gb"], run.columns["allocated_gb"]))
    return shorten(f"{memory.max():.2f}", CELL) if len(memory) else "-"


def loss_text(loss: float | None) -> str:
    return "-" if loss is None else shorten(f"{loss:.4f}", CELL)


COLUMNS: dict[str, Callable[[Run], str]] = {
    "status": lambda run: shorten(run.status.split(" (")[0], CELL),
    "loss": lambda run: loss_text(run.final_loss),
    "val loss": lambda run: loss_text(run.best_val_loss),
    "MFU %": lambda run: median_text(run, "mfu_percent", ".2f"),
    "tokens/s": lambda run: median_text(run, "tokens_per_sec", ",.0f"),
    "p10 to p90": p10_to_p90,
    "max GiB": memory_text,
    "SM MHz": lambda run: median_text(run, "sm_clock_mhz", ",.0f"),
    "W": lambda run: median_text(run, "power_w", ",.0f"),
}


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
        each = per_gpu(found, side, sides[0])
        if each is not None:
            lines.append(
                shorten(f"  per GPU, of which they have different numbers: {100 * each:+.1f} %", WIDTH)
            )
        if abs(found.with_stalls - found.change) > STALLS:
            text = (
                f"  with slow rows in full, as all tokens over all seconds: {100 * found.with_stalls:+.1f} %"
            )
            lines.append(shorten(text, WIDTH))
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


def differences(sides: Sides) -> list[str]:
    """Settings, software, machine, clocks: of each the facts that are not the same in all runs, and those
    that a record lacks; the kind with the fewest lines first."""
    runs = [run for side in sides for run in side]
    if len(runs) < 2:
        return []
    kinds = {
        # the names of the runs show their folders
        "Settings": [{k: v for k, v in run.config.items() if k != "out_dir"} for run in runs],
        "Software": [flat({name: run.startup.get(name) for name in ("software", "git")}) for run in runs],
        "Machine": [flat({name: run.startup.get(name) for name in ("hardware", "machine")}) for run in runs],
        "Clocks and power": [gpu_facts(run) for run in runs],
    }
    found = {kind: [*lines_of(facts, sides), *lacking(facts, sides)] for kind, facts in kinds.items()}
    lines = []
    if not any(kinds["Settings"]):
        lines = ["None of these records has settings."]
    elif not found["Settings"]:
        lines = ["The settings of these runs are the same, but for out_dir."]
    elif not any(lines_of(kinds["Settings"], sides)) and are_shared(kinds["Settings"]):
        lines = ["The settings that more than one of these records has are the same, but for out_dir."]
    for kind in sorted(found, key=lambda kind: len(found[kind])):
        if found[kind]:
            lines += ["", f"{kind}: what differs"]
            for line in found[kind]:
                lines += textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="      ")
    return lines[1:] if lines and not lines[0] else lines


def are_shared(facts: list[dict[str, Any]]) -> bool:
    """Whether any name is in more than one of the records."""
    names = [name for fact in facts for name in fact]
    return len(set(names)) < len(names)


def lines_of(facts: list[dict[str, Any]], sides: Sides) -> Iterator[str]:
    """'batch_size: 16 (A), 22 (B, C)' for each name whose value differs between the records that have it."""
    for name in dict.fromkeys(name for fact in facts for name in fact):
        values = [str(fact[name]) if name in fact else None for fact in facts]
        differing = dict.fromkeys(value for value in values if value is not None)
        if len(differing) > 1:
            texts = [f"{shown_value(value)} ({who_has(value, values, sides)})" for value in differing]
            yield f"{one_line(name, VALUE)}: " + ", ".join(texts)


def lacking(facts: list[dict[str, Any]], sides: Sides) -> Iterator[str]:
    """'not recorded in B: seed, d_ff', of names that other records have."""
    every = dict.fromkeys(name for fact in facts for name in fact)
    missing = [tuple(name for name in every if name not in fact) for fact in facts]
    for names in dict.fromkeys(filter(None, missing)):
        shown = (
            "everything"
            if len(names) == len(every)
            else ", ".join(one_line(name, VALUE) for name in names[:MOST_KEYS])
        )
        more = f" and {len(names) - MOST_KEYS} more" if "," in shown and len(names) > MOST_KEYS else ""
        yield f"not recorded in {who_has(names, missing, sides)}: {shown}{more}"


def who_has(value: Any, values: Sequence[Any], sides: Sides) -> str:
    """The sides of which each run has the value, and the single runs of other sides."""
    names, first, found = run_names(sides), 0, []
    for letter, side in zip(letters(len(sides)), sides, strict=True):
        of_side = range(first, first + len(side))
        having = [names[i] for i in of_side if values[i] == value]
        found += [letter] if len(having) == len(side) else having
        first += len(side)
    return ", ".join(found)


def shown_value(value: str) -> str:
    return one_line(value, VALUE) or "''"


def flat(value: dict[str, Any]) -> dict[str, Any]:
    """{'hardware.peak.source': text, ...} of nested facts; what is deeper stays together. Of facts about
    several GPUs, each name has the values that occur: {'machine.gpus.power_limit_w': '700.0'}."""
    facts: dict[str, Any] = {}
    for room, known in value.items():
        for name, fact in as_dict(known).items():
            inner = as_dict(fact)
            if isinstance(fact, list) and fact and all(isinstance(item, dict) for item in fact):
                keys = dict.fromkeys(key for item in fact for key in item)
                every = {key: dict.fromkeys(str(item.get(key)) for item in fact) for key in keys}
                inner = {key: ", ".join(values) for key, values in every.items()}
            facts |= {f"{room}.{name}.{key}": item for key, item in inner.items()}
            if not inner and fact is not None:
                facts[f"{room}.{name}"] = fact
    return facts


def gpu_facts(run: Run) -> dict[str, str]:
    """Medians over the timed rows, and in which share of the samples the clock was lowered, and why."""
    facts = {text: median_text(run, name, ",.0f") for name, text in GPU_FIGURES.items()}
    facts["clock lowered by"] = throttle_text(run) or "-"
    return {text: value for text, value in facts.items() if value != "-"}


def throttle_text(run: Run) -> str:
    """'power_limit 98 %'; an empty text if no row has samples."""
    shares = run_record.throttle_shares(run)
    if shares is None:
        return ""
    return " and ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items()) or "nothing"
