"""What a checkpoint costs the training: the time that the loop waits for it, and the iterations after it.

    python -m bench.checkpointing config/full_qwen3_1.8b_optimal.py --dataset random --output out-bench/disk

Runs train.py twice, once with async_checkpoint=False and once with True, and reads the run records. The
checkpoints are written to the output folder, so the disk of that folder is measured; they are deleted after
each run. Each row of these records is one iteration, and its time contains no save: the column "waits" is
added once for each checkpoint. The iterations before the first save are the reference for those after it.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import shutil
import statistics
import sys
from pathlib import Path

from bench.plan import OWN_OPTIONS, WARMUP_ITERS, check_overrides
from bench.process import TIMEOUT_MAX_S, end_with_status, python_command, run_process
from bench.table import new_folder, save_table
from bench.throughput import dataset_chooser
from common.arguments import real_number, user_path, whole_number
from common.errors import UserError
from common.json_file import read_json
from common.run_records import run_records
from common.text import aligned
from training.checkpoints.folder import find_checkpoint
from training.configuration.flags import take_flags
from training.pretrained.settings import load_run_config
from training.process.memory import GB

MEASURED_ITERS = 20  # after each save, and before the first one
PROCESSES_MAX = 1024  # of one machine
SAVES = 2  # that are measured; the run makes one more at its end, which no iteration follows
MODES = {"training waits": False, "beside the training": True}  # value of async_checkpoint
COLUMNS = (
    ("checkpoints", "{mode}"),
    ("GB", "{gigabytes:.2f}"),
    ("ms/iter", "{before_ms:.1f}"),
    ("waits, s", "{waits_s:.3f}"),
    ("in iterations", "{waits_iterations:.2f}"),
    ("written in, s", "{write_s:.2f}"),
    (f"ms/iter, next {MEASURED_ITERS}", "{after_ms:.1f}"),
    ("slower by", "{slower_percent:+.1f} %"),
    ("GPU memory peak", "{memory}"),
    ("note", "{note}"),  # why a run failed
)


def main(argv: list[str]) -> int:
    arguments, overrides = parse(argv)
    check_overrides(overrides)
    folder = new_folder(arguments.output, f"checkpointing_{datetime.datetime.now():%Y%m%d_%H%M%S}")
    results = []
    for mode, asynchronous in MODES.items():
        print(f"{mode}: started", flush=True)
        result = run(mode, asynchronous, arguments, overrides, folder)
        print(f"{mode}: {result.get('reason') or 'done'}", flush=True)
        results.append(result)
    content = {"command": shlex.join(["python", "-m", "bench.checkpointing", *argv]), "results": results}
    lines = table(results)
    save_table(folder, content, lines)
    print("\n" + "\n".join(lines) + f"\n\nSaved in {folder}", flush=True)
    return 1 if any("reason" in result for result in results) else 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.checkpointing",
        description=__doc__.splitlines()[0],
        epilog="--key=value, any setting of train.py, goes to both runs.",
        allow_abbrev=False,
    )
    parser.add_argument("config", type=user_path, help="a config file")
    parser.add_argument(
        "--processes", type=whole_number(1, PROCESSES_MAX), default=1, help="GPUs of this machine (1)"
    )
    parser.add_argument(
        "--timeout", type=real_number(0, TIMEOUT_MAX_S), default=1800, help="seconds for one run (1800)"
    )
    parser.add_argument(
        "--dataset", type=user_path, help="instead of the config's own; 'random' makes one of random tokens"
    )
    parser.add_argument("--output", type=user_path, help="a new folder, on the disk to be measured")
    flags, rest = take_flags(argv, OWN_OPTIONS)
    options, unknown = parser.parse_known_args(rest)
    return options, flags + unknown


def run(mode: str, asynchronous: bool, arguments, overrides: list[str], folder: Path) -> dict:
    """The figures of one run, or the reason why there are none."""
    out_dir = folder / "runs" / mode.replace(" ", "-")
    out_dir.mkdir(parents=True)
    argv = [arguments.config, *overrides, *flags(asynchronous), f"--out_dir={out_dir}"]
    dataset_for = dataset_chooser(arguments.dataset, folder)
    if dataset_for:
        argv.append(f"--dataset={dataset_for(load_run_config(argv, arguments.processes))}")
    command = python_command(["train.py", *argv], arguments.processes)
    outcome = run_process(command, out_dir / "console.log", arguments.timeout, keep_cache=True)
    if outcome.reason:
        return {"mode": mode, "reason": outcome.reason}
    newest = find_checkpoint(out_dir)
    size = sum(path.stat().st_size for path in newest.iterdir())
    shutil.rmtree(newest.parent)
    path = max(run_records(out_dir), default=None)
    if path is None:
        raise UserError(f"no run record in {out_dir}")
    try:
        return {"mode": mode, "gigabytes": size / GB, **figures(read_json(path))}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {type(error).__name__}: {error}") from None


def flags(asynchronous: bool) -> list[str]:
    """The flags that the benchmark sets: when to save, one row for each iteration, no other work."""
    interval = WARMUP_ITERS + MEASURED_ITERS
    fixed = {
        "async_checkpoint": asynchronous,
        "checkpoint_interval": interval,
        "max_iters": interval + SAVES * interval,
        "keep_last": 1,
        "eval_interval": 0,
        "log_interval": 1,
        "gradient_log_interval": 0,
        "log_save_interval": 10**6,
    }
    return [f"--{key}={value}" for key, value in fixed.items()]


def figures(record: dict) -> dict:
    """The figures of a run record in which each row is one iteration."""
    rows = {row["iter"]: row for row in record["training_iterations"]}
    saves = record["checkpoints"][:SAVES]
    first = saves[0]["iter"]
    before = [rows[i]["time_ms"] for i in range(first - MEASURED_ITERS, first)]
    after = [[rows[i]["time_ms"] for i in range(s["iter"], s["iter"] + MEASURED_ITERS)] for s in saves]
    before_ms, after_ms = statistics.median(before), statistics.mean(map(statistics.mean, after))
    waits = statistics.mean(save["blocked_seconds"] for save in saves)
    peaks = [row["memory"] and row["memory"]["max_allocated_gb"] for row in rows.values()]
    return {
        "before_ms": before_ms,
        "before_mean_ms": statistics.mean(before),
        "waits_s": waits,
        "waits_iterations": 1000 * waits / before_ms,
        "write_s": statistics.mean(save["write_seconds"] for save in saves),
        "after_ms": after_ms,
        "slower_percent": 100 * (after_ms / statistics.mean(before) - 1),
        "peak_before_gb": peaks[first - 1],
        "peak_gb": peaks[-1],
        "saves": saves,
        "rows_ms": [row["time_ms"] for row in rows.values()],
    }


def table(results: list[dict]) -> list[str]:
    """The lines of a Markdown table."""
    rows = []
    for result in results:
        if "reason" in result:
            rows.append([result["mode"], *[""] * (len(COLUMNS) - 2), result["reason"].replace("|", "/")])
            continue
        before, peak = result["peak_before_gb"], result["peak_gb"]
        memory = f"{peak / before:.3f} x {before:.1f} GiB" if before else "n/a"
        rows.append([cell.format(**result, memory=memory, note="") for _, cell in COLUMNS])
    return aligned([name for name, _ in COLUMNS], rows, ("checkpoints", "note"), "github")


if __name__ == "__main__":
    sys.exit(end_with_status(main, sys.argv[1:]))
