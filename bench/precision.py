"""Runs the precision matrix: the speed and the held-out loss of every recipe, beside what a study published.

    python -m bench.precision --phase=speed --rows=1,3,5,7,21
    python -m bench.precision --phase=loss --dataset=slimpajama_6b_gpt2 --seeds=1,2,3
    python -m bench.precision --phase=loss --hf=Qwen3-1.7B-Base --dataset=slimpajama_6b_qwen3 --seeds=1

Each row of bench/precision_rows.py is a real train.py in a fresh process, one for its speed and one for each
seed of its loss. A finished run is kept in the output folder and not run again: the same command continues
after any end, and the same command started once for each GPU divides the runs among them. A row that fails,
for example because this device cannot run its recipe, is a line with the reason. Any --key=value of train.py
goes to all runs.

    for gpu in 0 1; do CUDA_VISIBLE_DEVICES=$gpu python -m bench.precision --output=matrix & done; wait
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import shlex
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import model_builder
from bench.claim import claim
from bench.plan import FIXED, OWN_OPTIONS, RESERVED, Entry, check_overrides, iteration_flags, make_plan
from bench.precision_rows import CONFIG, ROW_KEYS, ROWS
from bench.precision_table import Run, document_lines, draw, row_figures, settings_line
from bench.process import TIMEOUT_MAX_S, end_with_status
from bench.results import combine
from bench.runner import run_entry, run_folder
from bench.suites import Variant
from bench.table import open_folder, result_line, save_table
from bench.throughput import ITERS_MAX, dataset_chooser
from common.arguments import real_number, user_path, whole_number
from common.durable_file import write_json
from common.errors import UserError
from common.json_file import read_json
from data.pipeline.meta_file import read_meta
from mfu_versions import model_builder_v3 as v3
from training.batches.sources import make_windows, open_sources
from training.configuration.dataset_name import dataset_folder, parse_dataset
from training.configuration.flags import take_flags
from training.configuration.keys import TrainConfig
from training.pretrained.settings import load_run_config
from training.records.startup_info import git_state

PHASES = ("speed", "loss")
RESULT = "result.json"  # of a finished run, in its folder
OTHERS = {*ROW_KEYS, "seed", "init_weights", "device", "eval_iters"}  # keys that rows and options set
EVAL_TOKENS = 2**21  # at most, of each split
TEXT = "quickstart"  # the dataset of the loss, if none is named
VOCABULARY_MULTIPLE = 128  # what the blocks of every recipe divide

STUDIED = "config/cpt_qwen3_1.7b_4096.py"  # the study's training
CPU_CONFIG = "config/smoke_qwen3.py"
CPU_KEYS: dict[str, object] = {"dtype": "bfloat16", "d_ff": 384}
SPEED_KEYS: dict[str, object] = {"doc_masking": True, "packing": "stream", "dtype": "bfloat16"}
# tests/gpu/test_precision.py has the same model: a Qwen3 that learns from scratch in 300 iterations
SMALL_KEYS: dict[str, object] = {
    "n_layer": 8,
    "n_head": 8,
    "num_key_value_heads": 4,
    "n_embd": 768,
    "d_ff": 2048,
    "block_size": 512,
    "batch_size": 8,
    "gradient_accumulation_steps": 2,
}
SCRATCH_KEYS: dict[str, object] = {"learning_rate": 6e-4, "min_lr": 0.0}


@dataclass(frozen=True)
class Phase:
    """What the runs of a phase have in common."""

    name: str  # 'speed' or 'loss'
    config: str
    keys: dict[str, object]  # that replace the config's
    fixed: dict[str, object]  # that come after the user's flags
    iterations: list[str]  # flags
    seeds: tuple[int | None, ...]  # None: the config's own
    warmup: int
    dataset: str | None  # None: random tokens


def main(argv: list[str]) -> int:
    arguments, overrides = parse(argv)
    check(overrides)
    if model_builder.CALCULATION_METHOD != v3.CALCULATION_METHOD:
        raise UserError("this table counts MFU by v3: cp mfu_versions/model_builder_v3.py model_builder.py")
    folder = open_folder(Path(arguments.output).resolve())
    runs = [run for phase in phases(arguments) for run in plan(phase, folder, overrides)]
    wanted = [run for run in runs if run.row in arguments.rows]
    content = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "bench.precision", *argv]),
        "git": git_state(),
    }
    save(folder, content, collect(runs, folder))
    missing = [run for run in wanted if not run.entry.runs]
    if len(missing) < len(wanted):
        kept = len(wanted) - len(missing)
        print(f"{kept} of {len(wanted)} runs are finished and are not run again", flush=True)
    for number, run in enumerate(missing, start=1):
        with claim(folder / "runs" / f"{run_folder(run.entry, 0, folder).stem}.lock") as ours:
            title = f"[{number}/{len(missing)}] {run.entry.name}"
            if not run.entry.runs:
                restore(run, folder)  # another process may have done it meanwhile
            if not run.entry.runs:
                print(f"{title}: {'started' if ours else 'another process is at it'}", flush=True)
            if not run.entry.runs and ours:
                run_once(run, folder, arguments)
            if run.entry.runs:
                print(f"{title}: {result_line(run.entry)}", flush=True)
        save(folder, content, collect(runs, folder))  # so that an interrupted benchmark leaves its results
    every = collect(runs, folder)
    lines = save(folder, content, every)
    print("\n".join(["", *lines, ""]), flush=True)
    draw(row_figures(every), folder / "loss_over_speed.png")
    print(f"Saved in {folder}", flush=True)
    if others := sum(not run.entry.runs for run in wanted):
        print(f"{others} of the runs are still in other processes; the last of these shows all", flush=True)
    return 1 if any(run.entry.runs and run.entry.runs[-1]["reason"] for run in wanted) else 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.precision",
        description=__doc__.splitlines()[0],
        epilog=f"rows: {', '.join(ROWS)} (bench/precision_rows.py)",
        allow_abbrev=False,
    )
    add = parser.add_argument
    count = whole_number(1, ITERS_MAX)
    add("--phase", choices=(*PHASES, "all"), default="all", help="what to measure (all)")
    add("--rows", type=row_names, default=tuple(ROWS), metavar="A,B", help="which rows to run (all)")
    add("--seeds", type=seed_numbers, default=(1, 2, 3), metavar="A,B", help="of the loss (1,2,3)")
    add("--hf", type=user_path, help="the loss from these weights, with the study's settings")
    add("--dataset", type=user_path, help=f"for both phases (random tokens for the speed, {TEXT})")
    add("--cpu", action="store_true", help="a tiny model on the CPU: whether it works; so without a GPU")
    add("--iters", type=count, default=9, help="timed iterations of a speed run (9)")
    add("--warmup", type=whole_number(0, ITERS_MAX), default=3, help="iterations before them (3)")
    add("--loss_iters", type=whole_number(2, ITERS_MAX), default=300, help="of a loss run (300)")
    add("--timeout", type=real_number(0, TIMEOUT_MAX_S), default=7200, help="seconds for one run (7200)")
    add("--output", type=user_path, default="out-bench/precision", help="the folder of all results")
    flags, rest = take_flags(argv, OWN_OPTIONS)
    options, unknown = parser.parse_known_args(rest)
    options.cpu = options.cpu or not torch.cuda.is_available()
    options.keep_cache = True  # compiling again would take most of the time, and no figure includes it
    return options, flags + unknown


def check(overrides: list[str]) -> None:
    """Raises UserError for what is no flag of train.py, or of a key that rows or options set."""
    instead = "--rows, --seeds, --hf, --cpu, --iters, --warmup, --loss_iters, --dataset or --output"
    check_overrides(overrides, {*RESERVED, *OTHERS}, instead)


def row_names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no row {unknown[0]!r}; rows: {', '.join(ROWS)}")
    return names


def seed_numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(whole_number(0)(number) for number in text.split(",")))


# --- what is run ---


def phases(arguments: argparse.Namespace) -> list[Phase]:
    """The phases that are asked for."""
    found = []
    if arguments.phase != "loss":
        config, keys = (CPU_CONFIG, {**CPU_KEYS, **SPEED_KEYS}) if arguments.cpu else (CONFIG, SPEED_KEYS)
        if arguments.cpu and arguments.dataset:
            keys = {**keys, **vocabulary(arguments.dataset, config)}
        iterations = iteration_flags(arguments.iters, arguments.warmup)
        found.append(
            Phase("speed", config, keys, FIXED, iterations, (None,), arguments.warmup, arguments.dataset)
        )
    if arguments.phase != "speed":
        found.append(loss_phase(arguments))
    return found


def loss_phase(arguments: argparse.Namespace) -> Phase:
    iters, dataset = arguments.loss_iters, arguments.dataset or TEXT
    if arguments.hf:
        if not arguments.dataset:
            raise UserError("--hf needs --dataset: text made with the tokenizer of these weights")
        weights = f"hf:{Path(arguments.hf).resolve()}"
        config = STUDIED
        keys = {"init_weights": weights, "use_dataloader": False, "warmup_iters": min(100, iters // 3)}
        if arguments.cpu:
            keys |= {"device": "cpu", "compile": False}
    else:
        config, keys = (CPU_CONFIG, CPU_KEYS) if arguments.cpu else (CONFIG, SMALL_KEYS)
        keys = {**keys, **SCRATCH_KEYS, "warmup_iters": min(50, iters // 6), **vocabulary(dataset, config)}
    # the last iteration decides where the schedule ends, and is the one after which the loss is computed
    keys = {**keys, "lr_decay_iters": None}
    fixed = {**FIXED, "eval_interval": iters}
    return Phase("loss", config, keys, fixed, iteration_flags(iters - 1, 0), arguments.seeds, 0, dataset)


def vocabulary(dataset: str, config: str) -> dict[str, object]:
    """The vocab_size of a model that is made for this dataset."""
    chosen = dataset_chooser(dataset, Path())
    assert chosen
    base = load_run_config([config])
    named = str(chosen(base))
    folders = [dataset_folder(dataclasses.replace(base, dataset=name)) for name in parse_dataset(named)]
    largest = max(read_meta(folder)["vocab_size"] for folder in folders)
    return {"vocab_size": -(-largest // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE}


def plan(phase: Phase, folder: Path, overrides: list[str]) -> list[Run]:
    """The runs of a phase, of all rows. Raises UserError for settings with which no row could run."""
    flags = [*overrides, *phase.iterations]
    chosen = dataset_chooser(phase.dataset or "random", folder)
    assert chosen
    base = load_run_config([phase.config, *as_flags(phase.keys), *flags, *as_flags(phase.fixed)])
    base = dataclasses.replace(base, dataset=str(chosen(base)))
    fixed, held_out = phase.fixed, ""
    if phase.name == "loss":
        batches, held_out = evaluation(base)
        fixed = {**fixed, "eval_iters": batches}
    settings = settings_line(phase.name, phase.config, base, held_out)
    rows = [row for row in ROWS.values() if not row.same_as]
    runs = []
    for seed in phase.seeds:
        own, suffix = ({}, "") if seed is None else ({"seed": seed}, f", seed {seed}")
        variants = []
        for row in rows:
            keys = row.keys(base.n_layer)
            if base.init_weights:
                del keys["weight_tying"]  # the weights say so
            name = f"{phase.name} {row.name}{suffix}"
            variants.append(Variant(name, phase.config, {**phase.keys, **keys, **own}))
        gpus = torch.cuda.device_count()
        entries = make_plan(tuple(variants), flags, chosen, gpus, keys=fixed)
        for row, entry in zip(rows, entries, strict=True):
            runs.append(Run(phase.name, row.name, seed, entry, phase.warmup, settings))
    return runs


def as_flags(keys: dict[str, object]) -> list[str]:
    return [f"--{key}={value}" for key, value in keys.items()]


def evaluation(config: TrainConfig) -> tuple[int, str]:
    """(eval_iters, what the held-out loss is computed on). All windows if they are not too many: then they
    are the same for each seed."""
    windows = make_windows(open_sources(config, scan=False), config)["val"].count
    batch = config.eval_batch_size or config.micro_batch
    batches = max(1, min(EVAL_TOKENS // (batch * config.block_size), windows // batch))
    others = ", others for each seed" * (batches < windows // batch)
    return batches, f"{min(windows, batches * batch):,} of the {windows:,} windows of its val split{others}"


# --- running, and keeping what is finished ---


def run_once(run: Run, folder: Path, arguments: argparse.Namespace) -> None:
    entry = run.entry
    number = next(n for n in itertools.count(1) if not run_folder(entry, n, folder).exists())
    options = argparse.Namespace(**{**vars(arguments), "warmup": run.warmup})
    run_entry(entry, number, folder, options, [entry])
    if entry.problem:
        return
    out_dir = run_folder(entry, number, folder)
    shutil.rmtree(out_dir / "checkpoints", ignore_errors=True)  # the loss is a new best, which is saved
    if entry.runs[-1]["reason"] is None:
        write_json(out_dir / RESULT, dataclasses.asdict(run))


def collect(runs: list[Run], folder: Path) -> list[Run]:
    """The runs of this command, with what is finished in the folder, by other processes, too; and those of a
    phase that it does not run."""
    for run in runs:
        if not run.entry.runs:
            restore(run, folder)
    absent = [name for name in PHASES if name not in {run.phase for run in runs}]
    return runs + [run for name in absent for run in finished(name, folder)]


def restore(run: Run, folder: Path) -> None:
    """Takes the result of a finished run that had the same arguments."""
    entry = run.entry
    folders = (run_folder(entry, number, folder) for number in itertools.count(1))
    for out_dir in itertools.takewhile(Path.exists, folders):
        found = read_result(out_dir / RESULT)
        if found and found.entry.argv == entry.argv:
            run.entry = found.entry


def finished(phase: str, folder: Path) -> list[Run]:
    """The finished runs of a phase that this command does not run: those with the newest one's settings, for
    each row and seed the newest."""
    paths = sorted((folder / "runs").glob(f"{phase}-*/{RESULT}"), key=lambda path: path.stat().st_mtime_ns)
    found = [run for run in map(read_result, paths) if run and run.row in ROWS]
    alike = {(run.row, run.seed): run for run in found if run.settings == found[-1].settings}
    return list(alike.values())


def read_result(path: Path) -> Run | None:
    """None for a run that failed, was interrupted, or whose result is damaged."""
    try:
        content = read_json(path)
        run = Run(**{**content, "entry": Entry(**content["entry"])})
        run.entry.result = combine(run.entry.runs)
        return run if run.entry.result else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def save(folder: Path, content: dict, runs: list[Run]) -> list[str]:
    """Saves the table and everything; returns the lines of the document."""
    settings = list(dict.fromkeys(run.settings for run in runs))
    lines = document_lines({**content, "settings": settings}, runs)
    done = [dataclasses.asdict(run) for run in runs if run.entry.runs]
    everything = {**content, "settings": settings, "rows": row_figures(runs), "runs": done}
    save_table(folder, everything, lines)
    return lines


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the running process, too
    sys.exit(end_with_status(main, sys.argv[1:]))
