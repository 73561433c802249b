"""Runs a suite of variants, each a real train.py in a fresh process, and prints and saves one table.

    python -m bench.throughput --suite models --dataset random --peer transformers --roofline --repeats 2

The figures come from the run records: train.py itself is measured, not a copy of its loop. A variant that
fails is a row with the reason; the others still run, and the exit status is 1. With --repeats all variants
run once, then all of them again, so that a machine that becomes warm or busy slows all of them alike. Any
--key=value of train.py is added to all variants. The output folder holds the table, a JSON file with
everything, and the record and the console log of each run; the same command continues an interrupted one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import model_builder
from bench import plan
from bench.figures import figures, relate
from bench.peer import PEERS, require
from bench.plan import WARMUP_ITERS, Entry
from bench.process import TIMEOUT_MAX_S, end_with_status, from_root
from bench.random_tokens import make_random_dataset
from bench.runner import run_bench
from bench.suites import SUITES, Variant
from bench.table import about_this, dated, heading, open_folder, save_table, table_of
from common.arguments import real_number, user_path, whole_number
from common.errors import UserError
from common.json_file import read_json
from mfu_versions import model_builder_v3 as v3
from training.configuration.flags import take_flags
from training.configuration.keys import TrainConfig

ITERS_MAX = 10**6  # of one run


def main(argv: list[str]) -> int:
    options, overrides = parse(argv)
    programs = require(options.peer)
    plan.check_overrides(overrides)
    check_formula()
    name, variants = chosen(options)
    content = {"suite": name, **about_this("bench.throughput", argv)}
    folder = own_folder(options.output or dated(name), content)
    entries = plan.make_plan(
        variants,
        [*overrides, *plan.iteration_flags(options.iters, options.warmup)],
        dataset_chooser(options.dataset, folder),
        torch.cuda.device_count(),
        programs,
        options.roofline,
        warmup=options.warmup,
    )
    content["arguments"] = {**vars(options), "overrides": overrides}

    def save() -> list[str]:
        relate(entries)
        lines = heading(content, f"bench suite {name}", entries)
        lines += ["", *table_of(COLUMNS, [row_of(entry) for entry in entries]), "", LEGEND]
        everything = {**content, "entries": [dataclasses.asdict(entry) for entry in entries]}
        return save_table(folder, everything, lines)

    again = [entry for entry in entries if entry.kind != "roofline"]  # a ceiling is measured once
    return run_bench([*entries, *again * (options.repeats - 1)], folder, options, save)


def own_folder(asked: str | Path, content: dict) -> Path:
    """Raises UserError if it has the results of another command or of other code."""
    folder = open_folder(asked)
    if (there := folder / "table.json").exists():
        if any(read_json(there).get(part) != content[part] for part in ("command", "git")):
            other = "has the table of a benchmark by another command or other code"
            raise UserError(f"{folder} {other}; choose another --output")
    return folder


def check_formula() -> None:
    """Raises UserError if train.py counts by another formula than the tables do."""
    if model_builder.CALCULATION_METHOD != v3.CALCULATION_METHOD:
        raise UserError(
            f"model_builder.py counts MFU by {model_builder.CALCULATION_METHOD}, this table is by v3; "
            "first: cp mfu_versions/model_builder_v3.py model_builder.py"
        )


# --- options ---


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    listing = "\n".join(f"  {name}: {', '.join(v.name for v in SUITES[name])}" for name in SUITES)
    parser = argparse.ArgumentParser(
        prog="python -m bench.throughput",
        description=__doc__.splitlines()[0],
        epilog=f"--key=value, any setting of train.py, goes to all variants.\n\nsuites:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--suite", choices=SUITES, help="which variants")
    which.add_argument("--config", type=user_path, help="one variant: this config file of train.py")
    add, count = parser.add_argument, whole_number(1, ITERS_MAX)
    add("--nproc", type=whole_number(1, 1024), default=1, help="processes of a --config, a GPU each (1)")
    only = "of the suite, only this variant, or those with NAME in their name; may be repeated (all)"
    add("--variant", action="append", default=[], metavar="NAME", help=only)
    add("--iters", type=count, default=20, help="timed iterations of a run (20)")
    warmup = f"iterations before them ({WARMUP_ITERS})"
    add("--warmup", type=whole_number(0, ITERS_MAX), default=WARMUP_ITERS, help=warmup)
    add("--repeats", type=count, default=1, help="times that the suite is run (1)")
    add("--timeout", type=real_number(0, TIMEOUT_MAX_S), default=1800, help="seconds for one run (1800)")
    others = "instead of the configs' own; 'random' makes one of random tokens"
    add("--dataset", type=user_path, help=others)
    programs = f"run these programs, too: {', '.join(PEERS)}"
    add("--peer", type=names, action="extend", default=[], metavar="A,B", help=programs)
    add("--roofline", action="store_true", help="compare with this machine's ceiling")
    add("--keep_cache", action="store_true", help="use the machine's own compile cache")
    add("--output", type=user_path, help="the folder of all results (default: out-bench/SUITE_DATE_TIME)")
    flags, rest = take_flags(argv, plan.OWN_OPTIONS)
    options, unknown = parser.parse_known_args(rest)
    return options, flags + unknown


def chosen(options: argparse.Namespace) -> tuple[str, tuple[Variant, ...]]:
    """The name of the suite, or of the config, and the variants: those with one of these texts as their name,
    or in it where it is no name. Raises UserError for a text that fits none."""
    if not options.suite:
        if options.variant:
            raise UserError("--variant chooses among the variants of a --suite; a --config is one variant")
        path = Path(options.config)
        return path.stem, (Variant(path.stem, from_root(path), processes=options.nproc),)
    variants = SUITES[options.suite]
    every, wanted = [variant.name for variant in variants], set()
    for text in options.variant:
        found = {text} & {*every} or {name for name in every if text.lower() in name.lower()}
        if not found:
            raise UserError(f"--variant={text!r} is in no name of this suite: {'; '.join(every)}")
        wanted |= found
    return options.suite, tuple(each for each in variants if each.name in wanted or not options.variant)


def seed_numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(whole_number(0)(number) for number in text.split(",")))


def names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def dataset_chooser(asked: str | None, folder: Path) -> Callable[[TrainConfig], str | Path] | None:
    """A function that returns the dataset for a variant's configuration; None: each keeps its own."""
    if asked is None:
        return None
    if asked == "random":
        return lambda config: make_random_dataset(folder, config.model_config().vocab_size)
    # absolute, because the runs start in the repository's root
    named = str(Path(asked).resolve()) if os.sep in asked else asked
    return lambda config: named


# --- the table ---

# {column: format}
COLUMNS = {"variant": "", "GPUs": "s", "MFU %": ".2f", "causal %": ".2f", "of ceiling %": ".1f"}
COLUMNS |= {"tokens/s (p10 to p90)": "", "per GPU": ",.0f", "x peer": ".2f", "peak GiB": ".1f"}
COLUMNS |= {"first step s": ".1f", "SM MHz": ".0f", "W": ".0f", "attention": "", "note": ""}
LEGEND = (
    "MFU by v3 (component_summation_v2025), with the full score matrix and its causal half; of ceiling: of\n"
    "what this machine's matmuls and attention would reach alone; tokens/s: of all GPUs, median and\n"
    "percentiles over the rows of all repeats; x peer: tokens/s as a multiple of the fastest peer's; peak\n"
    "GiB: allocated, of one GPU; first step: with compilation; clock and power: medians of the timed rows."
)


def row_of(entry: Entry) -> dict[str, Any]:
    """{column: value} of a variant, a peer or a ceiling."""
    result: dict = entry.result or {}
    rate, attention = result.get("tokens_per_sec"), result.get("attention") or entry.facts.get("attention")
    if isinstance(attention, dict):  # a peer says it in words
        attention = f"{attention['used']} [{attention['kernel']}]"
    row = {
        **figures([entry]),
        "variant": entry.name,
        "GPUs": f"{entry.processes}{' (CPU)' * (entry.device == 'cpu')}",
        "tokens/s (p10 to p90)": rate and "{median:,.0f} ({p10:,.0f} to {p90:,.0f})".format(**rate),
        "attention": attention,
    }
    if found := result.get("ceiling"):
        matmuls, attention = (1000 * found[f"{name}_seconds"] for name in ("matmul", "attention"))
        row["note"] = (
            f"{matmuls:.1f} ms in matmuls, {attention:.1f} in attention: {result['tokens']:,} tokens"
        )
    return row


if __name__ == "__main__":
    # SIGTERM is handled as Ctrl-C, which also stops the running process
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(end_with_status(main, sys.argv[1:]))
