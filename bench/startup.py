"""What a start costs: seconds from the command to the loop, and of the first iteration, cold and warm.

    python -m bench.startup config/full_qwen3_1.8b_optimal.py --dataset random

Runs train.py on one GPU for three iterations, cold (no compiled code anywhere) and then warm (with what the
cold start compiled), and takes the time at which its console shows the report before the loop and the first
rows. What the first iteration spends on compiling is torch's and Triton's own account
(bench/startup_process.py).
"""

from __future__ import annotations

import argparse
import datetime
import re
import shlex
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from bench.plan import OWN_OPTIONS, check_overrides
from bench.process import TIMEOUT_MAX_S, Outcome, end_with_status, python_command, run_process
from bench.table import new_folder, save_table
from bench.throughput import dataset_chooser
from common.arguments import real_number, user_path, whole_number
from common.json_file import read_json
from common.text import aligned
from training.configuration.flags import take_flags
from training.pretrained.settings import load_run_config

ITERATIONS = 3
REPEATS_MAX = 100
POLL_S = 0.01  # how often the console is looked at, so the error of a time
FIXED = {
    "max_iters": ITERATIONS,
    "log_interval": 1,
    "eval_interval": 0,
    "eval_at_start": False,
    "gradient_log_interval": 0,
    "always_save_checkpoint": False,
}
MARKS = [re.compile(rb"STARTING TRAINING")] + [re.compile(rb"Iter +%d " % i) for i in range(ITERATIONS)]
COLUMNS = (
    ("start", "{start}"),
    ("to the loop, s", "{to_the_loop_s:.2f}"),
    ("first iteration, s", "{first_iteration_s:.2f}"),
    ("third, s", "{third_iteration_s:.2f}"),
    ("tracing and Inductor, s", "{inductor_s:.2f}"),
    ("own Triton kernels, s", "{own_kernels_s:.2f}"),
    ("compiled / read from the cache", "{own_kernels_compiled:.0f} / {own_kernels_read:.0f}"),
)
LEGEND = (
    "to the loop: imports, processes, data, weights. Tracing and Inductor: torch's account of what it\n"
    "compiled, with the wait for its compiler processes. Own Triton kernels: those that the process that\n"
    "trains compiled or read itself, one after the other. The rest of the first iteration is its work, the\n"
    "loading of libraries and the choice of their algorithms."
)


def main(argv: list[str]) -> int:
    arguments, overrides = parse(argv)
    check_overrides(overrides)
    load_run_config([arguments.config, *overrides], 1)  # what is wrong with it is said before any start
    folder = new_folder(arguments.output, f"startup_{datetime.datetime.now():%Y%m%d_%H%M%S}")
    results = []
    for repeat in range(1, arguments.repeats + 1):
        with tempfile.TemporaryDirectory(prefix="nanomfu-", ignore_cleanup_errors=True) as cache:
            for start in ("cold", "warm"):
                result = measure(start, repeat, cache, arguments, overrides, folder)
                print(f"{start}, repeat {repeat}: {result.get('reason') or 'done'}", flush=True)
                results.append(result)
    lines = [*table(results), "", LEGEND]
    save_table(
        folder, {"command": shlex.join(["python", "-m", "bench.startup", *argv]), "results": results}, lines
    )
    print("\n" + "\n".join(lines) + f"\n\nSaved in {folder}", flush=True)
    return 1 if any("reason" in result for result in results) else 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.startup",
        description=__doc__.splitlines()[0],
        epilog="--key=value, any setting of train.py, goes to all runs.",
        allow_abbrev=False,
    )
    parser.add_argument("config", type=user_path, help="a config file")
    parser.add_argument("--repeats", type=whole_number(1, REPEATS_MAX), default=1, help="pairs of starts (1)")
    parser.add_argument(
        "--timeout", type=real_number(0, TIMEOUT_MAX_S), default=600, help="seconds for one start (600)"
    )
    parser.add_argument(
        "--dataset", type=user_path, help="instead of the config's own; 'random' makes one of random tokens"
    )
    parser.add_argument(
        "--output", type=user_path, help="a new folder (default: out-bench/startup_DATE_TIME)"
    )
    flags, rest = take_flags(argv, OWN_OPTIONS)
    options, unknown = parser.parse_known_args(rest)
    return options, flags + unknown


def measure(start: str, repeat: int, cache: str, arguments, overrides: list[str], folder: Path) -> dict:
    """The seconds of one start, or the reason why there are none."""
    out_dir = folder / f"{start}-{repeat}"
    out_dir.mkdir(parents=True)
    argv = [arguments.config, *overrides, *(f"--{key}={value}" for key, value in FIXED.items())]
    argv.append(f"--out_dir={out_dir}")
    dataset_for = dataset_chooser(arguments.dataset, folder)
    if dataset_for:
        argv.append(f"--dataset={dataset_for(load_run_config(argv, 1))}")
    account = out_dir / "account.json"
    command = python_command(["-m", "bench.startup_process", str(account), *argv], processes=1)
    outcome, seconds = timed_process(command, out_dir / "console.log", arguments.timeout, cache)
    identity = {"start": start, "repeat": repeat}
    if outcome.reason or len(seconds) < len(MARKS):
        return identity | {"reason": outcome.reason or "its console lacks the report or a row"}
    durations = [later - earlier for earlier, later in zip(seconds, seconds[1:], strict=False)]
    return identity | {
        "to_the_loop_s": seconds[0],
        "first_iteration_s": durations[0],
        "third_iteration_s": durations[-1],
        **read_json(account),
    }


def timed_process(command: list[str], log: Path, timeout_s: float, cache: str) -> tuple[Outcome, list[float]]:
    """Runs command with this compile cache. Returns how it ended, and the seconds from its start to each of
    MARKS in its output, in their order, as many as came."""
    seconds: list[float] = []
    ended = threading.Event()
    began = time.perf_counter()

    def watch() -> None:
        while True:
            last_look = ended.is_set()
            text = log.read_bytes() if log.exists() else b""
            while len(seconds) < len(MARKS) and MARKS[len(seconds)].search(text):
                seconds.append(time.perf_counter() - began)
            if last_look or len(seconds) == len(MARKS):
                return
            ended.wait(POLL_S)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        outcome = run_process(command, log, timeout_s, cache=cache)
    finally:
        ended.set()
        watcher.join()
    return outcome, seconds


def table(results: list[dict]) -> list[str]:
    """The lines of a Markdown table: medians of the cold starts and of the warm ones, then the failures."""
    rows, failures = [], []
    for start in ("cold", "warm"):
        of_start = [result for result in results if result["start"] == start]
        good = [result for result in of_start if "reason" not in result]
        failures += [f"{start}, repeat {r['repeat']}: {r['reason']}" for r in of_start if "reason" in r]
        if good:
            names = [name for name, value in good[0].items() if isinstance(value, float | int)]
            medians = {name: statistics.median(result[name] for result in good) for name in names}
            rows.append([cell.format(start=start, **medians) for _, cell in COLUMNS])
    return [*aligned([name for name, _ in COLUMNS], rows, ("start",), "github"), *failures]


if __name__ == "__main__":
    sys.exit(end_with_status(main, sys.argv[1:]))
