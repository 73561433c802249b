"""Says what a budget buys: the compute-optimal model and tokens, the predicted loss, the hours.

    python -m tools.plan --flops=1.36e21
    python -m tools.plan --gpus=8xH200 --hours=72 --mfu=0.61 --arch=qwen3 --price=2.5
    python -m tools.plan --config=config/full_llama3_1.5b_optimal.py --tokens=101.909e9
    python -m tools.plan --arch=llama3 --size=1e9 --tokens=20e9

docs/plan.md has the formulas and their sources, and says where the law was not fitted.
"""

from __future__ import annotations

import argparse
import re
import sys

from common.arguments import real_number, user_folder, whole_number
from common.command import run_command
from common.errors import UserError
from common.text import shown
from model_config import MOST
from tools.plan import report
from tools.plan.law import HOFFMANN, Law
from tools.plan.search import plan, plan_flops, plans_of
from tools.plan.shapes import BLOCK_SIZE, FAMILIES, Shape, shape_for, shape_of, shapes_of
from training.configuration.files_and_flags import load_config
from training.configuration.keys import ROOT
from training.hardware.peaks import table_peak
from training.memory.gpus import find_card

AMOUNT = real_number(1e-6, 1e30)  # far above any budget, far below an overflow
TITLE = "Compute-optimal models, and smaller ones for more tokens at the same FLOPs"
REMOVED = {  # flag: what to type instead
    "--fit": "docs/plan.md has a script that fits the law; state its constants with --law",
    "--records": "state the MFU that the last lines of these runs say, as in --mfu=0.61",
    "--write": "take the command that a plan of one family ends with",
    "--output": "the table has the losses of several sizes at these FLOPs",
}


def main(argv: list[str]) -> None:
    options = parse(argv)
    law, shape = options.law, named_shape(options)
    gpus, flops_per_hour, machine = read_machine(options)
    flops = options.hours * flops_per_hour if options.hours else options.flops
    print(f"law: {law} ({law.source}; N: all parameters, D: tokens, L: nats per token)")
    plans = []
    if shape:
        plans = [plan_flops(law, shape, flops) if flops else plan(law, shape, options.tokens)]
        flops = plans[0].flops
        print(*report.model_lines(plans[0]), sep="\n")
    print(f"budget: {flops:.5g} training FLOPs by v3 (every matmul, the full score matrix)")
    if gpus:
        hours = flops / flops_per_hour
        print(f"machine: {machine}\ntime: {hours:,.4g} hours, {gpus * hours:,.4g} GPU-hours")
    if options.price:
        print(f"cost: {options.price * gpus * hours:,.2f} at {options.price:,.2f} for a GPU-hour")
    arches, model = ([shape.model.arch], shape.model) if shape else (options.arch, options)
    every = [shapes_of(arch, model.vocab_size, model.block_size) for arch in arches if arch in FAMILIES]
    families = [plans_of(law, shapes, flops) for shapes in every]
    if families:
        print("", TITLE, report.table(families), sep="\n")
    plans = plans or [family[0] for family in families]
    config = options.config or ROOT / "config" / FAMILIES[options.arch[0]].shipped
    print("", *report.notes(law, plans, families, load_config([str(config)]).dataset), sep="\n")
    if len(plans) == 1 and not options.config:
        print("", "To train this model:", report.command(plans[0], max(gpus, 1)), sep="\n")


def named_shape(options: argparse.Namespace) -> Shape | None:
    """Of --config or --size."""
    if options.size is not None:
        return shape_for(options.arch[0], options.size, options.vocab_size, options.block_size)
    if options.config is None:
        return None
    config = load_config([str(options.config)])
    if config.init_weights:
        raise UserError(f"{options.config} begins with trained weights; the law is of training from scratch")
    return shape_of(config.model_config())


def read_machine(options: argparse.Namespace) -> tuple[int, float, str]:
    """(GPUs, FLOPs that they compute in an hour, a text) of --gpus and --mfu. Raises UserError."""
    if options.gpus is None:
        return 0, 0.0, ""
    found = re.fullmatch(r"([1-9]\d{0,5})[x*](\S.*)", options.gpus)
    if not found:
        raise UserError(f"--gpus={shown(options.gpus)} is not a number and a GPU; write it as 8xH200")
    gpus, card = int(found[1]), find_card(found[2]).device
    peak = table_peak(card, "bfloat16").flops
    if peak is None:
        raise UserError(f"--gpus={shown(options.gpus)}: no bf16 peak is known for the {card}")
    text = f"{gpus} x {card}, peak {peak / 1e12:,.5g} TFLOPS each, MFU {100 * options.mfu:.4g} %"
    return gpus, 3600 * gpus * peak * options.mfu, text


# --- flags ---


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises UserError for flags that do not go together."""
    for flag in REMOVED:
        if any(word.split("=")[0] == flag for word in argv):
            raise UserError(f"{flag} is gone: {REMOVED[flag]}")
    parser = argparse.ArgumentParser(
        prog="python -m tools.plan", description="Says what a budget buys.", allow_abbrev=False
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--flops", type=AMOUNT, help="the budget: training FLOPs, by v3")
    length.add_argument("--hours", type=AMOUNT, help="the budget: hours of --gpus")
    length.add_argument("--tokens", type=AMOUNT, help="tokens on which the model trains")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--config", type=user_folder, help="a config file: the model")
    model.add_argument("--size", type=AMOUNT, help="parameters of a model of the family --arch")
    parser.add_argument("--gpus", help="the machine, as in 8xH200")
    parser.add_argument("--mfu", type=real_number(0.001, 1), help="the share of its peak, as in 0.61")
    parser.add_argument("--price", type=real_number(0, 1e9), help="of a GPU for an hour, as in 2.50")
    parser.add_argument("--arch", choices=FAMILIES, help="the family of shapes (default: all)")
    parser.add_argument("--vocab_size", type=whole_number(1, MOST["vocab_size"]), help="(the family's)")
    parser.add_argument("--block_size", type=whole_number(1, MOST["block_size"]), help=f"({BLOCK_SIZE})")
    parser.add_argument("--law", type=own_law, default=HOFFMANN, help="other constants: E,A,B,alpha,beta")
    options = parser.parse_args(argv)
    no_model = not (options.config or options.size)
    stated = options.arch or options.vocab_size or options.block_size
    no_length = not (options.flops or options.hours or options.tokens)
    wrong = {
        "state how long to train: --flops=1e21, or --hours with --gpus, or --tokens of a model": no_length,
        "--tokens of which model? state --config or --size": options.tokens and no_model,
        "--hours of which machine? state --gpus, as in --gpus=8xH200": options.hours and not options.gpus,
        "state both or neither of --gpus and --mfu, as in --gpus=8xH200 --mfu=0.61": bool(options.gpus)
        != bool(options.mfu),
        "--price of which machine? state --gpus and --mfu": options.price and not options.gpus,
        f"--size needs one family: --arch={' or '.join(FAMILIES)}": options.size and not options.arch,
        "--config states the model: leave out --arch, --vocab_size and --block_size": options.config
        and stated,
    }
    for message, is_so in wrong.items():
        if is_so:
            raise UserError(message)
    options.arch = [options.arch] if options.arch else list(FAMILIES)
    options.block_size = options.block_size or BLOCK_SIZE
    return options


def own_law(text: str) -> Law:
    constants = [real_number(0, 1e30)(each) for each in text.split(",")]
    if len(constants) != 5 or max(constants[3:]) > 3:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not E,A,B,alpha,beta, as in 1.69,406.4,410.7,0.34,0.28"
        )
    E, A, B, alpha, beta = constants
    return Law(E, A, B, alpha, beta, "--law")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
