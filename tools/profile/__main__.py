"""Shows where the time of an iteration goes, and what lies between the peak and the measured MFU.

    python -m tools.profile config/full_qwen3_1.8b_optimal.py --tokens_per_iter=65536
    python -m tools.profile config/quickstart.py --nproc=2

It trains for a few iterations with the profiler and for a few without, each in a process of its own; any
key of train.py is handed on. The output folder has the table and the waterfall as text and JSON, and the
Chrome traces of every rank, for https://ui.perfetto.dev. docs/profile.md says how to read them.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import plan
from bench.process import python_command, run_process
from bench.runner import last_json
from bench.throughput import dataset_chooser
from common.arguments import user_folder, user_path, whole_number
from common.command import FAILED, run_command, say
from common.durable_file import write_bytes, write_json
from common.errors import RunError, UserError
from common.json_file import MAX_BYTES, read_regular
from tools.profile.report import MEASURED_ROW, analyze, config_of, find_record, lines
from training.configuration.flags import take_flags
from training.configuration.keys import KEYS, TrainConfig
from training.configuration.rules import OF_FSDP
from training.pretrained.settings import load_run_config
from training.records.profiler import ITERATIONS

# Keys that this tool sets itself, so that nothing but training is between the iterations.
FIXED = {
    **plan.FIXED,
    "max_iters": ITERATIONS,
    "checkpoint_interval": 0,
    "drift_check_interval": 0,
    "log_interval": 10,
    "profile": "time",
}
RESERVED = {*FIXED, "out_dir"}
# Of the run without the profiler, which tells what an iteration takes.
PLAIN = {"profile": None, "max_iters": MEASURED_ROW + 1}
NPROC_MAX = 1024
TIMEOUT_S = 3600  # of each process


def main(argv: list[str]) -> int:
    options, overrides = parse(argv)
    plan.check_overrides(overrides, RESERVED, "--output or --dataset, or leave it out")
    flags = [options.config, *overrides, *as_flags(FIXED)]
    config = load_run_config(flags, options.nproc)
    folder = new_folder(options.output, Path(options.config).stem)
    if dataset := dataset_chooser(options.dataset, folder):
        flags.append(f"--dataset={dataset(config)}")
    out_dir, plain_dir = folder / "run", folder / "plain_run"
    try:
        train(flags, out_dir, options.nproc)
        train([*flags, *as_flags(PLAIN)], plain_dir, options.nproc)
        roofline: dict[str, Any] | None = None
        reason: str | None = "not asked for: --no-roofline"
        if options.roofline:
            resolved = config_of(find_record(out_dir))
            roofline, reason = measure_roofline(flags, resolved, folder)
        content = analyze(out_dir, plain_dir, roofline, reason)
    except RunError as error:
        say(f"error: {error}")
        return FAILED
    content["command"] = shlex.join(["python", "-m", "tools.profile", *argv])
    text = lines(content)
    print("\n".join(text), flush=True)
    write_json(folder / "profile.json", content)
    write_bytes(folder / "profile.txt", ("\n".join(text) + "\n").encode())
    print(f"Saved in {folder}; the Chrome traces are run/profile_*.json.gz")
    return 0 if content["adds_up"] else FAILED


def as_flags(keys: Mapping[str, Any]) -> list[str]:
    return [f"--{key}={value}" for key, value in keys.items()]


def train(flags: list[str], out_dir: Path, processes: int) -> None:
    """Runs train.py. Raises RunError if it fails."""
    out_dir.mkdir()
    log = out_dir.with_suffix(".log")
    command = python_command(["train.py", *flags, f"--out_dir={out_dir}"], processes)
    print(f"training a few iterations; the console is {log}", flush=True)
    outcome = run_process(command, log, TIMEOUT_S, keep_cache=True)
    if outcome.reason:
        raise RunError(f"train.py: {outcome.reason}; {log} has its whole output")


def measure_roofline(
    flags: list[str], config: TrainConfig, folder: Path
) -> tuple[dict[str, Any] | None, str | None]:
    """(what bench.roofline prints, None), or (None, why there is nothing)."""
    log = folder / "roofline.log"
    alone = [f"--{name}={KEYS[name].default}" for name in ("use_zero1", "use_fsdp", *OF_FSDP)]
    argv = [*flags, *alone, "--profile=None", f"--batch_size={config.micro_batch}"]
    print("measuring this machine's matmuls and attention alone", flush=True)
    outcome = run_process(python_command(["-m", "bench.roofline", *argv], 1), log, TIMEOUT_S)
    if outcome.reason:
        return None, f"bench.roofline: {outcome.reason}"
    try:
        return last_json(read_regular(log, MAX_BYTES)), None
    except (OSError, ValueError) as error:
        return None, f"bench.roofline: {error}"


def new_folder(asked: Path | None, name: str) -> Path:
    """Creates the folder of the results. Raises UserError if it holds something."""
    now = f"{datetime.datetime.now():%Y%m%d_%H%M%S}"
    folder = (asked or Path("out-profile") / f"{name}_{now}").resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--output {folder} is there already and is not an empty folder; name a new one")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m tools.profile",
        description="Show where the time of an iteration goes.",
        epilog="--key=value, any key of train.py, goes to the run.",
        allow_abbrev=False,
    )
    parser.add_argument("config", type=user_path, help="a config file of train.py")
    parser.add_argument(
        "--nproc", type=whole_number(1, NPROC_MAX), default=1, help="processes, a GPU each (1)"
    )
    parser.add_argument("--output", type=user_folder, help="a new folder (default: out-profile/CONFIG_TIME)")
    parser.add_argument(
        "--dataset", type=user_path, help="instead of the config's own; 'random': random tokens"
    )
    parser.add_argument(
        "--no-roofline",
        dest="roofline",
        action="store_false",
        help="do not measure the matmuls alone; the waterfall then has one step for them",
    )
    flags, rest = take_flags(argv, plan.OWN_OPTIONS)
    options, unknown = parser.parse_known_args(rest)
    return options, [*flags, *unknown]


if __name__ == "__main__":
    # SIGTERM is handled as Ctrl-C, which also stops the running process
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run_command(main, sys.argv[1:]))
