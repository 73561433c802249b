"""Runs the reference experiment: how soon AdamW and Muon, in bf16 and in fp8, reach the same held-out loss.

    python -m bench.time_to_loss
    python -m bench.time_to_loss --parallel=2 --time_limit=9
    python -m bench.time_to_loss --dataset=my_corpus --grid='adamw=1e-3;muon=4e-3' --seeds=1

First, short runs choose each optimizer's learning rate: the grid grows by factors of two until the best is
inside. Then each variant trains once with each seed. Every run is a real train.py; its record stays in the
output folder, and a finished run is not run again: the same command continues after any end.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import queue
import signal
import subprocess
import sys
import time
from collections import deque
from concurrent import futures
from pathlib import Path

import torch

from bench import plan
from bench.process import TIMEOUT_MAX_S, end_with_status, from_root
from bench.runner import claim, kept, run_and_keep
from bench.suites import Variant
from bench.table import about_this, open_folder, result_line, save_table
from bench.throughput import ITERS_MAX, dataset_chooser, names, seed_numbers
from bench.time_to_loss_table import BASELINE, Run, document_lines, table_rows
from common.arguments import real_number, user_path, whole_number
from common.errors import UserError
from data.folders import DATA_DIR
from training.batches.sources import make_windows, open_sources
from training.configuration.flags import take_flags
from training.configuration.keys import AUTO, ROOT
from training.pretrained.settings import load_run_config

CONFIG, FINEWEB = str(ROOT / "config/speedrun_124m.py"), "fineweb10b"
GRIDS = {BASELINE: (2.5e-4, 5e-4, 1e-3, 2e-3), "muon": (2e-3, 4e-3, 8e-3)}
RATES_MAX = 12  # of one optimizer
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
OTHERS = (*plan.RESERVED, *KEYS[BASELINE], "learning_rate", "seed", "warmup_iters", "lr_decay_iters")
INSTEAD = "--variants, --grid, --seeds, --iters, --dataset, --config or --output"


def main(argv: list[str]) -> int:
    arguments, overrides = parse(argv)
    plan.check_overrides(overrides, OTHERS, INSTEAD)
    if {*arguments.variants} - {*KEYS} or BASELINE not in arguments.variants:
        known = ", ".join(KEYS)
        raise UserError(f"--variants must name some of {known}, and {BASELINE}: the target is its loss")
    experiment = Experiment(arguments, overrides, about_this("bench.time_to_loss", argv))
    folder = open_folder(experiment.folder)
    with claim(folder / "lock") as ours:
        if not ours:
            raise UserError(f"another process is at work in {folder}; choose another --output")
        left = experiment.work()
        lines = experiment.save()
    print("\n".join(["", *lines, "", f"Saved in {folder}"]), flush=True)
    records = folder / "runs" / "*seed*" / "run_*.json"
    print(f"Curves: python plots/compare_runs.py '{records}' --x time", flush=True)
    if left:
        minutes = sum(map(experiment.seconds, left)) / arguments.parallel / 60
        again = f"{len(left)} or more runs are left, about {minutes:.0f} minutes; the same command continues"
        print(f"--time_limit={arguments.time_limit:g}: {again}", flush=True)
    return 1 if any(run.reason for run in experiment.runs.values()) else 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.time_to_loss",
        description=__doc__.splitlines()[0],
        epilog="--key=value, any setting of train.py, goes to all runs.",
        allow_abbrev=False,
    )
    add, count = parser.add_argument, whole_number(1, 64)
    add("--variants", type=names, default=list(KEYS), metavar="A,B", help=", ".join(KEYS))
    add("--seeds", type=seed_numbers, default=(1, 2, 3), metavar="A,B", help="of each variant (1,2,3)")
    add("--grid", type=grids, default=GRIDS, help="'adamw=5e-4,1e-3;muon=4e-3': one rate is taken as it is")
    add("--iters", type=whole_number(SHORT, ITERS_MAX), help="of a full run (the config's)")
    add("--config", type=user_path, default=CONFIG, help="the model (config/speedrun_124m.py)")
    add("--dataset", type=user_path, default=AUTO, help=f"a text in GPT-2's tokens (data/{FINEWEB})")
    add("--parallel", type=count, default=1, metavar="N", help="runs at a time, each on a GPU (1)")
    limit, minutes = real_number(0, TIMEOUT_MAX_S), "begin no run that would end after so many minutes"
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


def chosen_gpus(count: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each of `count` runs at a time; None leaves it as it is."""
    if 0 < (there := torch.cuda.device_count()) < count:
        raise UserError(f"--parallel={count}: this machine has {there} GPUs")
    visible = os.environ.get(CHOICE) or ",".join(map(str, range(count)))
    return [None] if count == 1 else [*visible.split(",")[:count]]


# --- what is run ---


class Experiment:
    """The runs that are known to be needed, with what the folder has of them."""

    def __init__(self, arguments: argparse.Namespace, overrides: list[str], content: dict):
        self.arguments, self.overrides, self.content = arguments, overrides, content
        self.deadline = time.monotonic() + 60 * arguments.time_limit
        self.gpus: queue.Queue[str | None] = queue.Queue()  # those that have no run
        for gpu in chosen_gpus(arguments.parallel):
            self.gpus.put(gpu)
        self.processes: list[subprocess.Popen] = []
        self.folder = Path(arguments.output).resolve()
        self.config_path = from_root(Path(arguments.config))
        self.config = load_run_config([str(ROOT / self.config_path), *overrides])
        self.iters = arguments.iters or self.config.max_iters
        self.dataset = self._dataset()
        self.runs: dict[str, Run] = {}
        # by the arguments of train.py
        self.kept = {tuple(entry.argv): (entry, at) for entry, at in kept(self.folder) if entry.result}

    def _dataset(self) -> str:
        asked, config = self.arguments.dataset, self.config
        if asked == AUTO and not (DATA_DIR / FINEWEB / "meta.json").is_file():
            raise UserError(NO_FINEWEB)
        choose = dataset_chooser(FINEWEB if asked == AUTO else asked, self.folder)
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

    def run(self, variant: str, rate: float, seed: int | None = None) -> Run:
        """A full run, or without a seed one that helps to choose a rate; with results, if there are any."""
        name = f"{variant} {rate:g}" if seed is None else f"{variant} seed {seed}"
        if name not in self.runs:
            iters = self.iters if seed is not None else self.iters // SHORT
            steps = [n for n in range(max(1, iters // EVALUATIONS), iters + 1) if iters % n == 0]
            keys = {**KEYS[variant], "learning_rate": rate, "seed": 1 if seed is None else seed}
            keys |= {"max_iters": iters, "lr_decay_iters": iters}
            keys["warmup_iters"] = min(self.config.warmup_iters or 0, iters // 4)
            (entry,) = plan.make_plan(
                (Variant(name, self.config_path, keys),),
                self.overrides,
                lambda config: self.dataset,
                torch.cuda.device_count(),
                keys={**plan.FIXED, "eval_interval": iters if seed is None else steps[0]},
            )
            self.runs[name] = Run(variant, rate, seed, *self.kept.get(tuple(entry.argv), (entry, None)))
        return self.runs[name]

    def rates(self, variant: str) -> list[Run]:
        """The short runs for its optimizer, as far as results ask for them; none if its rate is given."""
        optimizer = KEYS[variant]["optimizer"]
        rates = self.arguments.grid[optimizer]
        runs = [self.run(optimizer, rate) for rate in rates if len(rates) > 1]
        while len(runs) < RATES_MAX and (more := beyond({run.rate: run.loss for run in runs})):
            runs.append(self.run(optimizer, more))
        return sorted(runs, key=lambda run: run.rate)

    def short(self) -> list[Run]:
        return list(dict.fromkeys(run for name in self.arguments.variants for run in self.rates(name)))

    def full(self) -> list[Run]:
        """None before the rates are known. By seeds, so that a machine that becomes warm slows all alike;
        each seed begins with another variant, so that each of two GPUs gets all of them."""
        best: dict[str, float] = {}
        if any(run.loss is None for run in self.short()):
            return []
        for name in self.arguments.variants:
            tried = self.rates(name)
            rates = {run.loss or 0: run.rate for run in tried if run.entry.result}
            if rates or not tried:  # else no run succeeded
                best[name] = rates[min(rates)] if tried else self.arguments.grid[KEYS[name]["optimizer"]][0]
        found, order = [], deque(best)
        for seed in self.arguments.seeds:
            found += [self.run(name, best[name], seed) for name in order]
            order.rotate(-1)
        return found

    def seconds(self, run: Run) -> float:
        """About how long it will take: as the longest of its kind did."""
        done = [other for other in list(self.runs.values()) if other.entry.result]
        alike = [other for other in done if (other.seed is None) == (run.seed is None)]
        longest = max((other.entry.runs[-1]["seconds"] for other in alike or done), default=0)
        return longest if alike else SHORT * longest

    def work(self) -> list[Run]:
        """Runs what is needed, one run at a time on each GPU; returns what is left at the deadline."""
        tried: list[Run] = []
        with futures.ThreadPoolExecutor(self.arguments.parallel) as pool:
            try:
                while needed := [run for run in [*self.short(), *self.full()] if run.loss is None]:
                    if {*needed} & {*tried}:
                        return needed
                    tried += needed
                    for done in futures.as_completed([pool.submit(self.perform, run) for run in needed]):
                        done.result()
                        self.save()  # so that an interrupted experiment leaves its results
            except BaseException:
                self.deadline = -math.inf  # no other run begins
                for process in self.processes:
                    process.terminate()
                raise
        return []

    def perform(self, run: Run) -> None:
        """In a thread: one run on a free GPU, unless it would end after the deadline."""
        gpu = self.gpus.get()
        try:
            if time.monotonic() + self.seconds(run) > self.deadline:
                return
            print(f"{run.entry.name}: started" + f" on GPU {gpu}" * bool(gpu), flush=True)
            entry, variables = dataclasses.replace(run.entry, runs=[]), {CHOICE: gpu} if gpu else {}
            options = {"started": self.processes.append, "variables": variables}
            run.out_dir = run_and_keep(entry, self.folder, self.arguments, **options)
            run.entry = entry  # the run is done
        finally:
            self.gpus.put(gpu)
        loss = f"held-out loss {run.loss:.4f}, " * bool(entry.result)
        print(f"{entry.name}: {loss}{result_line(entry)}", flush=True)

    def save(self) -> list[str]:
        """Writes results.json with everything and table.md, whose lines it returns."""
        short, full = self.short(), self.full()
        rows = table_rows(self.arguments.variants, full)
        lines = document_lines(self.content, rows, short, full)
        runs = [dataclasses.asdict(run) | {"out_dir": str(run.out_dir)} for run in [*short, *full]]
        save_table(self.folder, {**self.content, "rows": rows, "runs": runs}, lines, "results.json")
        return lines


def beyond(losses: dict[float, float | None]) -> float | None:
    """The next learning rate: beyond that at the edge of the grid, if it is the best. None if the best is
    inside or not known, and if no run succeeded."""
    known = {rate: loss for rate, loss in losses.items() if loss is not None}
    best = min(known, key=lambda rate: known[rate], default=0.0)
    if len(known) < len(losses) or known.get(best, math.inf) == math.inf:
        return None
    return {min(known): best / 2, max(known): best * 2}.get(best)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the running processes, too
    sys.exit(end_with_status(main, sys.argv[1:]))
