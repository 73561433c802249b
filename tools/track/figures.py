"""Names the figures that trackers get of an entry of the run record (docs/trackers.md). What cannot change
during a run is in the tracker's configuration instead: it would be a chart of one horizontal line."""

from __future__ import annotations

from typing import Any

ROW = {"loss": "train/loss", "lr": "train/learning_rate", "skipped_updates": "train/skipped_updates"}
SPEED = ("time_ms", "tokens_per_sec", "tokens_per_sec_per_gpu", "padding_percent", "target_percent", "warmup")
ROW |= {"tokens_seen": "tokens"} | {name: f"speed/{name}" for name in SPEED}
ROW |= {"attempt": "run/attempt"} | {f: f"gpu/{f}" for f in ("sm_clock_mhz", "power_w", "temperature_c")}
GROUPS = {"mfu": "mfu/", "memory": "memory/", "gradients": "gradients/", "throttle": "gpu/throttle/"}
MFU = ("mfu_", "hfu_", "achieved_", "document_")  # so begins what may change of a row's mfu
PLACE = ("iter", "attempt", "noted_at_iter", "lr")  # of other entries: no figures of theirs


def figures_of(section: str, entry: dict[str, Any]) -> dict[str, float]:
    """The figures of an entry in a section of the record."""
    if section == "training_iterations":
        found = _numbers({name: entry.get(field) for field, name in ROW.items()})
        for field, prefix in GROUPS.items():
            values = entry.get(field) or {}
            found |= _numbers(
                {k: v for k, v in values.items() if field != "mfu" or k.startswith(MFU)}, prefix
            )
        return found
    if section == "eval_steps":
        found = _numbers(entry, "eval/")
        for source, losses in (entry.get("sources") or {}).items():  # of a mixture
            found |= {f"eval/{source}/{split}_loss": loss for split, loss in _numbers(losses).items()}
        return found
    if section == "checkpoints":
        return {"checkpoint/iter": entry["iter"], **_numbers(entry, "checkpoint/")}
    name = f"events/{entry.get('kind')}"
    return {name: 1, f"{name}/iter": entry["iter"], **_numbers(entry, f"{name}/")}


def _numbers(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers among the values. A null, which stands for a NaN, too, is none."""
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    return {f"{prefix}{name}": +value for name, value in numbers.items() if name not in PLACE}  # True is 1
