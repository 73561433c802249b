"""Runs the entries of a plan, each in a process of its own, and keeps what each run found in its folder, so
that a later call goes on from there. Several processes that have the same folder divide its runs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.figures import combine, figures, measure
from bench.plan import Entry
from bench.process import REASON_LENGTH, from_root, python_command, run_process
from bench.table import cell
from common.durable_file import write_json
from common.file_lock import take_lock
from common.json_file import MAX_BYTES, parse_object, read_json, read_regular
from common.run_records import run_records
from common.text import one_line

SAID = {"tokens/s": ",.0f", "MFU %": ".2f", "held-out loss": ".4f"}  # of a run, on the console: formats
PROGRAMS = {"variant": ["train.py"], "roofline": ["-m", "bench.roofline"]}  # a peer's is in its entry
LOG, RESULT = "console.log", "result.json"  # in the folder of a run


def run_bench(
    turns: Sequence[Entry], folder: Path, options: argparse.Namespace, save: Callable[[], list[str]]
) -> int:
    """Runs what has no result yet, and prints the table. Returns the exit status: 1 if a run failed."""
    entries = list({id(entry): entry for entry in turns}.values())
    restore(entries, folder)
    if done := sum(len(entry.runs) for entry in entries):
        print(f"{done} of {len(turns)} runs are finished and are not run again", flush=True)
    busy = work(turns, folder, options, save)
    for name in busy:
        print(f"{name}: another process is at it", flush=True)
    print("\n".join(["", *save(), "", f"Saved in {folder}"]), flush=True)
    return 1 if any(entry.failures for entry in entries) else 0


def work(
    turns: Sequence[Entry], folder: Path, options: argparse.Namespace, save: Callable[[], object]
) -> list[str]:
    """A run of each entry, in this order, that has not had it; an entry may be there several times. None that
    another process is at: returns their names. `save` writes the table, after each run, so that an
    interrupted benchmark leaves its results."""
    busy, turn = [], Counter[str]()
    for number, entry in enumerate(turns, start=1):
        turn[entry.name] += 1
        with claim(run_folder(entry, 0, folder).with_suffix(".lock")) as ours:
            restore([entry], folder)  # another process may have done it meanwhile
            if len(entry.runs) >= turn[entry.name]:
                continue
            if not ours:
                busy.append(entry.name)
                continue
            title = f"[{number}/{len(turns)}] {entry.name}"
            print(f"{title}: started", flush=True)
            repeat = next(n for n in itertools.count(1) if not run_folder(entry, n, folder).exists())
            run_entry(entry, repeat, folder, options, turns)
            out_dir = run_folder(entry, repeat, folder)
            out_dir.mkdir(exist_ok=True)  # a configuration that does not load has none
            shutil.rmtree(out_dir / "checkpoints", ignore_errors=True)  # each new best loss is saved
            write_json(out_dir / RESULT, dataclasses.asdict(entry))
            print(f"{title}: {result_line(entry)}", flush=True)
        save()
    return busy


def restore(entries: Sequence[Entry], folder: Path) -> None:
    """Gives entries what runs with the same arguments have found, in any process."""
    found = {(done.kind, *done.program, *done.argv): done for done in kept(folder) if done.result}
    for entry in entries:
        done = found.get((entry.kind, *entry.program, *entry.argv), entry)
        succeeded = [run for run in done.runs if not run["reason"]]
        if len(succeeded) > len(entry.runs):
            entry.runs, entry.facts, entry.result = succeeded, done.facts, done.result


def kept(folder: Path) -> list[Entry]:
    """What each run kept, the oldest first; not of one that was killed meanwhile."""
    found = []
    for path in sorted((folder / "runs").glob(f"*/{RESULT}"), key=lambda path: path.stat().st_mtime_ns):
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
            content = read_json(path)
            if "entry" in content:  # of the precision matrix, before Entry had `about`
                content = {**content.pop("entry"), "about": content}
            content["runs"][-1]["folder"] = from_root(path.parent)  # where it is now
            found.append(Entry(**content))
    return found


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


# --- one run ---


def result_line(entry: Entry) -> str:
    """How the last run of an entry ended, in one line for the console."""
    run, found = entry.runs[-1], figures([entry])
    if run["reason"]:
        return f"failed after {run['seconds']:.0f} s: {run['reason']}"
    said = {name: cell(found[name], form) for name, form in SAID.items() if found[name] is not None}
    return ", ".join([*(f"{name} {text}" for name, text in said.items()), f"{run['seconds']:.0f} s"])


def run_entry(
    entry: Entry,
    repeat: int,
    folder: Path,
    arguments: argparse.Namespace,
    entries: Sequence[Entry],
) -> None:
    """Adds a run to entry.runs and updates entry.facts and entry.result. `arguments`: timeout and keep_cache;
    `entries`: those of the table, see stated_peak."""
    run = {"repeat": repeat, "reason": entry.problem, "measurement": None, "seconds": 0.0}
    entry.runs.append(run)
    if entry.problem:
        return
    out_dir = run_folder(entry, repeat, folder)
    out_dir.mkdir(parents=True)
    argv = [*entry.argv, f"--out_dir={from_root(out_dir)}", *stated_peak(entry, entries)]
    command = python_command([*(entry.program or PROGRAMS[entry.kind]), *argv], entry.processes)
    outcome = run_process(command, out_dir / LOG, arguments.timeout, arguments.keep_cache)
    run.update(command=shlex.join(["python", *command[1:]]), folder=from_root(out_dir))
    run.update(reason=outcome.reason, seconds=outcome.seconds)
    if outcome.reason is None:
        try:
            read_output(entry, run, out_dir)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"its result cannot be read: {type(error).__name__}: {error}"
            run["reason"] = one_line(reason, REASON_LENGTH)
    if entry.kind != "roofline":
        entry.result = combine(entry.runs)


def stated_peak(entry: Entry, entries: Sequence[Entry]) -> list[str]:
    """The flag that gives a run the peak that an earlier one of the table measured: a second measurement
    would differ, and one table has one peak for each dtype. Empty where no peak was measured."""
    for other in entries:
        found = (other.result or {}).get("ceiling") or other.facts.get("peak") or {}
        measured = found.get("measured") or found.get("peak_source", "").startswith("measured")
        if measured and (other.dtype, other.device) == (entry.dtype, entry.device):
            return [f"--peak_tflops={found.get('tflops_per_gpu') or found['peak_tflops']}"]
    return []


def read_output(entry: Entry, run: dict, out_dir: Path) -> None:
    """Reads what the run measured and its facts, from its run record or from the JSON that it printed. Raises
    ValueError if there is none."""
    if entry.kind == "variant":
        path = max(run_records(out_dir), default=None)
        if path is None:
            raise ValueError(f"no run record in {out_dir}")
        record = read_json(path)
        entry.facts, rows = facts_of(record) | {"record": from_root(path)}, record["training_iterations"]
    else:
        printed = last_json(read_regular(out_dir / LOG, MAX_BYTES))
        if entry.kind == "roofline":
            entry.result = printed
            return
        rows = printed.pop("training_iterations")
        entry.facts = printed
    run["measurement"] = measure(rows, entry.warmup)


def facts_of(record: dict[str, Any]) -> dict[str, Any]:
    """What a table and a later reader need of a run record beside its rows."""
    info = record["startup_info"]
    choices = [each for each in info.values() if isinstance(each, dict) and each.get("reason")]
    return {
        **{name: info[name] for name in ("hardware", "software", "git", "attention")},
        "config": record["config"],
        "peak": info["hardware"]["peak"],
        "low_precision": info.get("low_precision"),
        "evaluations": record["eval_steps"],
        "fallbacks": [f"asked for {each['asked']} ({each['reason']})" for each in choices if "asked" in each],
        "parameters": info["model"]["total_params"],
    }


def last_json(output: bytes) -> dict:
    lines = [line for line in output.splitlines() if line.startswith(b"{")]
    if not lines:
        raise ValueError("it printed no JSON")
    return parse_object(lines[-1])
