"""Finds the fastest settings of a config within the memory of this machine's GPUs.

    python -m tools.tune config/full_qwen3_1.8b_optimal.py --nproc=8 --budget=20m
    python -m tools.tune config/full_qwen3_1.8b_optimal.py --low_precision=fp8_tensorwise --dataset=random

A grid of micro-batches and strategies, each with the least recomputation that fits; then CUDA Graphs, and
QuACK where it is installed. A trial is one run of bench.throughput. What gains more than equal runs differ by
is kept. At the end the best and the config as it is run REPEATS times each, and config/tuned_NAME.py is
written; without these repeats, as after Ctrl-C, none is. Tokens per iteration stay. Any --key=value of
train.py goes to all trials and into the result, and is not searched.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import re
import shlex
import signal
import statistics
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np

from common.arguments import real_number, user_folder, user_path, whole_number
from common.command import run_command
from common.durable_file import write_bytes
from common.errors import UserError
from plots.verdict import compare, deviation
from tools.trials import Run, look_at, run_trial
from training.configuration.batch import divisors, is_auto
from training.configuration.choices import find
from training.configuration.files_and_flags import read_settings
from training.configuration.flags import not_a_flag, take_flags
from training.configuration.keys import AUTO, KEYS, ROOT, TrainConfig
from training.memory.gpus import DeviceMemory
from training.memory.micro_batch import choose
from training.pretrained.settings import load_run_config
from training.process.run_lock import check_writable

Setting = dict[str, Any]  # {key: another value than the config's}; {}: the config as it is

MARK = "# Found by tools.tune"  # how the file begins; another file of this name is not replaced
UNITS = {"s": 1, "m": 60, "h": 3600}
RECOMPUTATION = ("none", "memory_bound", "attention", "selective", "full")  # from the fastest
UNSHARDED = dict.fromkeys(("use_zero1", "use_fsdp", "reshard_after_forward"), False)
SHARDED = ("use_zero1",), ("use_fsdp",), ("use_fsdp", "reshard_after_forward")
STRATEGIES = [UNSHARDED, *(UNSHARDED | dict.fromkeys(keys, True) for keys in SHARDED)]
GAIN = 0.005  # of a step, by one run: two equal runs differ by 0.2 to 0.4 % (plots/verdict.py)
EXTRA_GAIN = 0.02  # of a package that has to be installed wherever the run goes on
REPEATS = 3  # runs of the best and of the config, at the end
FRUGAL_TRIES = 2  # more, with more recomputation, of what fails in spite of the estimate
# Of a trial's iteration, on each GPU, if the config's own is not smaller: enough micro-steps that the
# optimizer's part in the time hardly depends on the micro-batch.
TRIAL_TOKENS = 131_072
FIRST_TOKENS, MOST_TOKENS = (
    8_192,
    65_536,
)  # of the smallest micro-batch tried; of the largest, none was faster
GRAPHED_FROM = 12  # iterations 8 and 9 check the capture of a CUDA graph, and the first replays follow
UNDISTURBED = dict.fromkeys(("checkpoint_interval", "drift_check_interval", "replay_check_interval"), 0)
NO_ROOM = "does not fit by the estimate"
NOT_REPEATED = "no config was written: the repeats are missing that show a real gain"


def main(argv: list[str]) -> int:
    options, flags = parse(argv)
    stated = [f"--dataset={options.dataset}"] if options.dataset not in (None, "random") else []
    arguments = [options.config, *flags, *stated]
    base = load_run_config(arguments, options.nproc)
    stem = Path(options.config).stem.removeprefix("tuned_")
    several = f"_{options.nproc}gpu" if options.nproc > 1 else ""
    result = options.write or ROOT / "config" / f"tuned_{stem}{several}.py"
    if result.exists() and not result.read_text(encoding="utf-8", errors="replace").startswith(MARK):
        raise UserError(f"{result} was not written by tools.tune; rename it, or name another with --write")
    check_writable(result.parent)
    started = f"{stem}_{datetime.datetime.now():%Y%m%d_%H%M%S}"
    options.out_dir = (options.out_dir or ROOT / "out-tune" / started).resolve()  # trials start in the root
    options.config = Path(options.config).resolve()
    if options.out_dir.is_dir() and any(options.out_dir.iterdir()):
        raise UserError(
            f"{options.out_dir} has files, maybe of trials that still run; choose another --out_dir"
        )
    search = Search(options, flags, base, look_at(base, options.nproc))
    print(f"{search.tokens:,} tokens per iteration; GiB are those that torch gave out", flush=True)
    try:
        search.climb()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*[NOT_REPEATED] * bool(search.good(search.best))) from None
    finally:
        print(search.summary(), flush=True)
    command = shlex.join(["python", "-m", "tools.tune", *argv])
    write_bytes(result, search.config_text(command, read_settings(arguments).values).encode())
    print(f"Written to {result}", flush=True)
    return 0


class Search:
    """The trials of one config, and the best setting so far."""

    def __init__(
        self, options: argparse.Namespace, flags: list[str], base: TrainConfig, memory: DeviceMemory
    ):
        self.options, self.flags, self.base, self.memory = options, flags, base, memory
        self.fixed = {flag.removeprefix("--").partition("=")[0] for flag in flags}
        self.own, self.found = choose(base, options.nproc, memory)  # 'auto' as numbers
        stated = base.tokens_per_iter if is_auto(base) else None
        self.tokens = stated or base.samples_per_iter(options.nproc) * base.block_size  # of an iteration
        self.sequences = self.tokens // (base.block_size * options.nproc)  # of a GPU, in an iteration
        self.best: Setting = {}
        self.runs: dict[str, list[Run]] = {}  # by the whole config of a run
        self.until = time.monotonic() + options.budget

    def climb(self) -> None:
        """Raises UserError if nothing ran, or if the budget is over before the repeats."""
        if self.found.fits or not is_auto(self.base):  # else train.py would refuse it
            self._try("as it is", [{}])
        one_way = self.options.nproc == 1 or self.fixed & UNSHARDED.keys()
        for sharding in [{}] if one_way else STRATEGIES:
            for size in self._sizes():
                if not self._try("grid", self._ways(sharding | {"batch_size": size})):
                    break  # more needs more memory
        if not self.good(self.best):
            failed = [run["reason"] for runs in self.runs.values() for run in runs]
            raise UserError(
                f"no setting of this config fits {self.memory.device} with {self.memory.gib:.1f} GiB"
                f"{f', the last one failed: {failed[-1]}' if failed else ''}; train.py --dry_run=True names "
                "settings that fit"
            )
        if "use_cuda_graphs" not in self.fixed and self.base.device == "cuda":
            self._try("CUDA Graphs", self._ways(self.best | {"use_cuda_graphs": True}))
        if "ffn_backend" not in self.fixed and all(find("ffn_backend", "quack").versions().values()):
            self._try("QuACK", self._ways(self.best | {"ffn_backend": "quack"}), EXTRA_GAIN)
        if self.best and self.good({}):
            self._repeat()

    def _sizes(self) -> list[int]:
        """Micro-batches, each about twice the one before. A further strategy begins with the best so far."""
        if self.fixed & {"batch_size", "gradient_accumulation_steps"}:
            return [self.own.micro_batch]
        length, sizes = self.base.block_size, []
        most = max(MOST_TOKENS // length, self.own.micro_batch)
        possible = [size for size in divisors(self.sequences) if size <= most]
        size = max(1, min(FIRST_TOKENS // length, possible[-1] // 4)) / 2
        while larger := [each for each in possible if each > size]:
            size = min(larger, key=lambda each: abs(each - 2 * size))
            sizes.append(size)
        return [size for size in sizes if size >= self.best.get("batch_size", 1)]

    def _ways(self, wanted: Setting) -> list[Setting]:
        """With the least recomputation that fits by the estimate, and then with more."""
        own = (self.base.activation_checkpointing,)
        levels = own if "activation_checkpointing" in self.fixed else RECOMPUTATION
        ways = [wanted | {"activation_checkpointing": level} for level in levels]
        ways = [way for way in ways if choose(self.config(way), self.options.nproc, self.memory)[1].fits]
        if not ways:
            print(f"{name(wanted)}: {NO_ROOM}", flush=True)
        return ways[: 1 + FRUGAL_TRIES]

    def config(self, setting: Setting) -> TrainConfig:
        """As in a run. loss_chunks is the fewest parts that fit, unless it is stated."""
        if not setting:
            return self.own
        keys = {"loss_chunks": self.own.loss_chunks if "loss_chunks" in self.fixed else AUTO, **setting}
        steps = self.sequences // keys.get("batch_size", self.own.micro_batch)
        config = dataclasses.replace(
            self.own, gradient_accumulation_steps=steps, tokens_per_iter=None, **keys
        )
        return choose(config, self.options.nproc, self.memory)[0]

    def _try(self, rung: str, ways: list[Setting], least: float = GAIN) -> bool:
        """Takes the first of these that runs, if it gains more than `least` and the noise of the rows. Says
        whether one ran."""
        for setting in ways:
            if not self.all_runs(setting):
                self._measure(setting)
            if not self.good(setting):
                say(rung, setting, self.all_runs(setting)[0]["reason"])
                continue
            sides = [self.good(one)[0] for one in (setting, self.best) if self.good(one)]
            gain = speed(sides[0]) / speed(sides[-1]) - 1
            kept = len(sides) == 1 or gain > max(least, *(deviation(rows(run)) for run in sides))
            say(rung, setting, self.about(setting), f"{100 * gain:+.1f} %", "kept" * kept)
            self.best = setting if kept else self.best
            return True
        return False

    def _repeat(self) -> None:
        """The best against the config as it is. Without a real gain the config stays."""
        found = self.best
        sides: tuple[Setting, ...] = (self.best, {})
        for setting in sides * (REPEATS - 1):
            self._measure(setting)
        failed = [run["reason"] for one in sides for run in self.all_runs(one) if run["reason"]]
        if failed:
            self.best = {}
            say("repeated", found, f"a repeat failed: {failed[0]}")
            return
        verdict = compare(*([rows(run) for run in self.good(one)] for one in sides))
        self.best = found if verdict.low > 0 else {}
        say("repeated", found, f"{100 * verdict.change:+.1f} %", "kept" * bool(self.best))

    def _measure(self, setting: Setting) -> None:
        """One more run. Raises UserError if the budget is used up."""
        if time.monotonic() > self.until:
            raise UserError(f"the budget is over; {NOT_REPEATED}; give a larger --budget")
        runs, config = self.all_runs(setting), self.config(setting)
        folder = self.options.out_dir / f"trial_{sum(map(len, self.runs.values())) + 1}"
        folder.mkdir(parents=True)
        steps = max(2, round(TRIAL_TOKENS / (config.micro_batch * config.block_size)))
        keys = {**UNDISTURBED, "profile": None, **setting, "tokens_per_iter": None}
        keys |= {key: getattr(config, key) for key in ("batch_size", "loss_chunks")}
        keys |= {"gradient_accumulation_steps": min(steps, config.micro_steps)}
        options = {
            key: getattr(self.options, key) for key in ("config", "nproc", "iters", "timeout", "dataset")
        }
        options |= {"warmup": max(self.options.warmup, GRAPHED_FROM * config.use_cuda_graphs)}
        options |= {"output": folder / "bench"}
        own = [f"--{key}={value}" for key, value in options.items() if value is not None]
        own += [*self.flags, *(f"--{key}={value}" for key, value in keys.items())]
        runs.append(run_trial(own, folder))

    def all_runs(self, setting: Setting) -> list[Run]:
        return self.runs.setdefault(repr(self.config(setting)), [])

    def good(self, setting: Setting) -> list[Run]:
        """Its runs that succeeded."""
        return [run for run in self.all_runs(setting) if not run["reason"]]

    def about(self, setting: Setting) -> str:
        """'59,363 tokens/s, 95.7 GiB, MFU 55.12 % (v3), 1 run'."""
        runs = self.good(setting)
        words = [f"{statistics.median(map(speed, runs)):,.0f} tokens/s"]
        words += [f"{gib:.1f} GiB" for run in runs[:1] if (gib := run["measurement"]["max_allocated_gb"])]
        mfus = [value for run in runs for value in run["measurement"]["mfu_percent"]]
        words += [f"MFU {statistics.median(mfus):.2f} % (v3)"] if mfus else []
        return ", ".join([*words, f"{len(runs)} run{'s' * (len(runs) > 1)}"])

    def summary(self) -> str:
        return (
            f"Best: {name(self.best)}: {self.about(self.best)}." if self.good(self.best) else "No trial ran."
        )

    def config_text(self, command: str, stated: Setting) -> str:
        """What the config and the flags state, with what was found."""
        about = f"{self.options.nproc} x {self.memory.device}, {self.memory.gib:.1f} GiB for each process. "
        about += f"Measured {datetime.date.today()}. {self.summary()}"
        config = self.config(self.best)
        found = self.best | {"loss_chunks": config.logit_parts}
        found = {key: value for key, value in found.items() if key in stated or value != KEYS[key].default}
        found |= {"batch_size": config.batch_size, "gradient_accumulation_steps": AUTO}
        values = stated | found | {"tokens_per_iter": self.tokens}
        header = [f"{MARK}:", f"#     {command}", *(f"# {part}" for part in textwrap.wrap(about, 108))]
        return "\n".join([*header, *(f"{key} = {value!r}" for key, value in values.items()), ""])


def name(setting: Setting) -> str:
    """As it would be typed, without what is False."""
    words = [f"--{key}={value}" for key, value in setting.items() if value is not False]
    return " ".join(words) or "the config as it is"


def say(rung: str, setting: Setting, *notes: str) -> None:
    print("  ".join([f"{rung:<11}", name(setting), *notes]).rstrip(), flush=True)


def rows(run: Run) -> np.ndarray:
    return np.array(run["measurement"]["tokens_per_sec"])


def speed(run: Run) -> float:
    return float(np.median(rows(run)))


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
    add, count = parser.add_argument, whole_number(1, 10**6)
    add("config", type=user_path, help="a config file of train.py")
    add("--nproc", type=whole_number(1, 1024), default=1, help="processes, a GPU each (1)")
    add("--budget", type=seconds, default="20m", help="start no trial after this time: 90s, 20m, 2h (20m)")
    add("--iters", type=count, default=5, help="timed iterations of a trial (5)")
    add("--warmup", type=count, default=2, help="iterations before them (2)")
    add("--timeout", type=real_number(1, 30 * 24 * 3600), default=600, help="seconds for one trial (600)")
    add("--dataset", type=user_path, help="instead of the config's own; 'random': trials on random tokens")
    add("--out_dir", type=user_folder, help="a new folder for the trials (default: out-tune/NAME_TIME)")
    add("--write", type=user_folder, help="the file of the result (default: config/tuned_NAME.py)")
    flags, rest = take_flags(argv, ("dataset", "out_dir"))
    options, unknown = parser.parse_known_args(rest)
    if unknown:
        raise not_a_flag(unknown[0])
    return options, flags


if __name__ == "__main__":
    # SIGTERM is handled as Ctrl-C, which also stops the running trial
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run_command(main, sys.argv[1:]))
