"""Runs the precision matrix: the speed and the held-out loss of every recipe, beside what a study published.

    python -m bench.precision --phase=speed --rows=1,3,5,7,21
    python -m bench.precision --phase=loss --dataset=slimpajama_6b_gpt2 --seeds=1,2,3
    python -m bench.precision --phase=loss --hf=Qwen3-1.7B-Base --dataset=slimpajama_6b_qwen3 --seeds=1

Each row of bench/precision_rows.py is a real train.py, one for its speed and one for each seed of its loss. A
finished run is not run again: the same command continues after any end, and the same command started once for
each GPU divides the runs among them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from bench import plan
from bench.claim import claim
from bench.precision_rows import CONFIG, REPEATS, ROW_KEYS, ROWS
from bench.precision_table import Run, document_lines, row_figures
from bench.process import TIMEOUT_MAX_S, end_with_status
from bench.results import combine
from bench.runner import kept, run_and_keep, run_folder
from bench.suites import Variant
from bench.table import about_this, open_folder, result_line, save_table
from bench.throughput import ITERS_MAX, check_formula, dataset_chooser
from common.arguments import real_number, user_path, whole_number
from common.errors import UserError
from training.batches.sources import make_windows, open_sources
from training.configuration.batch import EVAL_BATCH
from training.configuration.flags import take_flags
from training.pretrained.settings import load_run_config

PHASES = ("speed", "loss")
OTHERS = {*plan.RESERVED, *ROW_KEYS, "seed", "init_weights", "eval_iters"}  # keys that rows and options set
INSTEAD = "--rows, --seeds, --hf, --iters, --warmup, --loss_iters, --dataset or --output"
EVAL_TOKENS = 2**21  # at most, of each split
TEXT = "quickstart"  # the dataset of the loss, if none is named
STUDIED = "config/cpt_qwen3_1.7b_4096.py"  # the study's training
SPEED_KEYS: dict[str, object] = {"doc_masking": True, "packing": "stream", "dtype": "bfloat16"}
SPEED_KEYS |= {"batch_size": 8, "gradient_accumulation_steps": 4}
# tests/gpu/test_precision.py has the same model: a Qwen3 that learns from scratch in 300 iterations
SMALL: dict[str, object] = {"n_layer": 8, "n_head": 8, "num_key_value_heads": 4, "n_embd": 768, "d_ff": 2048}
SMALL |= {"block_size": 512, "batch_size": 8, "gradient_accumulation_steps": 2}
SMALL |= {"learning_rate": 6e-4, "min_lr": 0.0, "lr_decay_iters": None}  # None: it ends with max_iters


def main(argv: list[str]) -> int:
    arguments, overrides = parse(argv)
    plan.check_overrides(overrides, OTHERS, INSTEAD)
    check_formula()
    folder = open_folder(Path(arguments.output).resolve())
    asked = PHASES if arguments.phase == "all" else (arguments.phase,)
    runs = [run for phase in asked for run in runs_of(phase, arguments, folder, overrides)]
    content = about_this("bench.precision", argv)
    missing = [run for run in runs if not is_finished(run, folder)]
    if len(missing) < len(runs):
        done = f"{len(runs) - len(missing)} of {len(runs)} runs are finished"
        print(f"{done} and are not run again", flush=True)
    for number, run in enumerate(missing, start=1):
        title = f"[{number}/{len(missing)}] {run.entry.name}"
        with claim(folder / "runs" / f"{run_folder(run.entry, 0, folder).stem}.lock") as ours:
            if not ours:
                print(f"{title}: another process is at it", flush=True)
            elif not is_finished(run, folder):  # another process may have done it meanwhile
                print(f"{title}: started", flush=True)
                run_once(run, folder, arguments)
                print(f"{title}: {result_line(run.entry)}", flush=True)
        save(folder, content, runs)  # so that an interrupted benchmark leaves its results
    print("\n".join(["", *save(folder, content, runs), "", f"Saved in {folder}"]), flush=True)
    return 1 if any(run.entry.runs and run.entry.runs[-1]["reason"] for run in runs) else 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.precision",
        description=__doc__.splitlines()[0],
        epilog=f"rows: {', '.join(ROWS)} (bench/precision_rows.py); --key=value of train.py goes to all runs",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--phase", choices=(*PHASES, "all"), default="all", help="what to measure (all)")
    add("--rows", type=row_names, default=tuple(ROWS), metavar="A,B", help="which rows to run (all)")
    add("--seeds", type=seed_numbers, default=(1, 2, 3), metavar="A,B", help="of the loss (1,2,3)")
    add("--hf", type=user_path, help="the loss from these weights, with the study's settings")
    add("--dataset", type=user_path, help=f"for both phases (random tokens for the speed, {TEXT})")
    add("--iters", type=whole_number(1, ITERS_MAX), default=9, help="timed iterations of a speed run (9)")
    add("--warmup", type=whole_number(0, ITERS_MAX), default=3, help="iterations before them (3)")
    add("--loss_iters", type=whole_number(2, ITERS_MAX), default=300, help="of a loss run (300)")
    add("--timeout", type=real_number(0, TIMEOUT_MAX_S), default=7200, help="seconds for one run (7200)")
    add("--output", type=user_path, default="out-bench/precision", help="the folder of all results")
    flags, rest = take_flags(argv, plan.OWN_OPTIONS)
    options, unknown = parser.parse_known_args(rest)
    options.keep_cache = True  # compiling again would take most of the time, and no figure includes it
    return options, flags + unknown


def row_names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in ROWS]:
        why = REPEATS if unknown[0] in map(str, range(15, 21)) else f"there is no row {unknown[0]!r}"
        raise argparse.ArgumentTypeError(f"{why}; rows: {', '.join(ROWS)}")
    return names


def seed_numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(whole_number(0)(number) for number in text.split(",")))


# --- what is run ---


def runs_of(phase: str, arguments: argparse.Namespace, folder: Path, overrides: list[str]) -> list[Run]:
    """The runs of a phase. Raises UserError for settings with which no row could run."""
    chosen = dataset_chooser(arguments.dataset or ("random" if phase == "speed" else TEXT), folder)
    assert chosen
    seeds, config, keys, fixed = (None,), CONFIG, SPEED_KEYS, dict(plan.FIXED)
    flags = [*overrides, *plan.iteration_flags(arguments.iters, arguments.warmup)]
    if phase == "loss":  # the held-out one, after the last iteration
        seeds, (config, keys) = arguments.seeds, loss_keys(arguments, chosen, overrides)
        flags = [*overrides, *plan.iteration_flags(arguments.loss_iters - 1, 0)]
        fixed["eval_interval"] = arguments.loss_iters
    base = load_run_config([config, *plan.as_flags(keys), *flags, *plan.as_flags(fixed)])
    base = dataclasses.replace(base, dataset=str(chosen(base)))
    if phase == "loss":  # on all windows if they are not too many: then they are the same for each seed
        windows = make_windows(open_sources(base, scan=False), base)["val"].count
        batch = base.eval_batch_size or EVAL_BATCH
        fixed["eval_iters"] = max(1, min(EVAL_TOKENS // (batch * base.block_size), windows // batch))
    settings = f"{phase}: {shlex.join([config, *plan.as_flags(keys), *flags])} --dataset={base.dataset}"
    runs = []
    for row, seed in itertools.product([ROWS[name] for name in arguments.rows], seeds):
        own = row.keys(base.n_layer) | ({} if seed is None else {"seed": seed})
        if base.init_weights:
            del own["weight_tying"]  # the weights say so
        name = f"{phase} {row.name}" + ("" if seed is None else f", seed {seed}")
        variant = Variant(name, config, {**keys, **own})
        (entry,) = plan.make_plan((variant,), flags, chosen, torch.cuda.device_count(), keys=fixed)
        runs.append(Run(phase, row.name, seed, entry, settings))
    return runs


def loss_keys(arguments: argparse.Namespace, chosen: Callable, overrides: list[str]) -> tuple[str, dict]:
    """The config and the keys of a training whose loss is compared: from weights as the study did, or a small
    model from scratch."""
    if arguments.hf:
        if not arguments.dataset:
            raise UserError("--hf needs --dataset: text made with the tokenizer of these weights")
        weights = f"hf:{Path(arguments.hf).resolve()}"
        return STUDIED, {"init_weights": weights, "use_dataloader": False, "lr_decay_iters": None}
    base = load_run_config([CONFIG, *plan.as_flags(SMALL), *overrides])
    sources = open_sources(dataclasses.replace(base, dataset=str(chosen(base))), scan=False)
    largest = max(source.meta["vocab_size"] for source in sources)
    vocabulary = -(-largest // 128) * 128  # what the blocks of every recipe divide
    return CONFIG, {**SMALL, "vocab_size": vocabulary, "warmup_iters": min(50, arguments.loss_iters // 6)}


# --- running, and keeping what has been run ---


def run_once(run: Run, folder: Path, arguments: argparse.Namespace) -> None:
    options = argparse.Namespace(**{**vars(arguments), "warmup": arguments.warmup * (run.phase == "speed")})
    run_and_keep(run.entry, folder, options, lambda: dataclasses.asdict(run))


def is_finished(run: Run, folder: Path) -> bool:
    """Whether a run that had the same arguments succeeded, in any process."""
    return any(done.entry.argv == run.entry.argv and done.entry.result for done in kept_runs(folder))


def kept_runs(folder: Path) -> list[Run]:
    """What the folder has of all runs, the oldest first."""
    return list(filter(None, (read_result(content) for content, _ in kept(folder))))


def read_result(content: dict) -> Run | None:
    """None for a result that is damaged."""
    try:
        run = Run(**{**content, "entry": plan.Entry(**content["entry"])})
        run.entry.result = combine(run.entry.runs)
        return run if run.row in ROWS else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def save(folder: Path, content: dict, planned: list[Run]) -> list[str]:
    """Saves the table and everything; returns the lines of the document, with the newest run of each row and
    seed: in each phase of those with the settings of this command, else of the newest run."""
    done = kept_runs(folder)
    settings = {run.phase: run.settings for run in [*done, *planned]}
    alike = [run for run in done if run.settings == settings[run.phase]]
    runs = list({(run.phase, run.row, run.seed): run for run in alike}.values())
    content |= {"settings": list(settings.values()), "rows": row_figures(runs)}
    lines = document_lines(content, runs)
    save_table(folder, {**content, "runs": [dataclasses.asdict(run) for run in runs]}, lines)
    return lines


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the running process, too
    sys.exit(end_with_status(main, sys.argv[1:]))
