"""Checks of a record beyond its MFU: settings, model, number of GPUs and warm-up must fit each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from training.configuration.keys import KEYS, TrainConfig
from training.process.work_timer import UNMEASURED_ITERS


def infinite_numbers(value: Any, place: str = "record") -> Iterator[str]:
    """Numbers that no measurement makes: nan and infinity, which Python reads from JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{place} is {value}"
    elif isinstance(value, (dict, list)):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in parts:
            yield from infinite_numbers(part, f"{place}.{name}")


def settings(record: dict[str, Any]) -> Iterator[str]:
    """The architecture that is counted must be the one that the configuration makes."""
    stated = record["startup_info"]["model"]["architecture"]
    config = TrainConfig(**{key: value for key, value in record["config"].items() if key in KEYS})
    for key, made in dataclasses.asdict(config.model_config()).items():
        if stated.get(key) != made:
            yield (
                f"startup_info.model.architecture.{key} is {stated.get(key)!r}, and the configuration makes "
                f"{made!r}"
            )


def gpus(record: dict[str, Any]) -> Iterator[str]:
    """The number of GPUs is in the hardware, in each row, in the launch and in the list of GPUs."""
    startup = record["startup_info"]
    number, last = startup["hardware"].get("num_gpus"), record.get("attempt", 1)
    listed = (startup.get("machine") or {}).get("gpus")
    launch = startup.get("launch") or {}
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        yield f"startup_info.hardware.num_gpus is {number!r}, no number of GPUs"
        return
    kind = startup["hardware"].get("parallelism")
    if (kind == "single" and number > 1) or (kind == "ddp" and number == 1):
        yield f"startup_info.hardware: {number} GPUs do not fit its parallelism {kind!r}"
    if listed and not launch and len(listed) != number:
        yield f"startup_info.machine lists {len(listed)} GPUs, and startup_info.hardware says {number}"
    for row in record["training_iterations"]:
        if row.get("attempt", 1) != last:
            continue
        mfu = row["mfu"] or {}
        if mfu and mfu.get("num_gpus") != number:
            yield f"rows, mfu.num_gpus: iteration {row['iter']}: {mfu.get('num_gpus')!r}, not {number}"
            return
        each = row.get("tokens_per_sec_per_gpu")
        if each is not None and not math.isclose(each, row["tokens_per_sec"] / number, rel_tol=1e-9):
            yield f"rows, tokens_per_sec_per_gpu: iteration {row['iter']}: {each!r} is not of {number} GPUs"
            return


def facts(record: dict[str, Any]) -> Iterator[str]:
    """Each row repeats what it was measured on, which startup_info says, too."""
    startup, last = record["startup_info"], record.get("attempt", 1)
    hardware = startup["hardware"]
    expected = {
        "gpu_name": hardware.get("gpu_name"),
        "total_params": startup["model"].get("total_params"),
        "sparse_mode": (hardware.get("peak") or {}).get("sparse"),
    }
    for name, value in expected.items():
        for row in record["training_iterations"]:
            mfu = row["mfu"] or {}
            if row.get("attempt", 1) == last and name in mfu and mfu[name] != value:
                yield f"rows, mfu.{name}: iteration {row['iter']}: {mfu[name]!r}, not {value!r}"
                break


def warmup(record: dict[str, Any]) -> Iterator[str]:
    """The first iterations of a process are its warm-up, and no others: a slow row is left out nowhere else.
    Every other row has an MFU where any has one."""
    last = record.get("attempt", 1)
    rows = [row for row in record["training_iterations"] if row.get("attempt", 1) == last]
    first = (record.get("attempts") or [{}])[-1].get("start_iter")
    if not rows or not isinstance(first, int):
        return
    starts = [first, *(row["iter"] + 1 for row in rows[:-1])]  # the first iteration of each row
    for row, start in zip(rows, starts, strict=True):
        if bool(row.get("warmup")) != (start < first + UNMEASURED_ITERS):
            yield f"rows, warmup: iteration {row['iter']}: {row.get('warmup')!r} is not by its place"
            break
    without = [row for row in rows[1:] if not row["mfu"]] if any(row["mfu"] for row in rows) else []
    without = [row["iter"] for row in without if not _above_peak(row, record)]
    if without:
        yield f"rows, mfu: iteration {without[0]} has none, and others have one ({len(without)} in all)"
    steady = sum(not row.get("warmup") for row in rows)
    for name, made in (("warmup_iters_left_out", UNMEASURED_ITERS), ("rows_after_warmup", steady)):
        if name in record["summary"] and record["summary"][name] != made:
            yield f"summary.{name} is {record['summary'][name]!r}, and the rows make {made}"


def _above_peak(row: dict[str, Any], record: dict[str, Any]) -> bool:
    """Whether the row has no MFU because it would be above 100 %, for which train.py writes none."""
    startup = record["startup_info"]
    hardware = startup["hardware"]
    peak = 1e12 * hardware["peak"]["tflops_per_gpu"] * hardware["num_gpus"]
    return row["tokens_per_sec"] * startup["flops"]["flops_per_token"] > peak
