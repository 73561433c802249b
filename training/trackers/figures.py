"""Names the figures that trackers get of an entry of the run record. docs/trackers.md lists them.

What cannot change during a run is in the tracker's configuration instead: it would be a chart of one
horizontal line. The names below decide that, not the values.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

ROW = {  # of a log row
    "loss": "train/loss",
    "lr": "train/learning_rate",
    "skipped_updates": "train/skipped_updates",
    "tokens_seen": "tokens",
    "padding_percent": "speed/padding_percent",
    "time_ms": "speed/time_ms",
    "tokens_per_sec": "speed/tokens_per_sec",
    "tokens_per_sec_per_gpu": "speed/tokens_per_sec_per_gpu",
    "warmup": "speed/warmup",
    "sm_clock_mhz": "gpu/sm_clock_mhz",
    "power_w": "gpu/power_w",
    "temperature_c": "gpu/temperature_c",
    "gpu_samples": "gpu/samples",
}
GROUPS = {"mfu": "mfu", "memory": "memory", "gradients": "gradients", "throttle": "gpu/throttle"}
# Of a row's mfu: in startup_info, so in the configuration.
CONSTANT = (
    "tokens_per_iter",
    "flops_per_token",
    "hardware_peak_flops",
    "hardware_peak_tflops",
    "hardware_peak_fp8_tflops",
    "num_gpus",
    "sparse_mode",
    "attention_flops_per_layer",
    "ffn_flops_per_layer",
    "logit_flops",
    "attention_to_ffn_ratio",
    "gqa_group_size",
    "total_params",
)
# Of a row's mfu: another figure says the same (mfu_percent, speed/..., achieved_tflops).
REPEATED = ("mfu", "tokens_per_sec", "tokens_per_sec_per_gpu", "flops_achieved")
CAUSAL, LENGTH = "flops_per_token_causal", "document_length_per_token"  # the first changes with the second
PLACE = ("iter", "attempt", "noted_at_iter", "lr")  # of other entries: no figures of theirs
ATTEMPT = "run/attempt"  # from the second on: a run that was never interrupted has no such chart
TEXT_CHARACTERS = 2000


class Figures(NamedTuple):
    """What is sent of one entry."""

    numbers: dict[str, float]
    texts: dict[str, str]


def step_of(entry: dict[str, Any]) -> int:
    """The iteration; of what was complete only later, such as a checkpoint, that at which it was noted."""
    noted = entry.get("noted_at_iter")
    return max(entry["iter"], noted) if isinstance(noted, int) else entry["iter"]


def figures_of(section: str, entry: dict[str, Any]) -> Figures:
    """Of an entry in a section of the record."""
    if section == "training_iterations":
        return Figures(_row(entry), {})
    if section == "eval_steps":
        return Figures(_evaluation(entry), {})
    if section == "checkpoints":
        numbers = {"checkpoint/iter": entry["iter"], **_numbers(entry, "checkpoint", PLACE)}
        return Figures(numbers, {"checkpoint/path": _text(entry.get("path"))})
    name = f"events/{_word(entry.get('kind'))}"
    facts = {key: value for key, value in entry.items() if key not in (*PLACE, "kind")}
    numbers = {name: 1, f"{name}/iter": entry["iter"], **_numbers(entry, name, PLACE)}
    return Figures(numbers, {f"{name}/message": _text(entry.get("message", json.dumps(facts)))})


def is_count(name: str) -> bool:
    """Whether it counts events: two of a kind at one step are 2."""
    return name.startswith("events/") and name.count("/") == 1


def _row(row: dict[str, Any]) -> dict[str, float]:
    mfu = row.get("mfu") or {}
    left_out = (*CONSTANT, *REPEATED, *(() if mfu.get(LENGTH) else (CAUSAL,)))
    found: dict[str, float] = {ATTEMPT: row["attempt"]} if row.get("attempt", 1) != 1 else {}
    for name, value in row.items():
        if name == "gpu_samples" and row.get("sm_clock_mhz") is None:
            continue  # without a GPU there are none in any row
        if isinstance(value, dict):
            found |= _numbers(value, GROUPS.get(name, name), left_out if name == "mfu" else ())
        elif name not in PLACE or name in ROW:
            found |= _numbers({ROW.get(name, f"train/{name}"): value})
    return found


def _evaluation(entry: dict[str, Any]) -> dict[str, float]:
    found = _numbers(entry, "eval", PLACE)
    sources = entry.get("sources")
    for name, losses in (sources if isinstance(sources, dict) else {}).items():  # of a mixture
        if isinstance(losses, dict):
            found |= _numbers(
                {f"{split}_loss": loss for split, loss in losses.items()}, f"eval/{_word(name)}"
            )
    return found


def _numbers(values: dict[str, Any], group: str = "", left_out: tuple[str, ...] = ()) -> dict[str, float]:
    """The numbers among the values, named group/name. A null, which stands for a NaN, too, is none."""
    prefix = f"{group}/" if group else ""
    return {
        f"{prefix}{name}": +value  # True is 1
        for name, value in values.items()
        if isinstance(value, (int, float)) and name not in left_out
    }


def _word(value: object) -> str:
    """A part of a name, without what would divide it."""
    return re.sub(r"[^\w.-]", "_", str(value))[:100]


def _text(value: object) -> str:
    return str(value)[:TEXT_CHARACTERS]
