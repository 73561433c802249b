"""Counts a record's MFU again, from the record alone: FLOPs of its architecture by all three formulas,
tokens/s from the time of each row, and the peak that it states. What does not agree is said, row by row."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from common.errors import UserError
from common.text import one_line
from mfu_versions import model_builder_v1, model_builder_v2, model_builder_v3
from model_config import ModelConfig
from tools.seal import consistency
from training.hardware.peaks import table_peak
from training.records.percentiles import spread
from training.records.utilization import document_flops

FORMULAS = {
    module.CALCULATION_METHOD: module for module in (model_builder_v1, model_builder_v2, model_builder_v3)
}
ROUNDING = 1e-9  # relative: what adding and dividing in another order changes
SHOWN = 5  # rows of a kind that are named; the others are counted
FIGURES = ("tokens_per_sec", "tokens_per_sec_per_gpu", "mfu_percent", "time_ms")  # of the summary
CLOCKS = ("sm_clock_mhz", "power_w", "temperature_c")  # of the summary, too, where they were measured


@dataclass(frozen=True)
class Recount:
    """The MFU of a record by one formula, from the median of its tokens/s."""

    formula: str
    flops_per_token: int
    flops_per_token_causal: int
    percent: float | None  # of the peak; None without a peak
    causal_percent: float | None
    in_use: bool  # the formula that the record's own MFU is by


def recount(record: dict[str, Any]) -> list[Recount]:
    """By v1, v2 and v3. Raises UserError if the record's model cannot be built."""
    counts = _counts(record)
    startup, summary = record["startup_info"], record["summary"]
    rate = (summary.get("tokens_per_sec") or {}).get("median")
    peak = _peak_flops(startup)
    share = rate / peak if _positive(rate) and peak else None
    return [
        Recount(
            formula,
            found["flops_per_token"],
            found["flops_per_token_causal"],
            None if share is None else 100 * share * found["flops_per_token"],
            None if share is None else 100 * share * found["flops_per_token_causal"],
            formula == startup["flops"].get("calculation_method"),
        )
        for formula, found in counts.items()
    ]


def disagreements(record: dict[str, Any]) -> list[str]:
    """What in the record does not follow from the rest of it, a line each; empty if all of it does. Raises
    UserError if a figure is no figure: anybody may have written the record."""
    found: list[str] = []
    others = (consistency.settings, consistency.gpus, consistency.warmup, consistency.facts)
    for check in (_finite, _formula, _peak, _times, _rows, _summary, _end, *others):
        try:
            found += check(record)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise UserError(
                f"the record's {check.__name__.strip('_')} cannot be read: {type(error).__name__}: "
                f"{one_line(str(error), 200)}; it is damaged, or of another version"
            ) from None
    return found


def _finite(record: dict[str, Any]) -> list[str]:
    """A loss may be nan, as of a run that diverged; no other number may."""
    found = consistency.infinite_numbers(record)
    return [line for line in found if not re.search(r"loss|norm|grad_", line)][:SHOWN]


def _times(record: dict[str, Any]) -> Iterator[str]:
    """Every row has a time, from which its tokens/s follow, whether or not it has an MFU."""
    tokens, last = record["startup_info"].get("tokens_per_iter"), record.get("attempt", 1)
    config, gpus = record["config"], record["startup_info"]["hardware"].get("num_gpus")
    for row in record["training_iterations"]:
        if row.get("attempt", 1) != last:
            continue
        time, rate = row.get("time_ms"), row.get("tokens_per_sec")
        if not _positive(time) or not _positive(rate):
            yield f"rows, time_ms: iteration {row.get('iter')}: {time!r} ms and {rate!r} tokens/s"
        elif not row.get("mfu") and _positive(tokens) and not same_figure(rate, 1e3 * tokens / time):
            yield (
                f"rows, tokens_per_sec: iteration {row.get('iter')}: {rate!r}, not {1e3 * tokens / time:.6g}"
            )
    factors = [config.get(key) for key in ("batch_size", "gradient_accumulation_steps", "block_size")]
    factors.append(gpus)
    if all(isinstance(one, int) for one in factors) and tokens != math.prod(factors):
        yield (
            f"startup_info.tokens_per_iter is {tokens!r}, and batch_size x gradient_accumulation_steps x "
            f"block_size x GPUs make {math.prod(factors)}"
        )


def _counts(record: dict[str, Any]) -> dict[str, dict]:
    architecture, config = record["startup_info"]["model"].get("architecture"), record["config"]
    try:
        model = ModelConfig(**architecture)
        return {name: module.count_flops(model, config["block_size"]) for name, module in FORMULAS.items()}
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise UserError(
            f"the record's model cannot be counted: {type(error).__name__}: {error}; it is damaged, or of "
            "another version"
        ) from None


def _formula(record: dict[str, Any]) -> Iterator[str]:
    flops, counts = record["startup_info"]["flops"], _counts(record)
    method = flops.get("calculation_method")
    if method not in FORMULAS:
        yield f"startup_info.flops: the formula {method!r} is not one of {', '.join(FORMULAS)}"
        return
    for name, found in counts.items():
        if flops["totals"].get(name) != found["flops_per_token"]:
            yield (
                f"startup_info.flops.totals: {name} is {flops['totals'].get(name)!r}, and the architecture "
                f"makes {found['flops_per_token']:,}"
            )
    for key in ("flops_per_token", "flops_per_token_causal"):
        if flops.get(key) != counts[method][key]:
            made = counts[method][key]
            yield f"startup_info.flops.{key} is {flops.get(key)!r}, and {method} makes {made:,}"
    methods = {row["mfu"].get("calculation_method") for row in _measured(record)} - {method}
    for other in sorted(map(str, methods)):
        yield f"rows count MFU by {other}, and startup_info by {method}: the formula was changed between them"


def _peak(record: dict[str, Any]) -> Iterator[str]:
    """A peak said to be the datasheet's must be the one of our table."""
    hardware = record["startup_info"]["hardware"]
    peak = hardware.get("peak") or {}
    name, precision = hardware.get("gpu_name"), hardware.get("precision")
    if not (isinstance(name, str) and isinstance(precision, str)):
        return
    known = table_peak(name, precision, bool(peak.get("sparse")))
    own = record["config"].get("peak_tflops") is None  # no peak was stated or measured: it is the table's
    if known.tflops is not None and (own or known.source == peak.get("source")):
        if not same_figure(peak.get("tflops_per_gpu"), known.tflops):
            yield (
                f"the peak is {peak.get('tflops_per_gpu')!r} TFLOPS a GPU, and its source, {known.source}, "
                f"says {known.tflops:g}"
            )


def _rows(record: dict[str, Any]) -> Iterator[str]:
    startup = record["startup_info"]
    counts, method = _counts(record), startup["flops"].get("calculation_method")
    tokens, peak = startup.get("tokens_per_iter"), _peak_flops(startup)
    wrong: dict[str, list[str]] = {}
    for row in _measured(record):
        mfu, rate = row["mfu"], row.get("tokens_per_sec")
        found = dict(counts.get(mfu.get("calculation_method"), counts.get(method)) or {})
        if not found:
            continue
        attended = mfu.get("document_length_per_token")
        if record["config"].get("doc_masking") and _positive(attended):
            found["flops_per_token_causal"] = document_flops(found, attended, record["config"]["block_size"])
        share = rate / peak if _positive(rate) and peak else math.nan
        expected = {
            "tokens_per_sec": 1e3 * tokens / row["time_ms"]
            if _positive(row.get("time_ms")) and _positive(tokens)
            else math.nan,
            "mfu.tokens_per_sec": rate,
            "mfu.mfu_percent": 100 * share * found["flops_per_token"],
            "mfu.mfu": share * found["flops_per_token"],
            "mfu.mfu_causal_percent": 100 * share * found["flops_per_token_causal"],
            "mfu.hardware_peak_tflops": peak / 1e12 if peak else math.nan,
        }
        for name, value in expected.items():
            stated = mfu.get(name.removeprefix("mfu.")) if name.startswith("mfu.") else row.get(name)
            if not same_figure(stated, value):
                wrong.setdefault(name, []).append(f"iteration {row.get('iter')}: {stated!r}, not {value:.6g}")
    for name, lines in wrong.items():
        more = f", and {len(lines) - SHOWN} more rows" if len(lines) > SHOWN else ""
        yield f"rows, {name}: {'; '.join(lines[:SHOWN])}{more}"


def _summary(record: dict[str, Any]) -> Iterator[str]:
    """Medians and percentiles must be those of the rows after the warm-up, of the last attempt."""
    last = record.get("attempt", 1)
    rows = [
        row
        for row in record["training_iterations"]
        if not row.get("warmup") and row.get("attempt", 1) == last and _positive(row.get("time_ms"))
    ]
    for name in (*FIGURES, *CLOCKS):
        of_rows = [row["mfu"] for row in rows if row.get("mfu")] if name == "mfu_percent" else rows
        values = [one.get(name) for one in of_rows]
        numbers = [value for value in values if _positive(value)]
        stated = record["summary"].get(name)
        expected = spread(numbers) if numbers else None
        if (expected is None) != (stated is None) and name in record["summary"] | dict.fromkeys(FIGURES):
            yield f"summary.{name} is {one_line(str(stated), 100)}, and {len(numbers)} rows have it"
            continue
        for part, made in (expected or {}).items() if stated else ():
            if not same_figure(stated.get(part), made):
                yield f"summary.{name}: the {part} is {stated.get(part)!r}, and the rows make {made:.6g}"


def _end(record: dict[str, Any]) -> Iterator[str]:
    iterations = [row.get("iter") for row in record["training_iterations"]]
    final = record["summary"].get("final_iter")
    numbers = [i for i in iterations if isinstance(i, int)]
    if numbers != sorted(set(numbers)) or len(numbers) != len(iterations):
        yield "rows: their iterations are not in order, each once"
    elif numbers and final != numbers[-1]:
        yield f"rows: the last is iteration {numbers[-1]}, and summary.final_iter is {final!r}"
    interval = record["config"].get("log_interval")
    if isinstance(interval, int) and isinstance(final, int) and numbers and interval > 0:
        first, known = -(-numbers[0] // interval) * interval, set(numbers)
        number = len(range(first, final + 1, interval)) - sum(i % interval == 0 for i in known)
        if number > 0:  # the end may be any number, so no list is made of what should be there
            absent = (i for i in range(first, final + 1, interval) if i not in known)
            shown = ", ".join(map(str, itertools.islice(absent, SHOWN)))
            yield f"rows: iterations {shown} are missing ({number:,} in all)"
    most, loss = record["config"].get("max_iters"), record["training_iterations"][-1].get("loss")
    if isinstance(most, int) and isinstance(final, int) and final >= most:
        yield f"summary.final_iter is {final}, and the configuration ends before iteration {most}"
    if "final_loss" in record["summary"] and not _same(record["summary"]["final_loss"], loss):
        yield f"summary.final_loss is {record['summary']['final_loss']!r}, and the last row's loss {loss!r}"


def _measured(record: dict[str, Any]) -> list[dict]:
    """Rows of the last attempt that have an MFU. Earlier attempts may have had other GPUs."""
    rows = [row for row in record["training_iterations"] if isinstance(row.get("mfu"), dict)]
    return [row for row in rows if row.get("attempt", 1) == record.get("attempt", 1)]


def _peak_flops(startup: dict[str, Any]) -> float | None:
    """Of all GPUs."""
    hardware = startup["hardware"]
    peak, gpus = (hardware.get("peak") or {}).get("tflops_per_gpu"), hardware.get("num_gpus")
    return peak * 1e12 * gpus if _positive(peak) and _positive(gpus) else None


def _positive(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def same_figure(stated: Any, expected: Any) -> bool:
    """Whether they agree up to rounding; an expectation that cannot be formed, nan, agrees with all."""
    if isinstance(expected, float) and math.isnan(expected):
        return True
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (stated, expected))
    return numbers and math.isclose(stated, expected, rel_tol=ROUNDING)


def _same(one: Any, other: Any) -> bool:
    """Equal, or both nan, which a run that diverged has as its loss."""
    return one == other or (one != one and other != other)
