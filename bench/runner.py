"""Runs one entry of the plan once, reads the results from its output, and keeps them for a later call.

Figures of a run are from its rows, the training_iterations of a run record; bench.peer prints rows of the
same form. The first row is the first iteration, which includes compilation. Of the others only those count
that begin after the warm-up. A variant's figures are medians, 10th and 90th percentiles of its runs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import shlex
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.plan import Entry
from bench.process import REASON_LENGTH, from_root, python_command, run_process
from common.durable_file import write_json
from common.file_lock import take_lock
from common.json_file import MAX_BYTES, parse_object, read_json, read_regular
from common.run_records import run_records
from common.text import one_line
from training.hardware.nvml import FIELDS
from training.records import percentiles
from training.records.machine import known, missing_reason

PROGRAMS = {"variant": ["train.py"], "roofline": ["-m", "bench.roofline"]}  # a peer's is in its entry
LOG, RESULT = "console.log", "result.json"  # in the folder of a run
RATES = ("tokens_per_sec", "tokens_per_sec_per_gpu", "time_ms")
SERIES = ("mfu_percent", "mfu_causal_percent", "mfu_fp8_percent", *RATES, *FIELDS)


def run_entry(
    entry: Entry,
    repeat: int,
    folder: Path,
    arguments: argparse.Namespace,
    entries: list[Entry],
    **process: Any,
) -> None:
    """Adds a run to entry.runs and updates entry.facts and entry.result. `process`: see run_process."""
    run: dict[str, Any] = {"repeat": repeat, "reason": entry.problem, "measurement": None}
    run["seconds"] = 0.0
    entry.runs.append(run)
    if entry.problem:
        return
    out_dir = run_folder(entry, repeat, folder)
    out_dir.mkdir(parents=True)
    argv = [*entry.argv, f"--out_dir={from_root(out_dir)}", *stated_peak(entry, entries)]
    command = python_command([*(entry.program or PROGRAMS[entry.kind]), *argv], entry.processes)
    outcome = run_process(command, out_dir / LOG, arguments.timeout, arguments.keep_cache, **process)
    run.update(command=shlex.join(["python", *command[1:]]), folder=from_root(out_dir))
    run.update(reason=outcome.reason, seconds=outcome.seconds)
    if outcome.reason is None:
        try:
            read_output(entry, run, out_dir, arguments.warmup)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            run["reason"] = one_line(
                f"its result cannot be read: {type(error).__name__}: {error}", REASON_LENGTH
            )
    if entry.kind != "roofline":
        entry.result = combine(entry.runs)


def run_and_keep(entry: Entry, folder: Path, arguments: argparse.Namespace, **process: Any) -> Path:
    """Runs the entry in a new folder, which it returns and which then has the entry with its results."""
    number = next(n for n in itertools.count(1) if not run_folder(entry, n, folder).exists())
    run_entry(entry, number, folder, arguments, [entry], **process)
    out_dir = run_folder(entry, number, folder)
    out_dir.mkdir(exist_ok=True)  # a configuration that does not load has none
    shutil.rmtree(out_dir / "checkpoints", ignore_errors=True)  # each new best loss is saved
    write_json(out_dir / RESULT, dataclasses.asdict(entry))
    return out_dir


def kept(folder: Path) -> Iterator[tuple[Entry, Path]]:
    """(what was kept, its folder) of each run, the oldest first; not of one that was killed meanwhile."""
    for path in sorted((folder / "runs").glob(f"*/{RESULT}"), key=lambda path: path.stat().st_mtime_ns):
        try:
            content = read_json(path)
            if "entry" in content:  # of the precision matrix, before Entry had `about`
                content = {**content.pop("entry"), "about": content}
            yield Entry(**content), path.parent
        except (OSError, ValueError, TypeError):
            continue


@contextlib.contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether no other process has claimed this path. The claim lasts until the end of the block, or of the
    process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        danger = "nothing prevents two processes from doing the same; start one at a time with this folder"
        yield take_lock(file.fileno(), path, danger)


def run_folder(entry: Entry, repeat: int, folder: Path) -> Path:
    """Where the record and the console log of a run go."""
    slug = "".join(c if c.isalnum() or c in "._-" else "-" for c in entry.name)
    return folder / "runs" / f"{slug}.{repeat}"


def stated_peak(entry: Entry, entries: list[Entry]) -> list[str]:
    """The flag that gives a run the peak that an earlier one of the table measured: a second measurement
    would differ, and one table has one peak for each dtype. Empty where no peak was measured."""
    alike = [other for other in entries if (other.dtype, other.device) == (entry.dtype, entry.device)]
    ceilings = [other.result["ceiling"] for other in alike if other.kind == "roofline" and other.result]
    peaks = [found["peak_tflops"] for found in ceilings if found["peak_source"].startswith("measured")]
    facts = [other.facts["peak"] for other in alike if other.kind == "variant" and other.facts]
    peaks += [peak["tflops_per_gpu"] for peak in facts if peak["measured"]]
    return [f"--peak_tflops={peaks[0]}"] if peaks else []


def read_output(entry: Entry, run: dict, out_dir: Path, warmup: int) -> None:
    """Reads what the run measured and its facts, from its run record or from the JSON that it printed. Raises
    ValueError if there is none."""
    if entry.kind == "variant":
        path = max(run_records(out_dir), default=None)
        if path is None:
            raise ValueError(f"no run record in {out_dir}")
        record = read_json(path)
        info, rows = record["startup_info"], record["training_iterations"]
        facts = {name: info[name] for name in ("hardware", "software", "git", "attention")}
        facts |= {"record": from_root(path), "config": record["config"], "peak": info["hardware"]["peak"]}
        facts |= {"low_precision": info.get("low_precision"), "evaluations": record["eval_steps"]}
        facts["fallbacks"] = [
            f"asked for {choice['asked']} ({choice['reason']})"
            for choice in info.values()
            if isinstance(choice, dict) and "asked" in choice and choice.get("reason")
        ]
        entry.facts = {**facts, "parameters": info["model"]["total_params"]}
    else:
        printed = last_json(read_regular(out_dir / LOG, MAX_BYTES))
        if entry.kind == "roofline":
            entry.result = printed
            return
        rows = printed.pop("training_iterations")
        entry.facts = printed
    run["measurement"] = measure(rows, warmup)


def last_json(output: bytes) -> dict:
    lines = [line for line in output.splitlines() if line.startswith(b"{")]
    if not lines:
        raise ValueError("it printed no JSON")
    return parse_object(lines[-1])


# --- figures ---


def measure(rows: list[dict], warmup: int) -> dict:
    """The figures of one run. SERIES are lists with one value for each row that has it; memory is None on a
    CPU. Raises ValueError if no row counts."""
    if not rows:
        raise ValueError("the run has no rows")
    last_before = [-1] + [row["iter"] for row in rows[:-1]]  # the last iteration before each row
    steady = [row for row, last in zip(rows, last_before, strict=True) if last >= warmup]
    if not steady:
        raise ValueError(f"no row begins after {warmup} iterations of warm-up; use more --iters")
    memory = [row["memory"] for row in rows if row["memory"]]
    mfus = [row["mfu"] for row in steady if row["mfu"]]
    return {
        "first_step_s": rows[0]["time_ms"] / 1000,
        "rows": len(steady),
        "mfu_percent": [mfu["mfu_percent"] for mfu in mfus],
        "mfu_causal_percent": [mfu["mfu_causal_percent"] for mfu in mfus],
        # of a run with fp8 matmuls, on a GPU whose fp8 peak is known
        "mfu_fp8_percent": [mfu["mfu_fp8_percent"] for mfu in mfus if mfu.get("mfu_fp8_percent")],
        **{name: [row[name] for row in steady] for name in RATES},
        "mfu_reason": None if mfus else steady[-1]["mfu_reason"],
        **{name: known(steady, name) for name in FIELDS},
        "gpu_reason": missing_reason(steady),
        "max_allocated_gb": max((m["max_allocated_gb"] for m in memory), default=None),
        "max_reserved_gb": max((m["max_reserved_gb"] for m in memory), default=None),
        "first_loss": rows[0]["loss"],
        "final_loss": rows[-1]["loss"],
    }


def combine(runs: list[dict]) -> dict | None:
    """The figures of one variant from all its repeats: the median of the runs' medians, percentiles over all
    their rows, the most memory of any run. Runs that failed have no measurement; None if all did."""
    measurements = [run["measurement"] for run in runs if run["measurement"]]
    if not measurements:
        return None

    def known_of(name: str) -> list:
        return [m[name] for m in measurements if m[name] is not None]

    return {
        "runs": len(measurements),
        "rows": sum(known_of("rows")),
        **{name: spread(known_of(name)) for name in SERIES},
        "first_step_s": statistics.median(known_of("first_step_s")),
        **{name: max(known_of(name), default=None) for name in ("max_allocated_gb", "max_reserved_gb")},
        **{name: next(iter(known_of(name)), None) for name in ("mfu_reason", "gpu_reason")},
    }


def spread(series: list[list[float]]) -> dict | None:
    """Median of the runs' medians, 10th and 90th percentile of all values; None if there are no values."""
    found = percentiles.spread([value for values in series for value in values])
    if found is None:
        return None
    return {**found, "median": statistics.median(statistics.median(values) for values in series if values)}


def relate(entries: list[Entry]) -> None:
    """Adds to each result its speed relative to the best of its peers and to its ceiling, both per GPU."""
    results = {entry.name: entry.result for entry in entries}
    for entry in entries:
        result = entry.result
        if entry.kind == "roofline" or not result:
            continue
        rate = result["tokens_per_sec_per_gpu"]["median"]
        peers = {name: found for name in entry.peers if (found := results.get(name))}
        rates = {name: found["tokens_per_sec_per_gpu"]["median"] for name, found in peers.items()}
        best = max(rates, key=lambda name: rates[name], default=None)
        ceiling = results.get(entry.roofline) if entry.roofline else None
        result["times_peers"] = {name: rate / of_peer for name, of_peer in rates.items()}
        result["best_peer"], result["times_peer"] = best, rate / rates[best] if best else None
        result["ceiling_percent"] = 100 * rate / ceiling["ceiling"]["tokens_per_sec"] if ceiling else None


def mean_and_deviation(values: list[float]) -> tuple[float, float | None] | None:
    """Over seeds. None without values."""
    spread = statistics.stdev(values) if len(values) > 1 else None
    return (statistics.mean(values), spread) if values else None
