"""Says what the search did: a line for each trial as the ladder is climbed, and why the best was chosen."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import model_builder
from common.text import aligned, one_line, shorten
from tools.tune.dimensions import Keys
from tools.tune.search import KEEPS_SPEED, Ladder
from tools.tune.space import Space
from tools.tune.steps import AS_IT_IS, FIRST, FOR_ROOM, LAST, NO_MEMORY, NOISE, TOO_LARGE, Step

COLUMNS = ("rung", "tried", "batch", "GiB est.", "GiB", "tokens/s", "MFU %", "gain %", "kept", "note")
WIDTHS = (19, 26, 12, 8, 6, 11, 6, 7, 4, 0)
LEFT = ("rung", "tried", "batch", "kept", "note")
NOTE_LENGTH = 100


def head(space: Space, config: str, budget: str) -> str:
    memory, gpus = space.machine.memory, space.processes
    where = f"{gpus} x {memory.device}" if space.base.device == "cuda" else f"{memory.device} ({gpus} x)"
    shared = space.trial_keys(space.as_it_is)["gradient_accumulation_steps"]
    steps = space.sequences // space.batch_size(space.as_it_is)
    shorter = f"; trials of it as it is have {shared} of its {steps} micro-steps" if shared != steps else ""
    return (
        f"Tuning {config} on {where}, {memory.gib:.1f} GiB for each process, {space.tokens:,} tokens per "
        f"iteration{shorter}. Budget {budget}."
    )


def cells(step: Step, space: Space) -> list[str]:
    result = step.result if step.result and not step.result.reason else None
    return [
        step.rung,
        step.option,
        f"{step.setting['batch_size']} x {space.sequences // space.batch_size(step.setting)}",
        f"{step.needed_gib:.1f}",
        f"{result.memory_gib:.1f}" if result and result.memory_gib is not None else "",
        f"{result.speed:,.0f}" if result else "",
        f"{result.mfu_percent:.2f}" if result and result.mfu_percent is not None else "",
        f"{100 * step.gain:+.1f}" if step.gain is not None else "",
        "yes" if step.kept else "",
        one_line(step.note, NOTE_LENGTH),
    ]


def line(texts: Sequence[str], shown: Sequence[str] = COLUMNS) -> str:
    """One row of the table while it grows: its columns have fixed widths."""
    wide = zip(COLUMNS, texts, WIDTHS, strict=True)
    parts = [f"{text:{'<' if name in LEFT else '>'}{width}}" for name, text, width in wide if name in shown]
    return "  ".join(parts).rstrip()


def table(ladder: Ladder, form: str = "github", columns: Sequence[str] = COLUMNS) -> list[str]:
    """Of the first columns, as many as are named."""
    rows = [cells(step, ladder.space)[: len(columns)] for step in ladder.steps]
    return aligned(columns, rows, LEFT, form)


def spread_text(ladder: Ladder, setting: Keys) -> str:
    """'59,363 tokens/s (58,900 to 59,700, 3 runs), MFU 61.94 %, 95.7 GiB'."""
    results = ladder.results(setting)
    rows = [rate for result in results for rate in result.tokens_per_sec]
    speed = statistics.median(result.speed for result in results)
    runs = f"{len(results)} run{'s' * (len(results) > 1)}"
    text = f"{speed:,.0f} tokens/s ({min(rows):,.0f} to {max(rows):,.0f}, {runs} of {len(rows)} rows in all)"
    mfus = [result.mfu_percent for result in results if result.mfu_percent is not None]
    if mfus:
        text += f", MFU {statistics.median(mfus):.2f} % ({model_builder.CALCULATION_METHOD})"
    if any(result.memory_gib is not None for result in results):
        return f"{text}, {ladder.memory(setting):.1f} GiB"
    return f"{text}, {ladder.memory(setting):.1f} GiB by the estimate"


def explanation(ladder: Ladder) -> list[str]:
    """What each rung gained, what did not fit, and what made no difference that can be told from noise."""
    space, chosen = ladder.space, ladder.chosen()
    lines = [f"Chosen: {space.name(chosen)}, {ladder.batch_text(chosen)}: {spread_text(ladder, chosen)}."]
    tried = [step for step in ladder.steps if step.rung not in (AS_IT_IS, FIRST, LAST)]
    for title, steps in (
        (
            "Gained, each over the best before it",
            [f"{_what(s)} {100 * (s.gain or 0):+.1f} %" for s in tried if s.kept and s.note != FOR_ROOM],
        ),
        (
            "Taken for the memory that they free",
            [f"{_what(s)} {100 * (s.gain or 0):+.1f} %" for s in tried if s.kept and s.note == FOR_ROOM],
        ),
        ("Within noise, so left out", [_what(s) for s in tried if s.note == NOISE]),
        (
            "Not faster",
            [
                f"{_what(s)} {100 * s.gain:+.1f} %"
                for s in tried
                if s.gain is not None and s.gain <= 0 and not s.kept
            ],
        ),
        ("Did not fit", [_what(s) for s in tried if s.note in (TOO_LARGE, NO_MEMORY)]),
        ("Could not run", [f"{_what(s)} ({shorten(s.note, NOTE_LENGTH)})" for s in tried if _is_failure(s)]),
    ):
        if steps:
            lines.append(f"{title}: {', '.join(steps)}.")
    lines += [f"Against the config as it is: {step.note}." for step in ladder.steps if step.rung == LAST]
    if space.as_it_is == chosen and not any(step.rung == LAST for step in ladder.steps):
        lines.append("That is the config as it is.")
    if ladder.goal == "memory":
        lines.append(f"The goal was the least memory that keeps {KEEPS_SPEED:.0%} of the best speed.")
    if not ladder.finished:
        lines.append("The time was over before the last rung; the same command goes on from here.")
    return lines


def _what(step: Step) -> str:
    return f"{step.rung} {step.option}"


def _is_failure(step: Step) -> bool:
    """Whether it could not be tried, for another reason than memory."""
    no_result = step.result is None or (bool(step.result.reason) and not step.result.out_of_memory)
    return no_result and step.note != TOO_LARGE
