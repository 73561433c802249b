"""Plans a benchmark: an entry for each variant of a suite, and for the peers and ceilings beside them.

A peer trains the same model in another implementation; a ceiling, which bench.roofline measures, is the speed
that this machine's matmuls and attention allow. Neither depends on every key. Variants that differ only in
keys that do not matter to a peer or a ceiling share one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

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
FIXED: dict[str, object] = {"init_from": "scratch", "max_epochs": None, "dry_run": False, "eval_interval": 0}
FIXED |= {"eval_only": False, "eval_at_start": False, "always_save_checkpoint": False}
FIXED |= {"gradient_log_interval": 0, "save_log_to_json": True, "trackers": ""}
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
    warmup: int = 0  # iterations that no figure includes

    @property
    def failures(self) -> list[str]:
        """Why runs failed, the newest last."""
        return [run["reason"] for run in self.runs if run["reason"]]


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
    for key in (flag.removeprefix("--").partition("=")[0] for flag in flags):
        if key in reserved:
            raise UserError(f"{key} is the benchmark's to set; use {instead}")


def iteration_flags(iters: int, warmup: int) -> list[str]:
    """For the first iteration, the warm-up and `iters` timed ones; no row mixes the last two."""
    fits = [n for n in range(1, iters + 1) if not iters % n and not warmup % n and iters // n >= MIN_ROWS]
    total = 1 + warmup + iters
    return [f"--max_iters={total}", f"--log_interval={max(fits, default=1)}", f"--log_save_interval={total}"]


def as_flags(keys: dict[str, object]) -> list[str]:
    return [f"--{key}={value}" for key, value in keys.items()]


def make_plan(
    variants: tuple[Variant, ...],
    flags: list[str],
    dataset: Callable[[TrainConfig], str | Path] | None,
    gpus: int,
    programs: Collection[Program] = (),
    roofline: bool = False,
    keys: dict[str, object] = FIXED,
    warmup: int = 0,
) -> list[Entry]:
    """The ceilings first, then each variant, followed by its peers, of the programs that can train it, unless
    an earlier variant has the same one. Raises UserError if a program can train no variant, or if `flags`
    make two variants of a config equal. `flags` and then `keys` are added to all; `gpus` is the number that
    this machine has."""
    entries: list[Entry] = []
    known: list[tuple] = []  # (file, processes, configuration) of each variant
    shared: dict[tuple, Entry] = {}  # {what a peer or a ceiling depends on: its entry}
    obstacles: dict[str, str] = {}  # why a program cannot train a variant
    for variant in variants:
        argv = [variant.config, *as_flags(variant.overrides), *flags, *as_flags(keys)]
        processes = max(2, gpus) if variant.processes == ALL_GPUS else variant.processes
        entry = Entry("variant", variant.name, argv, processes, "cuda", warmup=warmup)
        entries.append(entry)
        try:
            # from the root, where the runs start, and not from where this process is
            config = load_run_config([str(ROOT / variant.config), *argv[1:]], processes)
        except UserError as error:
            entry.problem = str(error).splitlines()[0]
            continue
        if (own := (variant.config, processes, config)) in known:
            raise UserError(
                f"{variant.name!r} would be the same as another variant: a flag sets what they differ in; "
                "leave it out, or measure one config with --config"
            )
        known.append(own)
        entry.device, entry.dtype = config.device, config.dtype
        if config.device == "cuda" and 0 < gpus < processes:
            entry.problem = f"needs {processes} or more GPUs, this machine has {gpus}"
            continue
        if dataset:
            argv.append(f"--dataset={dataset(config)}")
        shape = (config.model_config(), config.batch_size, config.dtype, config.device)
        if roofline:
            one = [*argv, "--use_zero1=False", "--use_fsdp=False"]  # these two need several processes
            ceiling = Entry("roofline", f"ceiling: {variant.name}", one, 1, config.device, dtype=config.dtype)
            of_kernels = (config.attention_backend, config.low_precision, config.low_precision_scope)
            entry.roofline = shared.setdefault(("roofline", *shape, *of_kernels), ceiling).name
        for program in programs:
            if reason := program.obstacle(config):
                obstacles[program.name] = reason
                continue
            peer = Entry("peer", f"{program.name}: {variant.name}", argv, processes, config.device)
            peer.program = ["-m", "bench.peer", f"--peer={program.name}"]
            peer.dtype, peer.warmup = config.dtype, warmup
            of_steps = (config.gradient_accumulation_steps, config.compile, processes)
            same = shared.setdefault((program.name, *shape, *of_steps, *program.follows(config)), peer)
            entry.peers.append(same.name)
            entries += [peer] * (same is peer)
    trained = {key[0] for key in shared}
    if useless := [name for name in obstacles if name not in trained]:
        raise UserError(f"--peer={useless[0]}: {obstacles[useless[0]]}, so it has nothing to train here")
    return [entry for entry in shared.values() if entry.kind == "roofline"] + entries
