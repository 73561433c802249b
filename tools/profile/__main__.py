"""Shows where the time of an iteration goes, and what lies between the peak and the measured MFU.

    python -m tools.profile config/full_qwen3_1.8b_optimal.py --tokens_per_iter=65536
    python -m tools.profile config/quickstart.py --nproc=2

It trains for a few iterations with the profiler and for a few without, each in a process of its own; any
key of train.py is handed on. The output folder has the table and the waterfall as text and JSON, and the
Chrome traces of every rank, for https://ui.perfetto.dev. docs/profile.md says how to read them.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from bench import plan
from bench.plan import Entry, as_flags
from bench.runner import LOG, run_entry, run_folder
from bench.table import new_folder
from bench.throughput import dataset_chooser
from common.arguments import user_folder, user_path, whole_number
from common.command import FAILED, run_command, say
from common.durable_file import write_bytes, write_json
from common.errors import RunError
from tools.profile.report import MEASURED_ROW, analyze, config_of, lines
from training.configuration.flags import take_flags
from training.configuration.keys import KEYS
from training.configuration.rules import OF_FSDP
from training.pretrained.settings import load_run_config
from training.records.profiler import ITERATIONS

# Keys that this tool sets itself, so that nothing but training is between the iterations.
FIXED = {
    **plan.FIXED,
    "max_iters": ITERATIONS,
    **plan.UNDISTURBED,
    "log_interval": 10,
    "profile": "time",
}
RESERVED = {*FIXED, "out_dir"}
# Of the run without the profiler, which tells what an iteration takes.
PLAIN: dict[str, object] = {"profile": None, "max_iters": MEASURED_ROW + 1}
TIMEOUT_S = 3600  # of each process


def main(argv: list[str]) -> int:
    options, overrides = parse(argv)
    plan.check_overrides(overrides, RESERVED, "--output or --dataset, or leave it out")
    flags = [options.config, *overrides, *as_flags(FIXED)]
    config = load_run_config(flags, options.nproc)
    folder = new_folder(options.output, Path(options.config).stem, "out-profile")
    if dataset := dataset_chooser(options.dataset, folder):
        flags.append(f"--dataset={dataset(config)}")
    try:
        content = measure(flags, options.nproc, options.roofline, folder)
    except RunError as error:
        say(f"error: {error}")
        return FAILED
    content["command"] = shlex.join(["python", "-m", "tools.profile", *argv])
    text = lines(content)
    print("\n".join(text), flush=True)
    write_json(folder / "profile.json", content)
    write_bytes(folder / "profile.txt", ("\n".join(text) + "\n").encode())
    print(f"Saved in {folder}; the Chrome traces are runs/profiled.1/profile_*.json.gz")
    return 0 if content["adds_up"] else FAILED


def measure(flags: list[str], processes: int, with_roofline: bool, folder: Path) -> dict[str, Any]:
    """The content of profile.json. Raises RunError if a training fails."""
    profiled, out_dir = run("variant", "profiled", flags, processes, folder)
    _, plain_dir = run("variant", "plain", [*flags, *as_flags(PLAIN)], processes, folder)
    roofline, reason = None, "not asked for: --no-roofline"
    if with_roofline:
        alone: dict[str, object] = {name: KEYS[name].default for name in ("use_zero1", "use_fsdp", *OF_FSDP)}
        alone |= {"profile": None, "batch_size": config_of(profiled.facts).micro_batch}
        entry, _ = run("roofline", "roofline", [*flags, *as_flags(alone)], 1, folder)
        roofline, reason = entry.result, entry.runs[0]["reason"]
    return analyze(out_dir, plain_dir, roofline, reason)


def run(kind: str, name: str, argv: list[str], processes: int, folder: Path) -> tuple[Entry, Path]:
    """Runs train.py or bench.roofline: (its results, its folder). Raises RunError if train.py fails."""
    entry = Entry(kind, name, argv, processes, "")
    out_dir = run_folder(entry, 1, folder)
    print(f"{name}: the console is {out_dir / LOG}", flush=True)
    options = argparse.Namespace(timeout=TIMEOUT_S, keep_cache=True, warmup=0)
    run_entry(entry, 1, folder, options, [entry])
    if kind == "variant" and (reason := entry.runs[0]["reason"]):
        raise RunError(f"train.py: {reason}; {out_dir / LOG} has its whole output")
    return entry, out_dir


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m tools.profile",
        description="Show where the time of an iteration goes.",
        epilog="--key=value, any key of train.py, goes to the run.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("config", type=user_path, help="a config file of train.py")
    add("--nproc", type=whole_number(1, 1024), default=1, help="processes, a GPU each (1)")
    add("--output", type=user_folder, help="a new folder (default: out-profile/CONFIG_TIME)")
    add("--dataset", type=user_path, help="instead of the config's own; 'random': random tokens")
    text = "measure the matmuls alone, without which the waterfall has one step for them"
    add("--roofline", action=argparse.BooleanOptionalAction, default=True, help=text)
    flags, rest = take_flags(argv, plan.OWN_OPTIONS)
    options, unknown = parser.parse_known_args(rest)
    return options, [*flags, *unknown]


if __name__ == "__main__":
    # SIGTERM is handled as Ctrl-C, which also stops the running process
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run_command(main, sys.argv[1:]))
