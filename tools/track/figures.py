"""Names the figures that trackers get of an entry of the run record (docs/trackers.md). What cannot change
during a run is in the tracker's configuration instead: it would be a chart of one horizontal line."""

from __future__ import annotations

import json
import re
from typing import Any

ROW = {"loss": "train/loss", "lr": "train/learning_rate", "tokens_seen": "tokens"}
TRAIN = ("skipped_updates",)
SPEED = ("time_ms", "tokens_per_sec", "tokens_per_sec_per_gpu", "warmup", "padding_percent")
GPU = ("sm_clock_mhz", "power_w", "temperature_c")
GROUPS = {"mfu": "mfu", "memory": "memory", "gradients": "gradients", "throttle": "gpu/throttle"}
# Of a row's mfu, what may change; the others are constant, or said by another figure.
MFU: tuple[str, ...] = (
    "mfu_percent",
    "mfu_causal_percent",
    "hfu_percent",
    "mfu_bf16_percent",
    "mfu_fp8_percent",
)
MFU += ("achieved_tflops", "achieved_tflops_per_gpu", "document_length_per_token")
PLACE = ("iter", "attempt", "noted_at_iter", "lr")  # of other entries: no figures of theirs
TEXT_CHARACTERS = 2000

Numbers = dict[str, float]


def figures_of(section: str, entry: dict[str, Any]) -> tuple[Numbers, dict[str, str]]:
    """(numbers, texts) of an entry in a section of the record."""
    if section == "training_iterations":
        return _row(entry), {}
    if section == "eval_steps":
        sources = entry.get("sources") or {}  # of a mixture
        of_sources = {
            f"eval/{_word(name)}/{split}_loss": loss
            for name, losses in sources.items()
            for split, loss in losses.items()
        }
        return _numbers(entry, "eval/") | _numbers(of_sources), {}
    if section == "checkpoints":
        numbers = {"checkpoint/iter": entry["iter"], **_numbers(entry, "checkpoint/")}
        return numbers, {"checkpoint/path": str(entry.get("path"))[:TEXT_CHARACTERS]}
    name = f"events/{_word(entry.get('kind'))}"
    facts = {key: value for key, value in entry.items() if key not in (*PLACE, "kind")}
    message = str(entry.get("message", json.dumps(facts)))[:TEXT_CHARACTERS]
    return {name: 1, f"{name}/iter": entry["iter"], **_numbers(entry, f"{name}/")}, {
        f"{name}/message": message
    }


def is_count(name: str) -> bool:
    """Whether it counts events: two of a kind at one step are 2."""
    return name.startswith("events/") and name.count("/") == 1


def _row(row: dict[str, Any]) -> Numbers:
    named = {new: row.get(old) for old, new in ROW.items()}
    for group, names in (("train", TRAIN), ("speed", SPEED), ("gpu", GPU)):
        named |= {f"{group}/{name}": row.get(name) for name in names}
    if row.get("attempt", 1) != 1:  # a run that was never interrupted has no such chart
        named["run/attempt"] = row["attempt"]
    found = _numbers(named)
    for field, group in GROUPS.items():
        values = row.get(field) or {}
        kept = {name: value for name, value in values.items() if field != "mfu" or name in MFU}
        found |= _numbers(kept, f"{group}/")
    return found


def _numbers(values: dict[str, Any], prefix: str = "") -> Numbers:
    """The numbers among the values. A null, which stands for a NaN, too, is none."""
    return {
        f"{prefix}{name}": +value  # True is 1
        for name, value in values.items()
        if isinstance(value, (int, float)) and name not in PLACE
    }


def _word(value: object) -> str:
    """A part of a name, without what would divide it."""
    return re.sub(r"[^\w.-]", "_", str(value))[:100]
