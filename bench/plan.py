"""Plans a benchmark: an entry for each variant of a suite, and for the peers and ceilings beside them.

A peer trains the same model in another implementation; a ceiling, which bench.roofline measures, is the speed
that this machine's matmuls and attention allow. Neither depends on every key. Variants that differ only in
keys that do not matter to a peer or a ceiling share one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.program import Program
from bench.suites import ALL_GPUS, Variant
from common.errors import UserError
from training.configuration.flags import not_a_flag, take_flags
from training.configuration.keys import ROOT, TrainConfig
from training.pretrained.settings import load_run_config

WARMUP_ITERS = 10  # before the timed ones, unless --warmup says otherwise; no figure includes them
MIN_ROWS = 4  # that a run should have, so that its figures have a spread

OWN_OPTIONS = ("dataset",)  # of the benchmarks; train.py has a key of this name

# Keys that the benchmark sets itself. The iterations follow from --iters and --warmup.
FIXED: dict[str, object] = {
    "init_from": "scratch",
    "max_epochs": None,
    "dry_run": False,
    "eval_interval": 0,
    "eval_only": False,
    "eval_at_start": False,
    "always_save_checkpoint": False,
    "gradient_log_interval": 0,
    "save_log_to_json": True,
    "trackers": "",
}
RESERVED = (*FIXED, "out_dir", "max_iters", "log_interval", "log_save_interval", "dataset")
UNDISTURBED = dict.fromkeys(("checkpoint_interval", "drift_check_interval", "replay_check_interval"), 0)


@dataclass
class Entry:
    """What to run for one row of the table, and then its results."""

    kind: str  # 'variant' (train.py), 'peer' or 'roofline'
    name: str
    argv: list[str]  # arguments of train.py, bench.peer or bench.roofline
    processes: int
    device: str
    problem: str | None = None  # why it cannot be started
    peers: list[str] = field(default_factory=list)  # names of the entries that it is compared with
    roofline: str | None = None
    program: list[str] = field(default_factory=list)  # of a peer: the module that runs it, and its options
    dtype: str = ""  # compute dtype, which the peak depends on
    runs: list[dict] = field(default_factory=list)
    facts: dict = field(default_factory=dict)  # what the last successful run reported about itself
    result: dict | None = None
    about: dict = field(default_factory=dict)  # what an experiment knows it by


def check_overrides(
    overrides: list[str],
    reserved: Collection[str] = RESERVED,
    instead: str = "--iters, --warmup, --dataset or --output",
) -> None:
    """Raises UserError for an argument that is no flag of train.py, or of a key that the benchmark sets, for
    which it has the options `instead`."""
    flags, rest = take_flags(overrides)
    if rest:
        raise not_a_flag(rest[0])
    for flag in flags:
        key = flag.removeprefix("--").partition("=")[0]
        if key in reserved:
            raise UserError(f"{key} is the benchmark's to set; use {instead}")


def check_varied(variants: tuple[Variant, ...], overrides: list[str]) -> None:
    """Raises UserError for a flag of a key in which variants of one config differ: it would make them equal,
    under names that say otherwise."""
    for flag, config in itertools.product(overrides, {variant.config for variant in variants}):
        key = flag.removeprefix("--").partition("=")[0]
        ours = [variant for variant in variants if variant.config == config]
        if len({repr(variant.overrides.get(key, "the config's own")) for variant in ours}) > 1:
            first = next(v for v in ours if key in v.overrides)
            raise UserError(
                f"{flag} would set {key} in every variant, and they differ in it (variant "
                f"{first.name!r} has {first.overrides[key]!r}); leave the flag out, or measure one "
                "config with --config"
            )


def iteration_flags(iters: int, warmup: int) -> list[str]:
    """For the first iteration, the warm-up and `iters` timed ones; no row mixes the last two."""
    fits = [n for n in range(1, iters + 1) if not iters % n and not warmup % n and iters // n >= MIN_ROWS]
    total = 1 + warmup + iters
    return [f"--max_iters={total}", f"--log_interval={max(fits, default=1)}", f"--log_save_interval={total}"]


def make_plan(
    variants: tuple[Variant, ...],
    flags: list[str],
    dataset: Callable[[TrainConfig], str | Path] | None,
    gpus: int,
    programs: Collection[Program] = (),
    roofline: bool = False,
    keys: dict[str, object] = FIXED,
) -> list[Entry]:
    """The ceilings first, then each variant, followed by its peers, of the programs that can train it, unless
    an earlier variant has the same one. Raises UserError if a program can train no variant. `flags` and then
    `keys` are added to all; `gpus` is the number that this machine has."""
    entries: list[Entry] = []
    shared: dict[tuple, Entry] = {}  # {what a peer or a ceiling depends on: its entry}
    obstacles: dict[str, str] = {}  # why a program cannot train a variant
    for variant in variants:
        argv = [variant.config, *as_flags(variant.overrides), *flags, *as_flags(keys)]
        processes = max(2, gpus) if variant.processes == ALL_GPUS else variant.processes
        entry = Entry("variant", variant.name, argv, processes, "cuda")
        entries.append(entry)
        try:
            # from the root, where the runs start, and not from where this process is
            config = load_run_config([str(ROOT / variant.config), *argv[1:]], processes)
        except UserError as error:
            entry.problem = str(error).splitlines()[0]
            continue
        entry.device, entry.dtype = config.device, config.dtype
        if config.device == "cuda" and 0 < gpus < processes:
            entry.problem = f"needs {processes} or more GPUs, this machine has {gpus}"
            continue
        if dataset:
            argv.append(f"--dataset={dataset(config)}")
        beside: dict[str, Any] = {"device": config.device, "dtype": config.dtype}
        shape = (config.model_config(), config.batch_size, config.dtype, config.device)
        if roofline:
            one = [*argv, "--use_zero1=False", "--use_fsdp=False"]  # these two need several processes
            ceiling = Entry("roofline", f"ceiling: {variant.name}", one, 1, **beside)
            own = (config.attention_backend, config.low_precision, config.low_precision_scope)
            entry.roofline = shared.setdefault(("roofline", *shape, *own), ceiling).name
        for program in programs:
            if reason := program.obstacle(config):
                obstacles[program.name] = reason
                continue
            peer = Entry("peer", f"{program.name}: {variant.name}", argv, processes, **beside)
            peer.program = ["-m", "bench.peer", f"--peer={program.name}"]
            own = (config.gradient_accumulation_steps, config.compile, processes, *program.follows(config))
            same = shared.setdefault((program.name, *shape, *own), peer)
            entry.peers.append(same.name)
            entries += [peer] * (same is peer)
    trained = {key[0] for key in shared}
    if useless := [name for name in obstacles if name not in trained]:
        raise UserError(f"--peer={useless[0]}: {obstacles[useless[0]]}, so it has nothing to train here")
    return [entry for entry in shared.values() if entry.kind == "roofline"] + entries


def as_flags(keys: dict[str, object]) -> list[str]:
    return [f"--{key}={value}" for key, value in keys.items()]
