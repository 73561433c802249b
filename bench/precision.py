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
from bench.plan import Entry
from bench.precision_rows import BASELINE, CONFIG, HEAD, REPEATS, ROWS, STUDIED, Row, corrected
from bench.process import TIMEOUT_MAX_S, end_with_status
from bench.runner import SERIES, claim, kept, mean_and_deviation, run_and_keep, run_folder
from bench.suites import Variant
from bench.table import about_this, heading, open_folder, result_line, save_table, table_of
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
        title = f"[{number}/{len(missing)}] {run.name}"
        with claim(folder / "runs" / f"{run_folder(run, 0, folder).stem}.lock") as ours:
            if not ours:
                print(f"{title}: another process is at it", flush=True)
            elif not is_finished(run, folder):  # another process may have done it meanwhile
                print(f"{title}: started", flush=True)
                warmup = arguments.warmup if run.about["phase"] == "speed" else 0
                run_and_keep(run, folder, argparse.Namespace(**{**vars(arguments), "warmup": warmup}))
                print(f"{title}: {result_line(run)}", flush=True)
        save(folder, content, runs)  # so that an interrupted benchmark leaves its results
    print("\n".join(["", *save(folder, content, runs), "", f"Saved in {folder}"]), flush=True)
    return 1 if any(run.runs and run.runs[-1]["reason"] for run in runs) else 0


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


def runs_of(phase: str, arguments: argparse.Namespace, folder: Path, overrides: list[str]) -> list[Entry]:
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
    for row, seed in itertools.product(arguments.rows, seeds):
        own = ROWS[row].keys(base.n_layer) | ({} if seed is None else {"seed": seed})
        if base.init_weights:
            del own["weight_tying"]  # the weights say so
        name = f"{phase} {row}" + ("" if seed is None else f", seed {seed}")
        variant = Variant(name, config, {**keys, **own})
        (entry,) = plan.make_plan((variant,), flags, chosen, torch.cuda.device_count(), keys=fixed)
        entry.about = {"phase": phase, "row": row, "seed": seed, "settings": settings}
        runs.append(entry)
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


def is_finished(run: Entry, folder: Path) -> bool:
    """Whether a run that had the same arguments succeeded, in any process."""
    return any(done.argv == run.argv and done.result for done, _ in kept(folder))


# --- the table ---

# {column: format of its numbers, '' for text}
COLUMNS = {"row": "", "weights": "", "matmuls": "", "executed as": "", "tokens/s": ",.0f", "MFU %": ".1f"}
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
    """Saves the table and everything; returns the lines of the document, with the newest run of each row and
    seed: in each phase of those with the settings of this command, else of the newest run."""
    done = [run for run, _ in kept(folder) if run.about.get("row") in ROWS]
    settings = {run.about["phase"]: run.about["settings"] for run in [*done, *planned]}
    alike = [run for run in done if run.about["settings"] == settings[run.about["phase"]]]
    runs = list({(run.about["phase"], run.about["row"], run.about["seed"]): run for run in alike}.values())
    content |= {"settings": list(settings.values()), "rows": row_figures(runs)}
    facts: dict = next((run.facts for run in runs if run.facts), {})
    lines = [*heading(content, "precision matrix", facts), *(f"- {text}" for text in content["settings"])]
    if peak := facts.get("hardware", {}).get("peak"):
        lines.append(f"- bf16 peak: {peak['tflops_per_gpu'] or 'unknown'} TFLOPS, {peak['source']}")
    lines += [
        "",
        *table_of(COLUMNS, content["rows"], ("weights", "matmuls", "executed as", "note")),
        "",
        LEGEND,
    ]
    save_table(folder, {**content, "runs": [dataclasses.asdict(run) for run in runs]}, lines)
    return lines


def row_figures(runs: list[Entry]) -> list[dict[str, Any]]:
    """{column: value} of each row, and its losses and failures; what was not measured is None or empty."""
    of = {name: [run for run in runs if run.about["row"] == name] for name in ROWS}
    losses = {
        name: {
            str(run.about["seed"]): run.facts["evaluations"][-1]["val_loss"]
            for run in of[name]
            if run.about["phase"] == "loss" and run.result
        }
        for name in ROWS
    }
    return [figures(row, of[row.name], losses[row.name], losses[BASELINE.name]) for row in ROWS.values()]


def figures(row: Row, runs: list[Entry], own: dict[str, float], first: dict[str, float]) -> dict[str, Any]:
    """`own` and `first`: the losses of the row and of row 1, by seed."""
    speed: dict = next((run.result for run in runs if run.about["phase"] == "speed" and run.result), {})
    facts: dict = next((run.facts for run in runs if run.result), {})
    medians = {name: (speed.get(name) or {}).get("median") for name in SERIES}
    low, keys = facts.get("low_precision") or {}, row.own
    paired = [100 * (own[seed] / first[seed] - 1) for seed in own if seed in first and row is not BASELINE]
    stochastic = " stochastic" * (keys.get("weight_rounding") == "stochastic")
    found = {
        "row": row.name,
        "weights": {"float32": "fp32", "bfloat16": "bf16"}[keys["param_dtype"]] + stochastic,
        "matmuls": keys["low_precision"] + " and head" * (keys["low_precision_scope"] == HEAD),
        "executed as": low.get("executed") or ("bf16" if facts and keys["low_precision"] == "none" else None),
        "tokens/s": medians["tokens_per_sec"],
        "MFU %": medians["mfu_percent"],
        "causal %": medians["mfu_causal_percent"],
        "of fp8 %": medians["mfu_fp8_percent"] if low.get("native", True) else None,
        "peak GiB": speed.get("max_allocated_gb"),
        "reserved": speed.get("max_reserved_gb"),
        "held-out loss": mean_and_deviation(list(own.values())),
        "from row 1 %": mean_and_deviation(paired),
        "losses": own,
        "weight_tying": facts.get("config", {}).get("weight_tying", keys["weight_tying"]),
    }
    names = ("study's MFU %", "study's tokens/s", "study's loss", "study's memory %")
    found |= zip(names, row.published or [None] * len(names), strict=True)
    found["corrected %"], found["its causal %"] = corrected(row) or (None, None)
    said = [row.note, "" if found["weight_tying"] else "untied", "" if runs else "not run"]
    for run in runs:
        phase, reason = run.about["phase"], run.runs[-1]["reason"]
        said += [f"{phase} failed: {reason}"] * bool(reason)
        said += [f"{phase} ran otherwise: {text}" for text in run.facts.get("fallbacks", [])]
    return {**found, "note": "; ".join(dict.fromkeys(filter(None, said)))}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the running process, too
    sys.exit(end_with_status(main, sys.argv[1:]))
