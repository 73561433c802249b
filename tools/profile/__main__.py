"""Shows where the time of an iteration goes, and what lies between the peak and the measured MFU.

    python -m tools.profile config/full_qwen3_1.8b_optimal.py --tokens_per_iter=65536
    python -m tools.profile config/quickstart.py --nproc=2

It trains for a few iterations with the profiler and for as many without, each a run of bench.throughput; any
key of train.py is handed on. The output folder has the table and the waterfall as text and JSON, and the
Chrome traces of every rank, for https://ui.perfetto.dev. docs/profile.md says how to read them.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from common.arguments import user_folder, user_path, whole_number
from common.command import FAILED, run_command, say
from common.durable_file import write_bytes, write_json
from common.errors import RunError
from tools.profile.report import analyze, lines, read_run
from tools.trials import run_trial
from training.configuration.flags import take_flags
from training.configuration.keys import ROOT
from training.pretrained.settings import load_run_config
from training.records.profiler import ITERATIONS

WARMUP = 5  # iterations before those that count without the profiler
TIMEOUT_S = 3600  # of each run


def main(argv: list[str]) -> int:
    options, flags = parse(argv)
    load_run_config([options.config, *flags], options.nproc)  # says what is wrong before anything starts
    started = f"{Path(options.config).stem}_{datetime.datetime.now():%Y%m%d_%H%M%S}"
    folder = (options.output or Path("out-profile") / started).resolve()
    try:
        content = measure(options, flags, folder)
    except RunError as error:
        say(f"error: {error}")
        return FAILED
    content["command"] = shlex.join(["python", "-m", "tools.profile", *argv])
    text = "\n".join(lines(content))
    print(text, flush=True)
    write_json(folder / "profile.json", content)
    write_bytes(folder / "profile.txt", f"{text}\n".encode())
    print(f"Saved in {folder}; the Chrome traces are profiled/runs/*/profile_*.json.gz")
    return 0 if content["profiled"]["adds_up"] else FAILED


def measure(options: argparse.Namespace, flags: list[str], folder: Path) -> dict[str, Any]:
    """The content of profile.json. Raises RunError if a training fails."""
    profiled = train(options, [*flags, "--profile=time"], folder / "profiled")["variant"]
    out_dir = ROOT / profiled["runs"][0]["folder"]
    config = read_run(out_dir)[1]
    same = [f"--batch_size={config.micro_batch}", f"--loss_chunks={config.logit_parts}", "--profile=None"]
    found = train(options, [*flags, *same, *["--roofline"] * options.roofline], folder / "plain")
    not_asked = {"result": None, "runs": [{"reason": "not asked for: --no-roofline"}]}
    roofline = found.get("roofline", not_asked)
    return analyze(out_dir, found["variant"]["result"], roofline["result"], roofline["runs"][0]["reason"])


def train(options: argparse.Namespace, flags: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """{kind: entry of bench.throughput's table}. Raises RunError if train.py fails."""
    print(f"{folder.name}: the run is in {folder}", flush=True)
    own = {"config": options.config, "nproc": options.nproc, "dataset": options.dataset, "timeout": TIMEOUT_S}
    own |= {"warmup": WARMUP, "iters": ITERATIONS - 1 - WARMUP}
    words = [f"--{key}={value}" for key, value in own.items() if value is not None]
    entries = {entry["kind"]: entry for entry in run_trial([*words, *flags], folder)}
    if reason := entries["variant"]["runs"][0]["reason"]:
        raise RunError(f"train.py: {reason}; {folder} has its whole output")
    return entries


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the options, the flags of train.py). Raises UserError."""
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
    flags, rest = take_flags(argv, ("dataset",))
    options, unknown = parser.parse_known_args(rest)
    return options, [*flags, *unknown]


if __name__ == "__main__":
    # SIGTERM is handled as Ctrl-C, which also stops the running process
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run_command(main, sys.argv[1:]))
