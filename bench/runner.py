"""Runs one entry of the plan once, and reads the results from its output."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.plan import Entry
from bench.process import REASON_LENGTH, from_root, python_command, run_process
from bench.results import combine, measure
from common.durable_file import write_json
from common.file_lock import take_lock
from common.json_file import MAX_BYTES, parse_object, read_json, read_regular
from common.run_records import run_records
from common.text import one_line

PROGRAMS = {"variant": ["train.py"], "roofline": ["-m", "bench.roofline"]}  # a peer's is in its entry
LOG, RESULT = "console.log", "result.json"  # in the folder of a run


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
