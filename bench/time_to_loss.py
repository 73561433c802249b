"""Runs the reference experiment: how soon AdamW and Muon, in bf16 and in fp8, reach the same held-out loss.

    python -m bench.time_to_loss
    python -m bench.time_to_loss --parallel=2 --time_limit=9
    python -m bench.time_to_loss --dataset=my_corpus --grid='adamw=1e-3;muon=4e-3' --seeds=1

First, short runs choose each optimizer's learning rate from a grid. Then each variant trains once with each
seed. Every run is a real train.py; its record stays in the output folder, and a finished run is not run
again: the same command continues after any end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch

from bench import plan
from bench.plan import Entry
from bench.process import TIMEOUT_MAX_S, end_with_status, from_root, stop
from bench.runner import restore, work
from bench.suites import Variant
from bench.table import about_this, open_folder, save_table
from bench.throughput import ITERS_MAX, dataset_chooser, names, seed_numbers
from bench.time_to_loss_table import BASELINE, document_lines, loss, table_rows
from common.arguments import real_number, user_path, whole_number
from common.errors import UserError
from data.folders import DATA_DIR
from training.batches.sources import make_windows, open_sources
from training.configuration.flags import take_flags
from training.configuration.keys import AUTO, ROOT
from training.pretrained.settings import load_run_config

CONFIG, FINEWEB = str(ROOT / "config/speedrun_124m.py"), "fineweb10b"
GRIDS: dict[str, tuple[float, ...]] = {BASELINE: (2.5e-4, 5e-4, 1e-3, 2e-3)}
GRIDS |= {"muon": (2e-3, 4e-3, 8e-3, 1.6e-2)}
KEYS: dict[str, dict[str, str]] = {
    name + suffix: {"optimizer": name, "low_precision": recipe}
    for suffix, recipe in (("", "none"), ("-fp8", "fp8_tensorwise"))
    for name in GRIDS
}
NO_FINEWEB = (
    f"there is no data/{FINEWEB}; make it with: hf download HuggingFaceFW/fineweb --repo-type dataset "
    "--include sample/10BT/000_00000.parquet --local-dir fineweb && python data/text/prepare.py --input "
    f"fineweb --tokenizer gpt2 --val_fraction 0.002 --output data/{FINEWEB}; or name your own text with "
    "--dataset (docs/own_text.md)"
)
SHORT = 4  # a run that helps to choose a rate has a quarter of the iterations
EVALUATIONS = 16  # of a full run, for its curve
CHOICE = "CUDA_VISIBLE_DEVICES"
WAIT_S = 1.0  # between two looks at what another process runs
OTHERS = (*plan.RESERVED, *KEYS[BASELINE], "learning_rate", "seed", "warmup_iters", "lr_decay_iters")
INSTEAD = "--variants, --grid, --seeds, --iters, --dataset, --config or --output"


def main(argv: list[str]) -> int:
    options, overrides = parse(argv)
    plan.check_overrides(overrides, OTHERS, INSTEAD)
    if {*options.variants} - {*KEYS} or BASELINE not in options.variants:
        known = ", ".join(KEYS)
        raise UserError(f"--variants must name some of {known}, and {BASELINE}: the target is its loss")
    experiment = Experiment(options, overrides, about_this("bench.time_to_loss", argv))
    with helpers(options.parallel, argv):
        experiment.run()
    if not options.parallel:  # it is a helper
        return 0
    print("\n".join(["", *experiment.save(), "", f"Saved in {experiment.folder}"]), flush=True)
    records = experiment.folder / "runs" / "*seed*" / "run_*.json"
    print(f"Curves: python plots/compare_runs.py '{records}' --x time", flush=True)
    if not experiment.is_done:
        print(f"--time_limit={options.time_limit:g}: runs are left; the same command continues", flush=True)
    return 1 if any(run.failures for run in experiment.runs) else 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.time_to_loss",
        description=__doc__.splitlines()[0],
        epilog="--key=value, any setting of train.py, goes to all runs.",
        allow_abbrev=False,
    )
    add, limit = parser.add_argument, real_number(0, TIMEOUT_MAX_S)
    add("--variants", type=names, default=list(KEYS), metavar="A,B", help=", ".join(KEYS))
    add("--seeds", type=seed_numbers, default=(1, 2, 3), metavar="A,B", help="of each variant (1,2,3)")
    add("--grid", type=grids, default=GRIDS, help="'adamw=5e-4,1e-3;muon=4e-3': one rate is taken as it is")
    add("--iters", type=whole_number(SHORT, ITERS_MAX), help="of a full run (the config's)")
    add("--config", type=user_path, default=CONFIG, help="the model (config/speedrun_124m.py)")
    add("--dataset", type=user_path, default=AUTO, help=f"a text in GPT-2's tokens (data/{FINEWEB})")
    several = "runs at a time, each on a GPU (1); 0: as a helper of another process"
    add("--parallel", type=whole_number(0, 64), default=1, metavar="N", help=several)
    minutes = "begin no run after so many minutes"
    add("--time_limit", "--time-limit", type=limit, default=math.inf, metavar="M", help=minutes)
    add("--timeout", type=limit, default=7200, help="seconds for one run (7200)")
    add("--output", type=user_path, default="out-bench/time_to_loss", help="the folder of all results")
    # no figure includes compilation; tokens/s and milliseconds are medians
    parser.set_defaults(keep_cache=True, warmup=0)
    flags, rest = take_flags(argv, plan.OWN_OPTIONS)
    options, unknown = parser.parse_known_args(rest)
    return options, flags + unknown


def grids(text: str) -> dict[str, tuple[float, ...]]:
    found = dict(GRIDS)
    for name, _, rates in (part.strip().partition("=") for part in text.split(";")):
        if name not in GRIDS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(GRIDS)}")
        found[name] = tuple(sorted({real_number(0, 1)(rate) for rate in rates.split(",")}))
    return found


@contextlib.contextmanager
def helpers(count: int, argv: list[str]) -> Iterator[None]:
    """The same command once more for each further GPU, which all divide the runs; this process has the first
    GPU. Waits for them at the end."""
    if count < 2:
        yield
        return
    if 0 < (there := torch.cuda.device_count()) < count:
        raise UserError(f"--parallel={count}: this machine has {there} GPUs")
    first, *others = (os.environ.get(CHOICE) or ",".join(map(str, range(count)))).split(",")[:count]
    command = [sys.executable, "-m", "bench.time_to_loss", *argv, "--parallel=0"]
    started = [subprocess.Popen(command, env={**os.environ, CHOICE: gpu}) for gpu in others]
    os.environ[CHOICE] = first
    try:
        yield
        for process in started:
            process.wait()
    finally:
        for process in started:
            stop(process)


# --- what is run ---


class Experiment:
    """The runs that are known to be needed, with what the folder has of them: short ones, then full ones."""

    def __init__(self, options: argparse.Namespace, overrides: list[str], content: dict):
        self.options, self.overrides, self.content = options, overrides, content
        self.deadline = time.monotonic() + 60 * options.time_limit
        self.config_path = from_root(Path(options.config))
        self.config = load_run_config([str(ROOT / self.config_path), *overrides])
        self.iters = options.iters or self.config.max_iters
        self.dataset = self._dataset()
        self.folder = open_folder(options.output)
        self.runs: list[Entry] = []
        self.is_done = False

    def _dataset(self) -> str:
        asked, config = self.options.dataset, self.config
        if asked == AUTO and not (DATA_DIR / FINEWEB / "meta.json").is_file():
            raise UserError(NO_FINEWEB)
        choose = dataset_chooser(FINEWEB if asked == AUTO else asked, Path(self.options.output))
        assert choose
        config = dataclasses.replace(config, dataset=str(choose(config)))
        there = make_windows(open_sources(config, scan=False), config)["train"].count * config.block_size
        auto = AUTO in (config.batch_size, config.gradient_accumulation_steps)
        tokens = config.tokens_per_iter if auto else config.samples_per_iter(1) * config.block_size
        if tokens and self.iters * tokens > there:
            raise UserError(
                f"{self.iters} iterations of {tokens:,} tokens are more than one epoch of {config.dataset}, "
                f"{there:,} tokens; take more text, or lower --iters"
            )
        return config.dataset

    def entry(self, variant: str, rate: float, seed: int | None = None) -> Entry:
        """A full run, or without a seed one that helps to choose a rate."""
        iters = self.iters if seed is not None else self.iters // SHORT
        steps = [n for n in range(max(1, iters // EVALUATIONS), iters + 1) if iters % n == 0]
        keys = {**KEYS[variant], "learning_rate": rate, "seed": 1 if seed is None else seed}
        keys |= {"max_iters": iters, "lr_decay_iters": iters}
        keys["warmup_iters"] = min(self.config.warmup_iters or 0, iters // 4)
        name = f"{variant} {rate:g}" if seed is None else f"{variant} seed {seed}"
        (entry,) = plan.make_plan(
            (Variant(name, self.config_path, keys),),
            self.overrides,
            lambda config: self.dataset,
            torch.cuda.device_count(),
            keys={**plan.FIXED, "eval_interval": iters if seed is None else steps[0]},
        )
        entry.about = {"variant": variant, "rate": rate, "seed": seed}
        return entry

    def run(self) -> None:
        """Full runs are by seeds, so that a machine that becomes warm slows all alike; each seed begins with
        another variant, so that each of two GPUs gets all of them."""
        grid, best = self.options.grid, {}
        optimizers = dict.fromkeys(KEYS[name]["optimizer"] for name in self.options.variants)
        searched = [name for name in optimizers if len(grid[name]) > 1]
        if not self._complete([self.entry(name, rate) for name in searched for rate in grid[name]]):
            return
        for name in optimizers:
            tried = [run for run in self.runs if run.about["variant"] == name and run.result]
            if tried or name not in searched:  # else no run succeeded
                lowest = min(tried, key=lambda run: loss(run) or 0.0, default=None)
                best[name] = lowest.about["rate"] if lowest else grid[name][0]
        order = deque(name for name in self.options.variants if KEYS[name]["optimizer"] in best)
        full = []
        for seed in self.options.seeds:
            full += [self.entry(name, best[KEYS[name]["optimizer"]], seed) for name in order]
            order.rotate(-1)
        self.is_done = self._complete(full)

    def _complete(self, runs: list[Entry]) -> bool:
        """Runs these, or waits for other processes that do; False if some are left at the deadline."""
        self.runs += runs
        restore(runs, self.folder)
        while waiting := [run for run in runs if not run.runs]:
            for run in waiting:
                if time.monotonic() > self.deadline:
                    return False
                work([run], self.folder, self.options, self.save)
            time.sleep(WAIT_S * (waiting == [run for run in runs if not run.runs]))
        return True

    def save(self) -> list[str]:
        """Writes results.json with everything and table.md, whose lines it returns."""
        rows = table_rows(self.options.variants, [run for run in self.runs if run.about["seed"] is not None])
        content = {**self.content, "rows": rows, "runs": list(map(dataclasses.asdict, self.runs))}
        return save_table(self.folder, content, document_lines(self.content, rows, self.runs), "results.json")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the running processes, too
    sys.exit(end_with_status(main, sys.argv[1:]))
