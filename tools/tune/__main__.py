"""Finds the fastest settings of a config within the memory of this machine's GPUs.

    python -m tools.tune config/full_qwen3_1.8b_optimal.py --nproc=8 --budget=20m
    python -m tools.tune config/full_qwen3_1.8b_optimal.py --low_precision=fp8_tensorwise --dataset=random

It climbs from a careful setting to the fastest one (docs/tuning.md says how) and prints each trial as it
ends. A trial is a short train.py in a fresh process. The tokens per iteration stay those of the config. The
result is config/tuned_NAME.py. Any --key=value of train.py goes to all trials and into the result, and stays:
what it sets is not searched. Without the repeats at the end, as after Ctrl-C, no config is written.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shlex
import signal
import statistics
import sys
import textwrap
from pathlib import Path

import model_builder
from bench.plan import check_overrides
from bench.process import TIMEOUT_MAX_S, from_root
from bench.random_tokens import make_random_dataset
from bench.table import new_folder
from common.arguments import real_number, user_folder, user_path, whole_number
from common.command import run_command
from common.durable_file import write_bytes
from common.errors import UserError
from tools.tune.ladder import Ladder, Step, speed
from tools.tune.settings import Setting, Settings, look_at
from tools.tune.trials import Trials
from training.configuration.files_and_flags import read_settings
from training.configuration.flags import take_flags
from training.configuration.keys import AUTO, KEYS, ROOT
from training.pretrained.settings import load_run_config
from training.process.run_lock import check_writable

MARK = "# Found by tools.tune"  # how the file begins; another file of this name is not replaced
UNITS = {"s": 1, "m": 60, "h": 3600}


def main(argv: list[str]) -> int:
    options, overrides = parse(argv)
    arguments = [options.config, *overrides]
    if options.dataset and options.dataset != "random":
        arguments.append(f"--dataset={options.dataset}")
    base = load_run_config(arguments, options.nproc)
    fixed = {flag.removeprefix("--").partition("=")[0] for flag in overrides}
    settings = Settings(base, options.nproc, look_at(base, options.nproc), fixed)
    name = Path(options.config).stem
    several = f"_{options.nproc}gpu" if options.nproc > 1 else ""
    result = options.write or ROOT / "config" / f"tuned_{name.removeprefix('tuned_')}{several}.py"
    if result.exists() and not result.read_text(encoding="utf-8", errors="replace").startswith(MARK):
        raise UserError(f"{result} was not written by tools.tune; rename it, or name another with --write")
    check_writable(result.parent)
    folder = new_folder(options.out_dir, name, str(ROOT / "out-tune"), "--out_dir")
    trial = [str(Path(options.config).resolve()), *arguments[1:]]  # the trials start in the root
    if options.dataset == "random":
        trial.append(f"--dataset={make_random_dataset(folder, base.model_config().vocab_size)}")
    print(f"{settings.tokens:,} tokens per iteration; GiB are those that torch gave out", flush=True)
    measure = Trials(settings, trial, folder, options).measure
    ladder = Ladder(settings, measure, lambda step: print(line(step, settings), flush=True))
    ladder.climb()
    command = shlex.join(["python", "-m", "tools.tune", *argv])
    print(summary(ladder), flush=True)
    if not ladder.finished:
        why = KeyboardInterrupt if ladder.interrupted else UserError
        raise why("no config was written: the repeats are missing that show a real gain")
    write_bytes(result, config_text(ladder, command, read_settings(arguments).values).encode())
    print(f"Written to {from_root(result)}", flush=True)
    return 0


def line(step: Step, settings: Settings) -> str:
    """'micro-batch   16 x 2048, recomputation none ...   59,363 tokens/s   95.7 GiB   +1.2 %   kept'."""
    run = step.run if step.run and not step.run["reason"] else None
    memory = run["measurement"]["max_allocated_gb"] if run else None
    cells = [
        f"{step.rung:<11}",
        f"{settings.name(step.setting):<60}",
        f"{speed(run):>11,.0f} tokens/s" if run else f"{'':20}",
        f"{settings.needed(step.setting):6.1f} est." if memory is None else f"{memory:6.1f} GiB ",
        f"{'':8}" if step.gain is None else f"{100 * step.gain:+6.1f} %",
        "kept" if step.kept else "    ",
        step.note,
    ]
    return "  ".join(cells).rstrip()


def summary(ladder: Ladder) -> str:
    runs = ladder.results(ladder.best)
    mfus = [value for run in runs for value in run["measurement"]["mfu_percent"]]
    mfu = f", MFU {statistics.median(mfus):.2f} % ({model_builder.CALCULATION_METHOD})" if mfus else ""
    text = f"Best: {ladder.settings.name(ladder.best)}: {statistics.median(map(speed, runs)):,.0f} tokens/s"
    text += f"{mfu}, {len(runs)} run{'s' * (len(runs) > 1)}."
    if ladder.best == ladder.settings.as_it_is:
        text += " That is the config as it is."
    if not ladder.finished:
        text += " The time was over before the last rung; a larger --budget tries the others."
    return text


def config_text(ladder: Ladder, command: str, stated: Setting) -> str:
    """The config that is written: what the config and the flags state, with the tuned keys. One of these that
    was not stated and has its default value is left out."""
    settings, best = ladder.settings, ladder.best
    about = (
        f"{settings.processes} x {settings.memory.device}, {settings.memory.gib:.1f} GiB for each process. "
    )
    about += f"Measured {datetime.date.today()}. {summary(ladder)}"
    tuned = {key: value for key, value in best.items() if key in stated or value != KEYS[key].default}
    tuned |= {"batch_size": best["batch_size"], "gradient_accumulation_steps": AUTO}
    tuned |= {"tokens_per_iter": settings.tokens}
    values = [f"{key} = {value!r}" for key, value in (stated | tuned).items()]
    header = [f"{MARK}:", f"#     {command}", *(f"# {part}" for part in textwrap.wrap(about, 108))]
    return "\n".join([*header, *values, ""])


# --- options ---


def seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,7}(?:\.\d+)?)([smh])", text.strip())
    if not found or float(found[1]) * UNITS[found[2]] < 10:
        raise argparse.ArgumentTypeError(f"{text!r} is no time of 10s or more, such as 90s, 20m or 2h")
    return float(found[1]) * UNITS[found[2]]


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the options, the flags of train.py). Raises UserError."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.tune",
        description=__doc__.splitlines()[0],
        epilog="--key=value, any key of train.py, goes to all trials, and stays.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("config", type=user_path, help="a config file of train.py")
    add("--nproc", type=whole_number(1, 1024), default=1, help="processes, a GPU each (1)")
    add("--budget", type=seconds, default="20m", help="start no trial after this time: 90s, 20m, 2h (20m)")
    add("--iters", type=whole_number(1, 10**6), default=5, help="timed iterations of a trial (5)")
    add("--warmup", type=whole_number(1, 10**6), default=2, help="iterations before them (2)")
    add("--timeout", type=real_number(1, TIMEOUT_MAX_S), default=600, help="seconds for one trial (600)")
    add("--dataset", type=user_path, help="instead of the config's own; 'random': trials on random tokens")
    add("--out_dir", type=user_folder, help="a new folder for the trials (default: out-tune/NAME_TIME)")
    add("--write", type=user_folder, help="the file of the result (default: config/tuned_NAME.py)")
    flags, rest = take_flags(argv, ("dataset", "out_dir"))
    options, unknown = parser.parse_known_args(rest)
    check_overrides([*flags, *unknown])
    return options, [*flags, *unknown]


if __name__ == "__main__":
    # SIGTERM is handled as Ctrl-C, which also stops the running trial
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run_command(main, sys.argv[1:]))
