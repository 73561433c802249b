"""Finds the fastest settings of a config within the memory of this machine's GPUs.

    python -m tools.tune config/full_qwen3_1.8b_optimal.py --nproc=8 --budget=20m
    python -m tools.tune config/full_qwen3_1.8b_optimal.py --allow=fp8_tensorwise,fp8_tensorwise+head
    python -m tools.tune config/quickstart.py --dry

It climbs from a careful setting to the fastest one, a rung at a time (docs/tuning.md says which), and prints
each trial as it ends. A trial is a short train.py in a fresh process. The tokens per iteration stay those
of the config. The result is config/tuned_NAME.py. A finished trial is kept in the output folder: the same
command goes on from there after any end. Any --key=value of train.py goes to all trials and into the result,
and stays: what it sets is not searched. Ctrl-C stops the search, and the result is the best so far.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
import time
from pathlib import Path

from bench.plan import check_overrides
from bench.process import TIMEOUT_MAX_S, from_root
from bench.random_tokens import make_random_dataset
from common.arguments import real_number, user_folder, user_path, whole_number
from common.command import run_command
from common.durable_file import write_bytes
from common.errors import UserError
from tools.tune import tuned_config
from tools.tune.dimensions import ALLOWABLE
from tools.tune.dry import show_plan
from tools.tune.report import COLUMNS, cells, explanation, head, line, table
from tools.tune.search import GOALS, Ladder
from tools.tune.space import Space, look_at, require_free_gpus
from tools.tune.steps import Step
from tools.tune.trials import Trials
from training.configuration.files_and_flags import read_settings
from training.configuration.flags import take_flags
from training.configuration.keys import ROOT
from training.pretrained.settings import load_run_config
from training.process.run_lock import RunLock, check_writable

OWN_OPTIONS = ("dataset", "out_dir", "gpu")  # of this command; train.py has keys of these names
NPROC_MAX = 1024
MIN_BUDGET_S = 10.0  # the start of one process takes as long
BUDGET_MAX_S = 30 * 24 * 3600.0
UNITS = {"s": 1, "m": 60, "h": 3600}


def main(argv: list[str]) -> int:
    options, overrides = parse(argv)
    check(options, overrides)
    began = time.monotonic()
    arguments = [options.config, *overrides]
    if options.dataset and options.dataset != "random":
        arguments.append(f"--dataset={options.dataset}")
    base = load_run_config(arguments, options.nproc)
    stays = {flag.removeprefix("--").partition("=")[0] for flag in overrides}
    space = Space(base, options.nproc, look_at(base, options.nproc, options.gpu), options.allow, stays)
    print(head(space, options.config, options.budget_text), flush=True)
    if options.dry:
        show_plan(space)
        return 0
    result = options.write or tuned_config.path_for(Path(options.config), options.nproc)
    tuned_config.check_path(result)
    folder = (options.out_dir or ROOT / "out-tune" / Path(options.config).stem).resolve()
    check_writable(folder)
    with RunLock(folder) as lock:
        lock.acquire()
        ladder, interrupted = climb(space, arguments, folder, options)
    text = explanation(ladder)
    minutes = (time.monotonic() - began) / 60
    started = [len(runs) for runs in ladder.runs.values() if runs]
    text.append(f"{len(started)} settings, {sum(started)} runs, in {minutes:.1f} minutes.")
    print("\n".join(["", *text]), flush=True)
    command = shlex.join(["python", "-m", "tools.tune", *argv])
    write_bytes(folder / "ladder.md", ("\n".join([command, "", *table(ladder), "", *text]) + "\n").encode())
    stated = read_settings(arguments).values
    tuned_config.write(result, ladder, stated, command)
    print(f"Written to {from_root(result)}; the trials are in {from_root(folder)}", flush=True)
    if interrupted:
        raise KeyboardInterrupt("the result is the best so far")
    return 0


def climb(
    space: Space, arguments: list[str], folder: Path, options: argparse.Namespace
) -> tuple[Ladder, bool]:
    """(the climb, whether the user stopped it). Raises KeyboardInterrupt if there is no result yet."""
    options.tokens = None
    if options.dataset == "random":
        options.tokens = make_random_dataset(folder, space.base.model_config().vocab_size)
    absolute = [str(Path(arguments[0]).resolve()), *arguments[1:]]  # the trials start in the root
    trials = Trials(space, absolute, folder, options)
    trials.wait_for_orphans()
    if space.base.device == "cuda":
        require_free_gpus(space.processes)
    print(line(COLUMNS), flush=True)

    def report(step: Step) -> None:
        print(line(cells(step, space)), flush=True)

    ladder = Ladder(space, trials.measure, report, options.goal)
    try:
        ladder.climb()
    except UserError:
        if trials.interrupted:
            raise KeyboardInterrupt from None
        raise
    return ladder, trials.interrupted


def check(options: argparse.Namespace, overrides: list[str]) -> None:
    """Raises UserError for a config that is not there, or a flag that trials set themselves."""
    if not Path(options.config).is_file():
        shipped = ", ".join(sorted(f"config/{path.name}" for path in (ROOT / "config").glob("*.py")))
        raise UserError(f"there is no config {options.config!r}; shipped: {shipped}")
    if options.gpu and not options.dry:
        raise UserError("--gpu names a GPU that need not be here, so it belongs to a plan; add --dry")
    check_overrides(overrides, ("dry_run",), "--dry")


def budget_seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh])", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90s, 20m or 2h")
    seconds = float(found[1]) * UNITS[found[2]]
    if not MIN_BUDGET_S <= seconds <= BUDGET_MAX_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not between {MIN_BUDGET_S:g}s, what a trial of a tiny model takes, and 30 days"
        )
    return seconds


def names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m tools.tune",
        description=__doc__.splitlines()[0],
        epilog=f"--allow takes {', '.join(ALLOWABLE)}. --key=value, any key of train.py, goes to all trials.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("config", type=user_path, help="a config file of train.py")
    add("--nproc", type=whole_number(1, NPROC_MAX), default=1, help="processes, a GPU each (1)")
    add("--budget", default="20m", help="start no trial after this time, such as 90s, 20m or 2h (20m)")
    add(
        "--goal", choices=GOALS, default=GOALS[0], help="memory: the least that keeps 95 %% of the best speed"
    )
    add("--allow", type=names, default=(), metavar="A,B", help="what may change losses by more than rounding")
    add("--dry", action="store_true", help="show the plan with the estimated memory, and start nothing")
    add("--gpu", help="of --dry: the GPU that the plan is for, such as H100")
    add("--iters", type=whole_number(1, 10**6), default=5, help="timed iterations of a trial (5)")
    add("--warmup", type=whole_number(1, 10**6), default=2, help="iterations before them (2)")
    add("--timeout", type=real_number(1, TIMEOUT_MAX_S), default=600, help="seconds for one trial (600)")
    add("--dataset", type=user_path, help="instead of the config's own; 'random': trials on random tokens")
    add("--out_dir", type=user_folder, help="the folder of the trials (default: out-tune/NAME)")
    add("--write", type=user_folder, help="the file of the result (default: config/tuned_NAME.py)")
    flags, rest = take_flags(argv, OWN_OPTIONS)
    options, unknown = parser.parse_known_args(rest)
    options.budget_text = options.budget
    try:
        options.budget = budget_seconds(options.budget)
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument --budget: {error}")
    return options, [*flags, *unknown]


if __name__ == "__main__":
    # SIGTERM is handled as Ctrl-C, which also stops the running trial
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run_command(main, sys.argv[1:]))
