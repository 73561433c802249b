"""Names the figures that trackers get of an entry of the run record (docs/trackers.md). What cannot change
during a run is in the tracker's configuration instead: it would be a chart of one horizontal line."""

from __future__ import annotations

from typing import Any

ROW = {"loss": "train/loss", "lr": "train/learning_rate", "skipped_updates": "train/skipped_updates"}
ROW |= {"tokens_seen": "tokens", "padding_percent": "speed/padding_percent", "warmup": "speed/warmup"}
ROW |= {name: f"speed/{name}" for name in ("time_ms", "tokens_per_sec", "tokens_per_sec_per_gpu")}
ROW |= {name: f"gpu/{name}" for name in ("sm_clock_mhz", "power_w", "temperature_c")}
GROUPS = {"mfu": "mfu/", "memory": "memory/", "gradients": "gradients/", "throttle": "gpu/throttle/"}
# Of a row's mfu, what may change; the others are constant, or said by another figure.
MFU: tuple[str, ...] = ("mfu_percent", "mfu_causal_percent", "hfu_percent", "mfu_bf16_percent")
MFU += ("mfu_fp8_percent", "achieved_tflops", "achieved_tflops_per_gpu", "document_length_per_token")
PLACE = ("iter", "attempt", "noted_at_iter", "lr")  # of other entries: no figures of theirs


def figures_of(section: str, entry: dict[str, Any]) -> dict[str, float]:
    """The figures of an entry in a section of the record."""
    if section == "training_iterations":
        return _row(entry)
    if section == "eval_steps":
        found = _numbers(entry, "eval/")
        for source, losses in (entry.get("sources") or {}).items():  # of a mixture
            found |= {f"eval/{source}/{split}_loss": loss for split, loss in _numbers(losses).items()}
        return found
    if section == "checkpoints":
        return {"checkpoint/iter": entry["iter"], **_numbers(entry, "checkpoint/")}
    name = f"events/{entry.get('kind')}"
    return {name: 1, f"{name}/iter": entry["iter"], **_numbers(entry, f"{name}/")}


def _row(row: dict[str, Any]) -> dict[str, float]:
    found = _numbers({name: row.get(field) for field, name in ROW.items()})
    if row.get("attempt", 1) != 1:  # a run that was never interrupted has no such chart
        found["run/attempt"] = row["attempt"]
    for field, prefix in GROUPS.items():
        values = row.get(field) or {}
        found |= _numbers({k: v for k, v in values.items() if field != "mfu" or k in MFU}, prefix)
    return found


def _numbers(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers among the values. A null, which stands for a NaN, too, is none."""
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    return {f"{prefix}{name}": +value for name, value in numbers.items() if name not in PLACE}  # True is 1
