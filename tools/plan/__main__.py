"""Says what a budget buys: the compute-optimal model and tokens, the predicted loss, the hours.

    python -m tools.plan --flops=1.36e21
    python -m tools.plan --gpus=8xH200 --hours=72 --mfu=0.61 --arch=qwen3 --output=plan.png
    python -m tools.plan --config=config/full_llama3_1.5b_optimal.py --tokens=101.909e9
    python -m tools.plan --arch=llama3 --size=1e9 --tokens=20e9 --write=config/NAME.py
    python -m tools.plan --fit out-small-*/run_*.json

docs/plan.md has the formulas and their sources, and says where the law was not fitted.
"""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentTypeError
from typing import NamedTuple

from common.arguments import user_folder, user_path, whole_number
from common.command import run_command
from common.errors import UserError
from common.text import one_line, shown
from model_config import MOST
from plots.figure import output_path
from plots.run_record import expand_globs
from tools.plan import config_file, figure, report
from tools.plan.fit import Fit, fit
from tools.plan.law import HOFFMANN, Law, check_amount
from tools.plan.machine import Machine, make_machine
from tools.plan.points import read_points
from tools.plan.search import Plan, best_plan, iso_flop, overtrained, plan, plan_flops
from tools.plan.shapes import BLOCK_SIZE, FAMILIES, Shape, shape_for, shape_of, shapes_of
from training.configuration.files_and_flags import load_config

MOST_HOURS = 1e9


class Found(NamedTuple):
    given: Plan | None  # of the model that the user named
    best: list[Plan]  # the compute-optimal plan of each family
    why_no_best: str = ""


def main(argv: list[str]) -> None:
    options = parse(argv)
    check(options)
    machine = make_machine(options.gpus, options.mfu, expand_globs(options.records))
    points = read_points(expand_globs(options.fit)) if options.fit else []
    fitted = fit(points) if points else None
    if fitted:
        print("\n".join(report.fit_lines(fitted, points)))
    if options.flops or options.hours or options.tokens:
        make_plan(options, machine, fitted)


def make_plan(options: argparse.Namespace, machine: Machine | None, fitted: Fit | None) -> None:
    law = fitted.law if fitted else HOFFMANN
    flops = budget(options, machine)
    shape = named_shape(options)
    found = find(options, law, flops, shape)
    given, best = found.given, found.best
    flops = given.flops if given else best[0].flops
    lines = report.law_lines(law) + report.budget_lines(flops, machine)
    if given:
        lines += ["", *report.model_lines(given, fitted)]
    if best:
        lines += report.best_lines(best)
    for each in best:
        lines += report.interval_lines(each, fitted)
    for each in best:
        lines += report.overtrained_lines(each, overtrained(law, each.shape.name, each))
    if found.why_no_best:
        lines += ["", f"no compute-optimal shape to compare with: {found.why_no_best}"]
    lines += report.caveat_lines(law, [given] if given else best)
    print("\n".join(lines))
    if options.output:
        draw(options, law, found, flops)
    if options.write:
        config_file.write(options.write, given or best[0], options.dataset)
        print(f"wrote {options.write}")


def draw(options: argparse.Namespace, law: Law, found: Found, flops: float) -> None:
    if not found.best:
        raise UserError(f"--output: there is no curve to draw: {found.why_no_best}")
    curves = {}
    for each in found.best:
        model = each.shape.model
        shapes = shapes_of(each.shape.name, model.vocab_size, model.block_size)
        curves[each.shape.name] = iso_flop(law, shapes, flops)
    figure.draw(output_path(options.output), law, curves, flops, found.given)


def budget(options: argparse.Namespace, machine: Machine | None) -> float | None:
    """FLOPs; None where the user states tokens. Raises UserError."""
    if options.hours is None:
        return options.flops
    if machine is None:
        raise UserError(
            f"--hours={options.hours:g} of which machine? state --gpus, as in --gpus=8xH200, with --mfu or "
            "--records; or --records alone, for the machine of these runs"
        )
    return check_amount("the budget in FLOPs", options.hours * machine.flops_per_hour)


def named_shape(options: argparse.Namespace) -> Shape | None:
    """Of --config or --size."""
    if options.size is not None:
        return shape_for(options.arch[0], options.size, options.vocab_size, options.block_size)
    if options.config is None:
        return None
    config = load_config([str(options.config)])
    if config.init_weights:
        raise UserError(
            f"{options.config} begins with trained weights ({one_line(config.init_weights)}); the law is of "
            "models trained from scratch"
        )
    try:
        model = config.model_config()
    except ValueError as error:
        raise UserError(f"{options.config}: {error}") from None
    return shape_of(model.arch, model)


def find(options: argparse.Namespace, law: Law, flops: float | None, shape: Shape | None) -> Found:
    if shape is None:
        assert flops is not None
        families = [
            best_plan(law, arch, flops, options.vocab_size, options.block_size) for arch in options.arch
        ]
        return Found(None, families)
    given = plan_flops(law, shape, flops) if flops else plan(law, shape, options.tokens)
    check_amount("FLOPs of this plan", given.flops)
    if shape.name not in FAMILIES:
        return Found(given, [], f"{shape.name} has no family of shapes; these have: {', '.join(FAMILIES)}")
    try:
        return Found(
            given,
            [best_plan(law, shape.name, given.flops, shape.model.vocab_size, shape.model.block_size)],
        )
    except UserError as error:
        return Found(given, [], str(error))


# --- flags ---


def check(options: argparse.Namespace) -> None:
    """What the flags say together. Raises UserError."""
    for name in ("flops", "tokens", "size", "hours"):
        if (value := getattr(options, name)) is not None:
            check_amount(f"--{name}", value)
    if options.hours is not None and options.hours > MOST_HOURS:
        raise UserError(f"--hours={options.hours:g} is more than {MOST_HOURS:g}")
    stated = [f"--{name}" for name in ("flops", "hours", "tokens") if getattr(options, name) is not None]
    model = [f"--{name}" for name in ("config", "size") if getattr(options, name) is not None]
    if len(stated) > 1:
        raise UserError(f"{' and '.join(stated)} both state how long to train; leave one of them out")
    if len(model) > 1:
        raise UserError("--config and --size both state the model; leave one of them out")
    if not stated and (model or options.write or options.output):
        raise UserError("state how long to train: --tokens, --flops, or --hours and --gpus")
    if not stated and not options.fit:
        raise UserError(
            "nothing to plan: state --flops=1e21, or --gpus=8xH200 --hours=72, or --config and --tokens"
        )
    if options.tokens is not None and not model:
        raise UserError("--tokens of which model? state --config=FILE or --size=PARAMETERS")
    if options.config is not None:
        check_config_flags(options)
    if len(options.arch) != 1 and (options.size is not None or options.write):
        raise UserError(f"--size and --write need one family: --arch={' or '.join(FAMILIES)}")
    if options.output:
        output_path(options.output)
    if options.write:
        config_file.check_path(options.write)
    if options.write and options.vocab_size and not options.dataset:
        raise UserError("--write with --vocab_size needs the --dataset that has this vocabulary")


def check_config_flags(options: argparse.Namespace) -> None:
    """--config states the whole model. Raises UserError."""
    if options.write:
        raise UserError("--write writes a planned shape: state --size instead of --config, or neither")
    for name in ("arch", "vocab_size", "block_size"):
        if getattr(options, f"stated_{name}"):
            raise UserError(f"--config has its own {name}; leave --{name} out")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.plan", description="Says what a budget buys.", allow_abbrev=False
    )
    parser.add_argument("--flops", type=number, help="the budget: training FLOPs, by v3")
    parser.add_argument("--gpus", help="the machine, as in 8xH200")
    parser.add_argument("--hours", type=number, help="the budget: hours of this machine")
    parser.add_argument("--mfu", type=number, help="the share of the peak that is reached, as in 0.61")
    parser.add_argument(
        "--records", nargs="+", default=[], metavar="RUN.json", help="runs that measured the MFU"
    )
    parser.add_argument("--config", type=user_folder, help="a config file: the model")
    parser.add_argument("--size", type=number, help="parameters of a model of the family --arch")
    parser.add_argument("--tokens", type=number, help="tokens on which the model trains")
    parser.add_argument("--arch", type=families, help=f"families: {','.join(FAMILIES)} (default: all)")
    parser.add_argument(
        "--vocab_size", type=whole_number(1, MOST["vocab_size"]), help="default: that of the family"
    )
    parser.add_argument(
        "--block_size", type=whole_number(1, MOST["block_size"]), help=f"tokens of a sequence ({BLOCK_SIZE})"
    )
    parser.add_argument("--fit", nargs="+", metavar="RUN.json", help="fit the law to these runs, and use it")
    parser.add_argument("--write", type=user_folder, help="write the model as a config file, config/NAME.py")
    parser.add_argument("--dataset", type=user_path, help="of the config file (default: that of the family)")
    parser.add_argument("--output", type=user_path, help="draw the iso-FLOP curve, a .png")
    options = parser.parse_args(argv)
    for name in ("arch", "vocab_size", "block_size"):
        setattr(options, f"stated_{name}", getattr(options, name) is not None)
    options.arch = options.arch or list(FAMILIES)
    options.block_size = options.block_size or BLOCK_SIZE
    return options


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{shown(text)} is not a number") from None


def families(text: str) -> list[str]:
    found = list(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in found if name not in FAMILIES]
    if unknown:
        raise ArgumentTypeError(f"{shown(unknown[0])} is not one of {', '.join(FAMILIES)}")
    return found


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
