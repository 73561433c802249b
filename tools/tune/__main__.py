"""Finds the fastest settings of a config within the memory of this machine's GPUs.

    python -m tools.tune config/full_qwen3_1.8b_optimal.py --nproc=8 --budget=20m
    python -m tools.tune config/full_qwen3_1.8b_optimal.py --low_precision=fp8_tensorwise --dataset=random

It climbs from a careful setting to the fastest one (docs/tuning.md says how) and prints each trial as it
ends. A trial is a short train.py in a fresh process. The tokens per iteration stay those of the config. The
result is config/tuned_NAME.py. Any --key=value of train.py goes to all trials and into the result, and stays:
what it sets is not searched. Ctrl-C stops the search, and the result is the best so far.
"""

from __future__ import annotations

import argparse
import datetime
import json
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
from bench.table import open_folder
from common.arguments import real_number, user_folder, user_path, whole_number
from common.command import run_command
from common.durable_file import write_bytes
from common.errors import UserError
from tools.tune.ladder import Ladder, Step
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
    several = f"_{options.nproc}gpu" if options.nproc > 1 else ""
    name = Path(options.config).stem
    result = options.write or ROOT / "config" / f"tuned_{name.removeprefix('tuned_')}{several}.py"
    if result.exists() and not result.read_text(encoding="utf-8", errors="replace").startswith(MARK):
        raise UserError(
            f"{result} was not written by tools.tune; rename it, or name another file with --write"
        )
    check_writable(result.parent)
    started = f"{datetime.datetime.now():%Y%m%d_%H%M%S}"
    folder = open_folder((options.out_dir or ROOT / "out-tune" / f"{name}_{started}").resolve())
    if any((folder / "runs").iterdir()):
        raise UserError(f"{folder} has the trials of a search, which may still run; choose another --out_dir")
    options.tokens = None
    if options.dataset == "random":
        options.tokens = make_random_dataset(folder, base.model_config().vocab_size)
    absolute = [str(Path(options.config).resolve()), *arguments[1:]]  # the trials start in the root
    trials = Trials(settings, absolute, folder, options)
    print(f"{settings.tokens:,} tokens per iteration; GiB are those that torch gave out", flush=True)
    ladder = Ladder(settings, trials.measure, lambda step: print(line(step, settings), flush=True))
    try:
        ladder.climb()
    except UserError:
        if trials.interrupted:
            raise KeyboardInterrupt from None
        raise
    command = shlex.join(["python", "-m", "tools.tune", *argv])
    stated = read_settings(arguments).values
    write_bytes(result, "\n".join([*header(ladder, command), *assignments(ladder, stated), ""]).encode())
    print("\n".join([*summary(ladder), f"Written to {from_root(result)}"]), flush=True)
    if trials.interrupted:
        raise KeyboardInterrupt("the result is the best so far")
    return 0


def line(step: Step, settings: Settings) -> str:
    """'micro-batch   16 x 2048, recomputation none ...   59,363 tokens/s   95.7 GiB   +1.2 %   kept'."""
    result = step.result if step.result and not step.result.reason else None
    cells = [f"{step.rung:<11}", f"{settings.name(step.setting):<60}"]
    cells.append(f"{result.speed:>11,.0f} tokens/s" if result else f"{'':20}")
    memory = result.memory_gib if result and result.memory_gib is not None else None
    cells.append(f"{settings.needed(step.setting):6.1f} est." if memory is None else f"{memory:6.1f} GiB ")
    cells.append(f"{100 * step.gain:+6.1f} %" if step.gain is not None else f"{'':8}")
    return "  ".join([*cells, "kept" if step.kept else "    ", step.note]).rstrip()


def summary(ladder: Ladder) -> list[str]:
    results = ladder.results(ladder.best)
    speed = statistics.median(result.speed for result in results)
    mfus = [result.mfu_percent for result in results if result.mfu_percent is not None]
    mfu = f", MFU {statistics.median(mfus):.2f} % ({model_builder.CALCULATION_METHOD})" if mfus else ""
    runs = f"{len(results)} run{'s' * (len(results) > 1)}"
    lines = [f"Best: {ladder.settings.name(ladder.best)}: {speed:,.0f} tokens/s{mfu}, {runs}"]
    if ladder.best == ladder.settings.as_it_is:
        lines.append("That is the config as it is.")
    if not ladder.finished:
        lines.append("The time was over before the last rung; a larger --budget tries the others.")
    return lines


# --- the config that is written ---


def header(ladder: Ladder, command: str) -> list[str]:
    memory = ladder.settings.memory
    text = f"{ladder.settings.processes} x {memory.device}, {memory.gib:.1f} GiB for each process. "
    text += f"Measured {datetime.date.today()}. {' '.join(summary(ladder))}"
    return [f"{MARK}:", f"#     {command}", *(f"# {part}" for part in textwrap.wrap(text, 108))]


def assignments(ladder: Ladder, stated: Setting) -> list[str]:
    """The tuned keys, then what else the config and the flags state. A tuned key that was not stated and has
    its default value is left out."""
    best = ladder.best
    tuned: Setting = {"batch_size": best["batch_size"], "gradient_accumulation_steps": AUTO}
    tuned["tokens_per_iter"] = ladder.settings.tokens
    if stated.get("eval_batch_size") is None:
        tuned["eval_batch_size"] = ladder.settings.eval_batch
    tuned |= {key: value for key, value in best.items() if key in stated or value != KEYS[key].default}
    rest = {key: value for key, value in stated.items() if key not in tuned and key not in best}
    lines = [f"{key} = {literal(value)}" for key, value in tuned.items()]
    return [*lines, "", "# as in the config", *(f"{key} = {literal(value)}" for key, value in rest.items())]


def literal(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


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
