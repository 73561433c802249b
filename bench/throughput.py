"""Runs a suite of variants, each a real train.py in a fresh process, and prints and saves one table.

    python -m bench.throughput --suite models --dataset random --peer transformers --roofline --repeats 2

The figures come from the run records: train.py itself is measured, not a copy of its loop. A variant that
fails is a row with the reason; the others still run, and the exit status is 1. With --repeats all variants
run once, then all of them again, so that a machine that becomes warm or busy slows all of them alike. Any
--key=value of train.py is added to all variants. The output folder holds the table, a JSON file with
everything, and the record and the console log of each run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import model_builder
from bench.peer import PEERS, require
from bench.plan import OWN_OPTIONS, WARMUP_ITERS, check_overrides, check_varied, iteration_flags, make_plan
from bench.process import TIMEOUT_MAX_S, end_with_status, from_root
from bench.random_tokens import make_random_dataset
from bench.runner import relate, run_entry
from bench.suites import SUITES, Variant
from bench.table import about_this, document_lines, new_folder, result_line, save_table, table_lines
from common.arguments import real_number, user_path, whole_number
from common.errors import UserError
from mfu_versions import model_builder_v3 as v3
from training.configuration.flags import take_flags
from training.configuration.keys import TrainConfig

ITERS_MAX = 10**6  # of one run


def main(argv: list[str]) -> int:
    arguments, overrides = parse(argv)
    programs = require(arguments.peer)
    check_overrides(overrides)
    check_formula()
    name, variants = chosen(arguments)
    check_varied(variants, overrides)
    folder = new_folder(arguments.output, name)
    entries = make_plan(
        variants,
        [*overrides, *iteration_flags(arguments.iters, arguments.warmup)],
        dataset_chooser(arguments.dataset, folder),
        torch.cuda.device_count(),
        programs,
        arguments.roofline,
    )
    content = {
        "suite": name,
        **about_this("bench.throughput", argv),
        "arguments": {**vars(arguments), "overrides": overrides},
    }
    once, repeated = ([e for e in entries if (e.kind == "roofline") == flag] for flag in (True, False))
    order = [(entry, 1) for entry in once]
    order += [(entry, repeat) for repeat in range(1, arguments.repeats + 1) for entry in repeated]
    for number, (entry, repeat) in enumerate(order, start=1):
        print(f"[{number}/{len(order)}] {entry.name}: started, repeat {repeat}", flush=True)
        run_entry(entry, repeat, folder, arguments, entries)
        print(f"[{number}/{len(order)}] {entry.name}: {result_line(entry)}", flush=True)
        relate(entries)
        everything = {**content, "entries": [dataclasses.asdict(entry) for entry in entries]}
        # after each run, so that an interrupted benchmark leaves its results
        save_table(folder, everything, document_lines(content, entries))
    print("\n" + "\n".join(table_lines(entries)) + f"\n\nSaved in {folder}", flush=True)
    return 1 if any(run["reason"] for entry in entries for run in entry.runs) else 0


def check_formula() -> None:
    """Raises UserError if train.py counts by another formula than the tables do."""
    if model_builder.CALCULATION_METHOD != v3.CALCULATION_METHOD:
        raise UserError(
            f"model_builder.py counts MFU by {model_builder.CALCULATION_METHOD}, this table is by v3; "
            "first: cp mfu_versions/model_builder_v3.py model_builder.py"
        )


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
    add("--output", type=user_path, help="a new folder (default: out-bench/SUITE_DATE_TIME)")
    flags, rest = take_flags(argv, OWN_OPTIONS)
    options, unknown = parser.parse_known_args(rest)
    return options, flags + unknown


def chosen(arguments: argparse.Namespace) -> tuple[str, tuple[Variant, ...]]:
    """The name of the suite, or of the config, and the variants."""
    if arguments.suite:
        return arguments.suite, named(SUITES[arguments.suite], arguments.variant)
    if arguments.variant:
        raise UserError("--variant chooses among the variants of a --suite; a --config is one variant")
    path = Path(arguments.config)
    return path.stem, (Variant(path.stem, from_root(path), processes=arguments.nproc),)


def named(variants: tuple[Variant, ...], texts: list[str]) -> tuple[Variant, ...]:
    """The variants whose name is one of these texts, or has it in it where it is no name; all if there are no
    texts. Raises UserError for a text that fits none."""
    if not texts:
        return variants
    every, wanted = [variant.name for variant in variants], set()
    for text in texts:
        found = {text} & set(every) or {name for name in every if text.lower() in name.lower()}
        if not found:
            raise UserError(f"--variant={text!r} is in no name of this suite: {'; '.join(every)}")
        wanted |= found
    return tuple(variant for variant in variants if variant.name in wanted)


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


if __name__ == "__main__":
    # SIGTERM is handled as Ctrl-C, which also stops the running process
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(end_with_status(main, sys.argv[1:]))
