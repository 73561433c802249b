"""Reads the profile.json of tools.profile and places the steps from the peak to the measured MFU as bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import UserError
from common.json_file import read_json
from common.text import one_line
from plots.run_record import Run, number

MINUS = "\u2212"
NAME = "profile.json"
FOLDERS = ("run", "plain_run")  # in which tools.profile leaves its records, below its profile.json
COMPARED = (
    *(
        "arch_preset",
        "n_layer",
        "n_head",
        "n_embd",
        "num_key_value_heads",
        "d_ff",
        "vocab_size",
        "block_size",
    ),
    *("batch_size", "dtype", "low_precision", "low_precision_scope", "attention_backend", "ffn_backend"),
    *("compile", "use_cuda_graphs", "use_zero1", "use_fsdp", "activation_checkpointing", "device"),
)


def find_profile(run: Run) -> Path | None:
    """The profile.json beside the record, or that of the profile of which the record is a part."""
    folder = run.path.absolute().parent
    places = [folder, *([folder.parent] if folder.name in FOLDERS else [])]
    return next((place / NAME for place in places if (place / NAME).is_file()), None)


def read_waterfall(path: Path, run: Run | None) -> dict[str, Any]:
    """What page.html shows of a profile, which may be one of this run. UserError names the file when it is
    not a profile."""
    try:
        content = read_json(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is no profile: {error}") from None
    found, profiled = content.get("waterfall"), content.get("profiled")
    steps = found.get("steps") if isinstance(found, dict) else None
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps) or not steps:
        raise UserError(f"{path} is not a profile.json of tools.profile: it has no steps of a waterfall")
    assert isinstance(found, dict)
    in_points = found.get("unit") == "points"
    notes = found.get("notes")
    wall = number(profiled.get("wall_ms")) if isinstance(profiled, dict) else None
    return {
        "path": one_line(path.name),
        "about": about(content, wall),
        "in_points": in_points,
        "rows": bars_in_points(steps) if in_points else bars_in_ms(steps),
        "mfu": _text(number(found.get("mfu_percent")), ".2f"),
        "advice": advice(steps),
        "notes": [one_line(str(note), 300) for note in notes] if isinstance(notes, list) else [],
        "warning": other_settings(content.get("config"), run.config) if run else "",
    }


def about(content: dict[str, Any], wall_ms: float | None) -> str:
    """What was profiled, in a line."""
    processes, config = content.get("processes"), content.get("config")
    keys = config if isinstance(config, dict) else {}
    parts = [
        one_line(str(content.get("device") or "device not recorded")),
        f"{processes} processes, rank 0" if isinstance(processes, int) and 1 < processes < 1e6 else "",
        one_line(str(keys.get("arch_preset") or "")),
        one_line(str(keys.get("low_precision") or "")).replace("none", ""),
        f"an iteration takes {wall_ms:,.1f} ms with the profiler" if wall_ms is not None else "",
    ]
    return ", ".join(part for part in parts if part)


def advice(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(step, what could be done) of those that cost anything, the largest first."""
    costly = [
        (ms, step) for step in steps if (ms := number(step.get("ms")) or 0.0) > 0 and step.get("advice")
    ]
    costly.sort(key=lambda found: -found[0])
    return [(one_line(str(step.get("label"))), one_line(str(step["advice"]), 200)) for _, step in costly]


def other_settings(profiled: Any, config: dict[str, Any]) -> str:
    """Which settings that decide the speed are not those of the run; an empty text if all are."""
    keys = profiled if isinstance(profiled, dict) else {}
    differing = [
        f"{name} {one_line(str(keys[name]), 30)} (run: {one_line(str(config[name]), 30)})"
        for name in COMPARED
        if name in keys and name in config and keys[name] != config[name]
    ]
    return f"This profile has other settings than the run: {', '.join(differing)}." if differing else ""


def bars_in_points(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From 100 % to the measured MFU. A bar lies between what is left before and after its step."""
    left = [number(step.get("left_percent")) for step in steps]
    end = max([100.0, *(value for value in left if value is not None)])
    rows = [_row("peak", None, None, 100.0, (0.0, 100.0), "whole", end)]
    before = 100.0
    for step, after in zip(steps, left, strict=True):
        after_or_before = before if after is None else after
        kind = "lost" if after_or_before <= before else "gained"
        span = (min(before, after_or_before), max(before, after_or_before))
        rows.append(_row(step.get("label"), step, number(step.get("points")), after, span, kind, end))
        before = after_or_before
    rows.append(_row("measured MFU", None, None, before, (0.0, max(before, 0.0)), "whole", end))
    return rows


def bars_in_ms(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without a peak there is no MFU: the milliseconds of each step."""
    times = [number(step.get("ms")) or 0.0 for step in steps]
    end = max(max(times), 1e-9)
    return [
        _row(step.get("label"), step, None, None, (0.0, max(ms, 0.0)), "lost", end)
        for step, ms in zip(steps, times, strict=True)
    ]


def _row(
    label: Any,
    step: dict[str, Any] | None,
    points: float | None,
    left: float | None,
    span: tuple[float, float],
    kind: str,
    end: float,
) -> dict[str, Any]:
    low, high = (min(max(100 * value / end, 0.0), 100.0) for value in span)
    ms = number(step.get("ms")) if step else None
    shortest = 0.2 if step is None or ms is not None else 0.0  # what was not measured has no bar
    return {
        "label": one_line(str(label or "a step without a name")),
        "ms": _text(ms, ",.1f"),
        "points": _text(None if points is None else -points, "+.2f"),
        "left": _text(left, ".2f"),
        "kind": kind,
        "bar": (round(low, 2), round(max(high - low, shortest), 2)),
    }


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form).replace("-", MINUS)
