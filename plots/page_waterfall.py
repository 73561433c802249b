"""Reads the profile.json of tools.profile and places the steps from the peak to the measured MFU as bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import UserError
from common.json_file import read_json
from common.text import one_line
from plots.record_values import as_dict, number
from plots.run_record import Run

MINUS = "\u2212"
NAME = "profile.json"
FOLDERS = ("run", "plain_run")  # in which tools.profile leaves its records, below its profile.json
SPEED_KEYS = (
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
    *("batch_size", "dtype", "low_precision", "low_precision_scope", "attention_backend", "compile"),
    *("use_cuda_graphs", "use_zero1", "use_fsdp", "activation_checkpointing", "device"),
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
    found = as_dict(content.get("waterfall"))
    steps = found.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps) or not steps:
        raise UserError(f"{path} is not a profile.json of tools.profile: it has no steps of a waterfall")
    in_points, notes = found.get("unit") == "points", found.get("notes")
    return {
        "path": one_line(path.name),
        "about": one_line(str(content.get("device") or "device not recorded")),
        "in_points": in_points,
        "rows": rows_in_points(steps) if in_points else rows_in_ms(steps),
        "notes": [one_line(str(note), 300) for note in notes] if isinstance(notes, list) else [],
        "warning": other_settings(content.get("config"), run.config) if run else "",
    }


def other_settings(profiled: Any, config: dict[str, Any]) -> str:
    """Which settings that decide the speed are not those of the run; an empty text if all are."""
    keys = as_dict(profiled)
    differing = [
        f"{name} {one_line(str(keys[name]), 30)} (run: {one_line(str(config[name]), 30)})"
        for name in SPEED_KEYS
        if name in keys and name in config and keys[name] != config[name]
    ]
    return f"This profile has other settings than the run: {', '.join(differing)}." if differing else ""


def rows_in_points(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From 100 % to the measured MFU. A bar lies between what is left before and after its step."""
    left = [number(step.get("left_percent")) for step in steps]
    end = max([100.0, *(value for value in left if value is not None)])
    rows, before = [_row({"label": "peak"}, 100.0, (0.0, 100.0), "whole", end)], 100.0
    for step, after in zip(steps, left, strict=True):
        now = before if after is None else after
        kind = "lost" if now <= before else "gained"
        rows.append(_row(step, now, (min(before, now), max(before, now)), kind, end))
        before = now
    return [*rows, _row({"label": "measured MFU"}, before, (0.0, before), "whole", end)]


def rows_in_ms(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without a peak there is no MFU: the milliseconds of each step."""
    times = [max(number(step.get("ms")) or 0.0, 0.0) for step in steps]
    end = max(*times, 1e-9)
    return [_row(step, None, (0.0, ms), "lost", end) for step, ms in zip(steps, times, strict=True)]


def _row(
    step: dict[str, Any], left: float | None, span: tuple[float, float], kind: str, end: float
) -> dict[str, Any]:
    low, high = (min(max(100 * value / end, 0.0), 100.0) for value in span)
    ms, points = number(step.get("ms")), number(step.get("points"))
    return {
        "label": one_line(str(step.get("label") or "a step without a name")),
        "ms": _text(ms, ",.1f"),
        "points": _text(None if points is None else -points, "+.2f"),
        "left": _text(left, ".2f"),
        "kind": kind,
        "bar": (round(low, 2), round(high - low, 2)),
        "advice": one_line(str(step.get("advice") or ""), 200) if (ms or 0.0) > 0 else "",
    }


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form).replace("-", MINUS)
