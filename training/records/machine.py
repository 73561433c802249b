"""Describes the machine and its GPUs for the record and the report, and summarizes their clocks and power."""

from __future__ import annotations

import platform
from collections import Counter
from typing import Any

from training.hardware.gpu_monitor import GpuMonitor
from training.hardware.nvml import FIELDS
from training.records.percentiles import spread

GPU_FORMATS = {"sm_clock_mhz": "{:,.0f} MHz", "power_w": "{:,.0f} W", "temperature_c": "{:.0f} °C"}


def machine_info(monitor: GpuMonitor) -> dict[str, Any]:
    """The record's startup_info.machine: rank 0's machine. What is null has its reason in gpu_reason."""
    facts = monitor.facts() or {"gpus": None}
    return {
        "host": platform.node(),
        **facts,
        "gpus_sampled": len(monitor.uuids),
        "sample_interval_s": monitor.interval_s,
        "gpu_reason": None if facts["gpus"] else monitor.reason,
    }


def machine_lines(info: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of the start-up report's lines; none in a dry run, which looks at no machine."""
    machine, software = info.get("machine"), info["software"]
    if machine is None:
        return []
    driver = f", driver {software['driver']}" if software["driver"] else ""
    lines = [("Host", machine["host"] + driver)]
    if software["cuda"] and machine["gpus"]:
        sampled, count = machine["gpus_sampled"], info["hardware"]["num_gpus"]
        limits = dict.fromkeys(f"{watts:,.0f} W" for watts in known(machine["gpus"], "power_limit_w"))
        lines.append(("  power limit", ", ".join(limits) or "not known"))
        lines.append(("  clocks and power", f"of {sampled} of {count} GPUs, in every log row"))
    elif software["cuda"]:
        lines.append(("  clocks and power", f"not sampled: {machine['gpu_reason']}"))
    return lines


# --- clocks and power of several rows ---


def summarize_gpus(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Spread of the figures, share of the samples with each throttle reason, and why there is none."""
    figures: dict[str, Any] = {name: spread(known(rows, name)) for name in FIELDS}
    sampled = [row for row in rows if row.get("throttle") is not None]
    samples: Counter[str] = Counter()
    for row in sampled:
        samples.update({name: share * row["gpu_samples"] for name, share in row["throttle"].items()})
    count = sum(row["gpu_samples"] for row in sampled)
    throttle = {name: number / count for name, number in samples.most_common()} if sampled else None
    return {**figures, "throttle": throttle, "gpu_reason": missing_reason(rows)}


def known(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def missing_reason(rows: list[dict[str, Any]]) -> str | None:
    """Why no row has a clock; None if one has."""
    if not rows or known(rows, FIELDS[0]):
        return None
    return rows[-1].get("gpu_reason")


def speed_line(summary: dict[str, Any]) -> str | None:
    """MFU with clock and power, for the end of the log; None where no clock was sampled."""
    if not summary.get("sm_clock_mhz"):
        return None
    mfu, throttle = summary["mfu_percent"], summary["throttle"] or {}
    figures = [f"MFU {mfu['median']:.2f} %"] if mfu else []
    figures += [text.format(summary[name]["median"]) for name, text in GPU_FORMATS.items() if summary[name]]
    reasons = [
        f"{name.replace('_', ' ')} in {100 * share:.0f} % of the samples" for name, share in throttle.items()
    ]
    lowered = f"; clock lowered by {', '.join(reasons)}" if reasons else ""
    return f"{', '.join(figures)} (medians after warm-up){lowered}"
