"""Finds the fastest settings of a config within the memory of this machine's GPUs.

    python -m tools.tune config/full_qwen3_1.8b_optimal.py --nproc=8 --budget=20m
    python -m tools.tune config/full_qwen3_1.8b_optimal.py --low_precision=fp8_tensorwise --dataset=random

A grid of strategies and micro-batches, each with the least recomputation that fits, and CUDA Graphs for the
best. What gains more than equal runs differ by is kept. At the end the best and the config as it is run three
times each, and config/tuned_NAME.py is written; without these repeats none is. Tokens per iteration stay, and
so does any --key=value of train.py, which goes to all trials.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import signal
import sys
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np

from common.arguments import user_folder, user_path, whole_number
from common.command import run_command
from common.durable_file import write_bytes
from common.errors import UserError
from plots.verdict import compare, deviation
from tools.trials import look_at, run_trial
from training.configuration.files_and_flags import read_settings
from training.configuration.flags import take_flags
from training.configuration.keys import AUTO, KEYS, ROOT, TrainConfig
from training.memory.micro_batch import choose
from training.pretrained.settings import load_run_config

MARK = "# Found by tools.tune"  # how the file begins; another file of this name is not replaced
SHARDING = ("use_zero1", "use_fsdp", "reshard_after_forward")
STRATEGIES = ((), ("use_zero1",), ("use_fsdp",), ("use_fsdp", "reshard_after_forward"))
RECOMPUTATION = ("none", "memory_bound", "attention", "selective", "full")  # from the fastest
TUNED = (*SHARDING, "batch_size", "activation_checkpointing", "use_cuda_graphs", "loss_chunks")
TRIAL_TOKENS = 131_072  # of an iteration on a GPU: enough that the time of the update hardly counts
SHORT = ("--iters=5", "--warmup=2", "--timeout=600")  # unless the user says otherwise
GRAPHED = "--warmup=12"  # iterations 8 and 9 check the capture of a CUDA graph, and the first replays follow
GAIN = 0.005  # of a step, by one run: two equal runs differ by 0.2 to 0.4 % (plots/verdict.py)
REPEATS = 3  # runs of the best and of the config, at the end
FRUGAL_TRIES = 2  # more, with more recomputation, of what fails in spite of the estimate


class Search:
    """The trials of a config, and the best so far, each with numbers in place of 'auto'."""

    def __init__(self, options: argparse.Namespace, flags: list[str], base: TrainConfig):
        self.options, self.flags = options, flags
        self.until = time.monotonic() + options.budget
        self.fixed = {flag.removeprefix("--").partition("=")[0] for flag in flags}
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            self.memory = pool.apply(look_at, (base.device, options.nproc))
        self.best = self.own = choose(base, options.nproc, self.memory)[0]
        self.tokens = self.own.samples_per_iter(options.nproc) * base.block_size  # of an iteration
        self.runs: defaultdict[str, list[dict]] = defaultdict(list)  # bench.throughput's, by words()

    def climb(self) -> None:
        """Raises UserError if nothing ran, or if the budget is over before the repeats."""
        self.measure(self.own)
        one_way = self.options.nproc == 1 or self.fixed & {*SHARDING}
        for strategy in [()] if one_way else STRATEGIES:
            sharding = {} if one_way else {key: key in strategy for key in SHARDING}
            for size in self.sizes():
                if not self.improve(sharding | {"batch_size": size}):
                    break  # more needs more memory
        if not self.rows(self.best):
            machine = f"{self.memory.device} with {self.memory.gib:.1f} GiB"
            raise UserError(f"nothing ran on {machine}; train.py --dry_run=True names settings that fit")
        if "use_cuda_graphs" not in self.fixed and self.own.device == "cuda":
            self.improve({"use_cuda_graphs": True})
        best = self.best
        if best is not self.own and self.rows(self.own):
            for config in [best, self.own] * (REPEATS - 1):
                self.measure(config)
            runs = [self.rows(config) for config in (best, self.own)]
            verdict = compare(*runs)
            real = verdict.low > 0 and min(map(len, runs)) == REPEATS
            self.best = best if real else self.own
            print(f"repeated: {100 * verdict.change:+.1f} %{', kept' * real}", flush=True)

    def sizes(self) -> list[int]:
        """Micro-batches that divide the iteration, about the config's own."""
        own = self.own.micro_batch
        fixed = self.fixed & {"batch_size", "gradient_accumulation_steps"}
        around = [own] if fixed else [own // 4, own // 2, own, 2 * own]
        return [size for size in around if size and own * self.own.micro_steps % size == 0]

    def improve(self, keys: dict[str, Any]) -> bool:
        """Tries the best so far with these keys and the least recomputation that fits by the estimate, then
        more if it fails. Keeps what gains more than equal runs and their rows differ by. Says if one ran.
        loss_chunks is the fewest parts that fit, unless it is stated."""
        keys = {**keys, "tokens_per_iter": self.tokens, "gradient_accumulation_steps": AUTO}
        keys |= {"loss_chunks": self.own.loss_chunks if "loss_chunks" in self.fixed else AUTO}
        own = (self.own.activation_checkpointing,)
        levels = own if "activation_checkpointing" in self.fixed else RECOMPUTATION
        configs = [replace(self.best, **keys | {"activation_checkpointing": level}) for level in levels]
        found = (choose(config, self.options.nproc, self.memory) for config in configs)
        for config in [config for config, micro_batch in found if micro_batch.fits][: 1 + FRUGAL_TRIES]:
            if ran := self.rows(config) or self.measure(config):
                best = self.rows(self.best)
                gain = float(np.median(ran[0]) / np.median(best[0]) - 1) if best else 1.0
                if gain > max(GAIN, *(deviation(rows) for rows in [*ran[:1], *best[:1]])):
                    self.best = config
                return True
        return False

    def measure(self, config: TrainConfig) -> list[np.ndarray]:
        """rows() after one more run. Raises UserError if the budget is used up."""
        if time.monotonic() > self.until:
            raise UserError("the budget ends before the repeats that show a real gain; give more --budget")
        folder = self.options.out_dir / f"trial_{sum(map(len, self.runs.values())) + 1}"
        words = [*SHORT, *self.options.others, *[GRAPHED] * config.use_cuda_graphs, *self.flags]
        run = run_trial([*words, *self.words(config).split()], folder)[0]["runs"][0]
        self.runs[self.words(config)].append(run)
        print(f"{self.about(config)}{run['reason'] or ''}", flush=True)
        return self.rows(config)

    def words(self, config: TrainConfig) -> str:
        """The flags of a trial of this config."""
        steps = max(2, round(TRIAL_TOKENS / (config.micro_batch * config.block_size)))
        keys = {key: getattr(config, key) for key in TUNED} | {"tokens_per_iter": None}
        keys |= {"gradient_accumulation_steps": min(steps, config.micro_steps)}
        return " ".join(f"--{key}={value}" for key, value in keys.items())

    def rows(self, config: TrainConfig, figure: str = "tokens_per_sec") -> list[np.ndarray]:
        """The figure in the rows of each run that succeeded."""
        runs = self.runs[self.words(config)]
        return [np.array(run["measurement"][figure]) for run in runs if not run["reason"]]

    def about(self, config: TrainConfig) -> str:
        """'--batch_size=16: 59,363 tokens/s, MFU 55.12 % (v3), 1 run(s)': what differs from the config."""
        changed = [key for key in TUNED if getattr(config, key) != getattr(self.own, key)]
        name = " ".join(f"--{key}={getattr(config, key)}" for key in changed) or "the config as it is"
        rates, mfus = (self.rows(config, key) for key in ("tokens_per_sec", "mfu_percent"))
        mfu = f"MFU {np.median(mfus):.2f} % (v3), " if np.size(mfus) else ""
        return f"{name}: {np.median(rates) if rates else 0:,.0f} tokens/s, {mfu}{len(rates)} run(s)"

    def config_text(self, command: str, stated: dict[str, Any]) -> str:
        """What the config and the flags state, with what was found."""
        found = {key: getattr(self.best, key) for key in TUNED}
        found = {key: value for key, value in found.items() if key in stated or value != KEYS[key].default}
        found |= {"gradient_accumulation_steps": AUTO, "tokens_per_iter": self.tokens}
        machine = f"{self.options.nproc} x {self.memory.device}, {self.memory.gib:.1f} GiB for each process"
        lines = [f"{MARK} on {time.strftime('%Y-%m-%d')}, {machine}", f"#     {command}"]
        lines += [
            f"# {self.about(self.best)}",
            *(f"{key} = {value!r}" for key, value in (stated | found).items()),
        ]
        return "\n".join([*lines, ""])


def main(argv: list[str]) -> None:
    options, flags = parse(argv)
    stated = [f"--dataset={options.dataset}"] * (options.dataset not in (None, "random"))
    arguments = [options.config, *flags, *stated]
    base = load_run_config(arguments, options.nproc)
    stem = options.config.rpartition("/")[2].removesuffix(".py").removeprefix("tuned_")
    gpus = f"_{options.nproc}gpu" * (options.nproc > 1)
    result = options.write or ROOT / "config" / f"tuned_{stem}{gpus}.py"
    if result.exists() and not result.read_text(encoding="utf-8", errors="replace").startswith(MARK):
        raise UserError(f"{result} was not written by tools.tune; rename it, or name another with --write")
    options.out_dir = options.out_dir or ROOT / "out-tune" / f"{stem}_{time.strftime('%Y%m%d_%H%M%S')}"
    search = Search(options, flags, base)
    try:
        search.climb()
    finally:
        print(f"Best: {search.about(search.best)}", flush=True)
    command = shlex.join(["python", "-m", "tools.tune", *argv])
    write_bytes(result, search.config_text(command, read_settings(arguments).values).encode())
    print(f"Written to {result}", flush=True)


def seconds(text: str) -> float:
    """'90s', '20m' or '2h'."""
    return float(text[:-1]) * 60 ** "smh".index(text[-1:])


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the options, the flags of train.py). Raises UserError."""
    about = f"Each trial gets the other options, of train.py and of bench.throughput ({' '.join(SHORT)})."
    parser = argparse.ArgumentParser("python -m tools.tune", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("config", type=user_path, help="a config file of train.py")
    add("--nproc", type=whole_number(1, 1024), default=1, help="processes, a GPU each (1)")
    add("--budget", type=seconds, default="20m", help="start no trial after this time: 90s, 20m, 2h (20m)")
    add("--dataset", type=user_path, help="instead of the config's own; 'random': trials on random tokens")
    add("--out_dir", type=user_folder, help="a new folder for the trials (default: out-tune/NAME_TIME)")
    add("--write", type=user_folder, help="the file of the result (default: config/tuned_NAME.py)")
    flags, rest = take_flags(argv, ("dataset", "out_dir"))
    options, others = parser.parse_known_args(rest)
    own = {"config": options.config, "nproc": options.nproc, "dataset": options.dataset}
    options.others = [*others, *(f"--{key}={value}" for key, value in own.items() if value)]
    return options, flags


if __name__ == "__main__":
    # SIGTERM is handled as Ctrl-C, which also stops the running trial
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run_command(main, sys.argv[1:]))
