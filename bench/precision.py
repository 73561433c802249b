"""Runs the precision matrix: the speed and the held-out loss of every recipe, beside what a study published.

    python -m bench.precision --phase=speed --rows=1,3,5,7,21
    python -m bench.precision --phase=loss --dataset=slimpajama_6b_gpt2 --seeds=1,2,3
    python -m bench.precision --phase=loss --hf=Qwen3-1.7B-Base --dataset=slimpajama_6b_qwen3 --seeds=1

Each row is a real train.py, one for its speed and one for each seed of its loss. A finished run is not run
again: the same command continues after any end, and the same command started once for each GPU divides the
runs among them.

The study continued the training of Qwen3-1.7B-Base on one B200 in 20 variants
(https://github.com/Scicom-AI-Enterprise-Organization/small-malaysian-lm, README of commit a0af01f). Its MFU
leaves the logits out where the embeddings are tied; docs/low_precision.md says what else its table does not
show.
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
from typing import Any

import torch

from bench import plan
from bench.figures import figures, note, summary
from bench.plan import Entry
from bench.precision_rows import BASELINE, CONFIG, HEAD, REPEATS, ROWS, STUDIED, Row, published
from bench.process import TIMEOUT_MAX_S, end_with_status
from bench.runner import kept, run_bench
from bench.suites import Variant
from bench.table import about_this, heading, open_folder, save_table, table_of
from bench.throughput import ITERS_MAX, check_formula, dataset_chooser, seed_numbers
from common.arguments import real_number, user_path, whole_number
from common.errors import UserError
from training.batches.sources import make_windows, open_sources
from training.configuration.batch import EVAL_BATCH
from training.configuration.flags import take_flags
from training.pretrained.settings import load_run_config

PHASES = ("speed", "loss")
OTHERS = {*plan.RESERVED, "seed", "init_weights", "eval_iters"}  # keys that rows and options set
OTHERS |= {key for row in ROWS.values() for key in row.keys(n_layer=1)}
INSTEAD = "--rows, --seeds, --hf, --iters, --warmup, --loss_iters, --dataset or --output"
EVAL_TOKENS = 2**21  # at most, of each split
TEXT = "quickstart"  # the dataset of the loss, if none is named
SPEED_KEYS: dict[str, object] = {"doc_masking": True, "packing": "stream", "dtype": "bfloat16"}
SPEED_KEYS |= {"batch_size": 8, "gradient_accumulation_steps": 4}
# tests/gpu/test_precision.py has the same model: a Qwen3 that learns from scratch in 300 iterations
SMALL: dict[str, object] = {"n_layer": 8, "n_head": 8, "num_key_value_heads": 4, "n_embd": 768, "d_ff": 2048}
SMALL |= {"block_size": 512, "batch_size": 8, "gradient_accumulation_steps": 2}
SMALL |= {"learning_rate": 6e-4, "min_lr": 0.0, "lr_decay_iters": None}  # None: it ends with max_iters


def main(argv: list[str]) -> int:
    options, overrides = parse(argv)
    plan.check_overrides(overrides, OTHERS, INSTEAD)
    check_formula()
    folder, content = open_folder(options.output), about_this("bench.precision", argv)
    phases = PHASES if options.phase == "all" else (options.phase,)
    runs = [run for phase in phases for run in runs_of(phase, options, folder, overrides)]
    return run_bench(runs, folder, options, lambda: save(folder, content, runs))


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
    parser.set_defaults(keep_cache=True)  # compiling again would take most of the time, and no figure has it
    flags, rest = take_flags(argv, plan.OWN_OPTIONS)
    options, unknown = parser.parse_known_args(rest)
    return options, flags + unknown


def row_names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in ROWS]:
        why = REPEATS if unknown[0] in map(str, range(15, 21)) else f"there is no row {unknown[0]!r}"
        raise argparse.ArgumentTypeError(f"{why}; rows: {', '.join(ROWS)}")
    return names


# --- what is run ---


def runs_of(phase: str, options: argparse.Namespace, folder: Path, overrides: list[str]) -> list[Entry]:
    """The runs of a phase. Raises UserError for settings with which no row could run."""
    chosen = dataset_chooser(options.dataset or ("random" if phase == "speed" else TEXT), folder)
    assert chosen
    seeds: list[dict[str, object]] = [{}]
    config, keys, fixed = CONFIG, SPEED_KEYS, dict(plan.FIXED)
    iters, warmup = options.iters, options.warmup
    if phase == "loss":  # the held-out one, after the last iteration
        seeds = [{"seed": seed} for seed in options.seeds]
        config, keys = loss_keys(options, chosen, overrides)
        iters, warmup = options.loss_iters - 1, 0
        fixed["eval_interval"] = options.loss_iters
    flags = [*overrides, *plan.iteration_flags(iters, warmup)]
    base = load_run_config([config, *plan.as_flags(keys), *flags, *plan.as_flags(fixed)])
    base = dataclasses.replace(base, dataset=str(chosen(base)))
    if phase == "loss":  # on all windows if they are not too many: then they are the same for each seed
        windows = make_windows(open_sources(base, scan=False), base)["val"].count
        batch = base.eval_batch_size or EVAL_BATCH
        fixed["eval_iters"] = max(1, min(EVAL_TOKENS // (batch * base.block_size), windows // batch))
    settings = f"{phase}: {shlex.join([config, *plan.as_flags(keys), *flags])} --dataset={base.dataset}"
    runs: list[Entry] = []
    for row, seed in itertools.product(options.rows, seeds):
        own = ROWS[row].keys(base.n_layer) | seed
        if base.init_weights:
            del own["weight_tying"]  # the weights say so
        name = ", ".join([f"{phase} {row}", *(f"seed {number}" for number in seed.values())])
        variant = Variant(name, config, {**keys, **own})
        gpus = torch.cuda.device_count()
        runs += plan.make_plan((variant,), flags, chosen, gpus, keys=fixed, warmup=warmup)
        runs[-1].about = {"phase": phase, "row": row, "seed": seed.get("seed"), "settings": settings}
    return runs


def loss_keys(options: argparse.Namespace, chosen: Callable, overrides: list[str]) -> tuple[str, dict]:
    """The config and the keys of a training whose loss is compared: from weights as the study did, or a small
    model from scratch."""
    if options.hf:
        if not options.dataset:
            raise UserError("--hf needs --dataset: text made with the tokenizer of these weights")
        weights = f"hf:{Path(options.hf).resolve()}"
        return STUDIED, {"init_weights": weights, "use_dataloader": False, "lr_decay_iters": None}
    base = load_run_config([CONFIG, *plan.as_flags(SMALL), *overrides])
    sources = open_sources(dataclasses.replace(base, dataset=str(chosen(base))), scan=False)
    largest = max(source.meta["vocab_size"] for source in sources)
    vocabulary = -(-largest // 128) * 128  # what the blocks of every recipe divide
    return CONFIG, {**SMALL, "vocab_size": vocabulary, "warmup_iters": min(50, options.loss_iters // 6)}


# --- the table ---

# {column: format}
COLUMNS = {"row": "s", "weights": "", "matmuls": "", "executed as": "", "tokens/s": ",.0f", "MFU %": ".1f"}
COLUMNS |= {"causal %": ".1f", "of fp8 %": ".1f", "peak GiB": ".1f", "reserved": ".1f"}
COLUMNS |= {"held-out loss": ".4f", "from row 1 %": "+.2f", "study's tokens/s": ",.0f"}
COLUMNS |= {"study's MFU %": ".2f", "corrected %": ".1f", "its causal %": ".1f", "study's memory %": ".2f"}
COLUMNS |= {"study's loss": ".4f", "note": ""}
LEGEND = (
    "MFU: v3, of the bf16 peak in every row, with the full matrix of scores; causal: its causal half,\n"
    "inside documents where they are masked; of fp8: of the fp8 peak, native fp8 alone; loss: mean and\n"
    "standard deviation over seeds; from row 1: of the same seed. The study's columns are of one B200, as\n"
    "printed (memory: W&B's, no peak) and with its tokens/s counted as here (docs/low_precision.md)."
)


def save(folder: Path, content: dict, planned: list[Entry]) -> list[str]:
    """Saves the table and everything: the newest run of each row and seed, in each phase of those with the
    settings of this command, else of the newest run."""
    done = [run for run in kept(folder) if run.about.get("row") in ROWS]
    settings = {run.about["phase"]: run.about["settings"] for run in [*done, *planned]}
    alike = [run for run in done if run.about["settings"] == settings[run.about["phase"]]]
    runs = list({(run.about["phase"], run.about["row"], run.about["seed"]): run for run in alike}.values())
    rows = table_rows(runs)
    lines = [*heading(content, "precision matrix", runs), *(f"- {text}" for text in settings.values())]
    lines += ["", *table_of(COLUMNS, rows), "", LEGEND]
    content |= {"settings": list(settings.values()), "rows": rows}
    return save_table(folder, {**content, "runs": list(map(dataclasses.asdict, runs))}, lines)


def table_rows(runs: list[Entry]) -> list[dict[str, Any]]:
    """{column: value} of each row, and its losses by seed; what was not measured is None or not there."""
    losses: dict[str, dict[str, float]] = {name: {} for name in ROWS}
    for run in runs:
        if run.about["phase"] == "loss" and run.result:
            losses[run.about["row"]][str(run.about["seed"])] = run.facts["evaluations"][-1]["val_loss"]
    first, found = losses[BASELINE], []
    for name, row in ROWS.items():
        own = [run for run in runs if run.about["row"] == name]
        changes = [100 * (loss / first[seed] - 1) for seed, loss in losses[name].items() if seed in first]
        from_first = None if name == BASELINE else summary(changes)
        found.append(row_of(row, own) | {"losses": losses[name], "from row 1 %": from_first})
    return found


def row_of(row: Row, runs: list[Entry]) -> dict[str, Any]:
    facts: dict = next((run.facts for run in runs if run.result), {})
    low, keys = facts.get("low_precision") or {}, row.own
    stochastic = " stochastic" * (keys.get("weight_rounding") == "stochastic")
    found = figures([run for run in runs if run.about["phase"] == "speed"])
    tied = facts.get("config", keys)["weight_tying"]
    notes = [row.note, "" if tied else "untied", note(runs)]
    return {
        **found,
        "row": row.name,
        "weights": {"float32": "fp32", "bfloat16": "bf16"}[keys["param_dtype"]] + stochastic,
        "matmuls": keys["low_precision"] + " and head" * (keys["low_precision_scope"] == HEAD),
        "executed as": low.get("executed") or ("bf16" if facts and keys["low_precision"] == "none" else None),
        "of fp8 %": found["of fp8 %"] if low.get("native", True) else None,
        "held-out loss": figures([run for run in runs if run.about["phase"] == "loss"])["held-out loss"],
        "note": "; ".join(filter(None, notes)),
        **published(row),
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the running process, too
    sys.exit(end_with_status(main, sys.argv[1:]))
