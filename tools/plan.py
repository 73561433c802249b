"""Says what a budget buys: the compute-optimal model and tokens, the predicted loss, the hours.

    python -m tools.plan --flops=1.36e21
    python -m tools.plan --gpus=8xH200 --hours=72 --mfu=0.61 --arch=qwen3 --price=2.5
    python -m tools.plan --config=config/full_llama3_1.5b_optimal.py --tokens=101.909e9
    python -m tools.plan --arch=llama3 --size=1e9 --tokens=20e9

docs/plan.md has the formulas and their sources, the families, and says where the law was not fitted.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.arguments import real_number, user_folder, whole_number
from common.command import run_command
from common.errors import UserError
from common.text import aligned, shown
from mfu_versions import model_builder_v3 as v3
from model_config import MOST, ModelConfig, config_key
from plots.figure import tokens_text as short
from tools.model_families import BLOCK_SIZE, FAMILIES, WIDTHS, model_for, models_of, nearest, parameters
from training.configuration.files_and_flags import load_config
from training.configuration.keys import ROOT
from training.hardware.peaks import table_peak
from training.memory.gpus import find_card

AMOUNT = real_number(1e-6, 1e30)  # far above any budget, far below an overflow
OVERTRAINED = (0.75, 0.5, 0.35, 0.25)  # about so much of the compute-optimal size
ITERATIONS = 2000  # at least, where a batch of SEQUENCES allows it
SEQUENCES = (8, 256)  # of an iteration: least and most
SHAPE = "layers-heads-width-ff, KV heads"
SHAPE_FIELDS = ("n_layer", "n_head", "n_kv_head", "n_embd", "d_ff", "vocab_size", "block_size")
REMOVED = {  # flag: what to type instead
    "--fit": "docs/plan.md has a script that fits the law; state its constants with --law",
    "--records": "state the MFU that the last lines of these runs say, as in --mfu=0.61",
    "--write": "take the command that a plan of one family ends with",
    "--output": "the table has the losses of several sizes at these FLOPs",
}


class Law(NamedTuple):
    """L(N, D) = E + A / N^alpha + B / D^beta, nats per token, for all N parameters, embeddings included, and
    D tokens (Hoffmann et al. 2022, equation 10 and appendix F)."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta


# Approach 3 (section 3.3, appendix D.3), and Besiroglu et al. 2024, arXiv 2404.10102, from the same runs.
HOFFMANN = Law(1.69, 406.4, 410.7, 0.34, 0.28)
BESIROGLU = Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
SOURCES = {HOFFMANN: "Hoffmann et al. 2022, approach 3", BESIROGLU: "Besiroglu et al. 2024"}
FITTED = {"parameters": (70e6, 16e9), "tokens": (5e9, 500e9)}  # least and most of these runs
CAVEAT = (
    "fitted to MassiveText with a tokenizer of 32,000 entries: the loss per token differs with other data "
    "and tokenizers; compare plans of one family, or state the constants of your own runs (--law)"
)


@dataclass(frozen=True)
class Plan:
    model: ModelConfig
    tokens: float
    loss: float  # predicted, nats per token

    @property
    def flops_per_token(self) -> int:
        """Training, by v3, with the full score matrix."""
        return v3.count_flops(self.model, self.model.block_size)["flops_per_token"]

    def __str__(self) -> str:
        m = self.model
        return f"{m.n_layer}-{m.n_head}-{m.n_embd}-{m.d_ff}, {m.n_kv_head}"


def plan(law: Law, model: ModelConfig, tokens: float) -> Plan:
    return Plan(model, tokens, float(law.loss(parameters(model), tokens)))


def plan_flops(law: Law, model: ModelConfig, flops: float) -> Plan:
    """The plan of a model that costs so many FLOPs."""
    return plan(law, model, flops / plan(law, model, 1).flops_per_token)


def plans_of(law: Law, models: Sequence[ModelConfig], flops: float) -> list[Plan]:
    """The compute-optimal plan, and then smaller models for more tokens at the same FLOPs."""
    best = min((plan_flops(law, model, flops) for model in models), key=lambda each: each.loss)
    smaller = dict.fromkeys(nearest(models, share * parameters(best.model)) for share in OVERTRAINED)
    return [best, *(plan_flops(law, model, flops) for model in smaller if model != best.model)]


def main(argv: list[str]) -> None:
    options = parse(argv)
    law, model = options.law, named_model(options)
    gpus, flops_per_hour, machine = read_machine(options)
    flops = options.hours * flops_per_hour if options.hours else options.flops
    E, A, B, alpha, beta = (f"{constant:.4g}" for constant in law)
    source = f"{SOURCES.get(law, '--law')}; N: all parameters, D: tokens, L: nats per token"
    print(f"law: L = {E} + {A} / N^{alpha} + {B} / D^{beta} ({source})")
    plans = []
    if model:
        plans = [one := plan_flops(law, model, flops) if flops else plan(law, model, options.tokens)]
        flops, size = one.tokens * one.flops_per_token, parameters(model)
        print(f"model: {model.arch}, {SHAPE}: {one}; {size:,} parameters")
        print(f"tokens: {one.tokens:,.0f}, {one.tokens / size:.1f} per parameter")
        print(f"FLOPs/token: {one.flops_per_token:,}\npredicted loss: {one.loss:.3f}")
    print(f"budget: {flops:.5g} training FLOPs by v3 (every matmul, the full score matrix)")
    if gpus:
        hours = flops / flops_per_hour
        print(f"machine: {machine}\ntime: {hours:,.4g} hours, {gpus * hours:,.4g} GPU-hours")
        if options.price:
            print(f"cost: {options.price * gpus * hours:,.2f} at {options.price:,.2f} for a GPU-hour")
    arches, like = ([model.arch], model) if model else (options.arch, options)
    every = [models_of(arch, like.vocab_size, like.block_size) for arch in arches if arch in FAMILIES]
    families = [plans_of(law, models, flops) for models in every]
    if families:
        print(
            "\nCompute-optimal models, and smaller ones for more tokens at the same FLOPs",
            table(families),
            sep="\n",
        )
    plans = plans or [family[0] for family in families]
    config = options.config or ROOT / "config" / FAMILIES[options.arch[0]].shipped
    found = notes(law, plans, families, load_config([str(config)]).dataset)
    print("", *(f"note: {line}" for line in dict.fromkeys(found)), sep="\n")
    if len(plans) == 1 and not options.config:
        print("", "To train this model:", command(plans[0], max(gpus, 1)), sep="\n")


def named_model(options: argparse.Namespace) -> ModelConfig | None:
    """Of --config or --size."""
    if options.size is not None:
        return model_for(options.arch[0], options.size, options.vocab_size, options.block_size)
    if options.config is None:
        return None
    config = load_config([str(options.config)])
    if config.init_weights:
        raise UserError(f"{options.config} begins with trained weights; the law is of training from scratch")
    return config.model_config()


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


def table(families: list[list[Plan]]) -> str:
    head = ["arch", SHAPE, "parameters", "of optimal", "FLOPs/token", "tokens", "tokens/parameter", "loss"]
    rows = []
    for best, each in ((plans[0], each) for plans in families for each in plans):
        size = parameters(each.model)
        row = [each.model.arch, str(each), short(size), f"{100 * size / parameters(best.model):.0f} %"]
        row += [
            f"{each.flops_per_token:.4g}",
            short(each.tokens),
            f"{each.tokens / size:.1f}",
            f"{each.loss:.3f}",
        ]
        rows.append(row)
    return "\n".join(aligned(head, rows, ("arch", SHAPE)))


def notes(law: Law, plans: list[Plan], families: list[list[Plan]], dataset: str) -> list[str]:
    """Where the law does not hold or was not fitted, and where the best shape is not in its family."""
    found = [CAVEAT] if law in SOURCES else []
    for best, *_ in families:
        if best.model.n_embd in (WIDTHS[0], WIDTHS[-1]):
            found.append(f"the best {best.model.arch} model of these FLOPs is beyond the sizes of its family")
    for each in plans:
        amounts = {"parameters": parameters(each.model), "tokens": each.tokens}
        for name, (least, most) in FITTED.items() if law in SOURCES else ():
            if not least <= amounts[name] <= most:
                said = f"extrapolated: {amounts[name]:.3g} {name}; the law was fitted to "
                found.append(f"{said}{least:.3g} to {most:.3g}")
        vocab_size = each.model.vocab_size
        if each.loss > (guess := math.log(vocab_size)):
            found.append(
                f"a loss of {each.loss:.3f} is above that of a random guess, ln({vocab_size}) = {guess:.3f}: "
                "the law does not hold for this plan"
            )
    if (size := re.search(r"_(\d+)b(_|$)", dataset)) and len(plans) == 1:
        epochs = plans[0].tokens / (int(size[1]) * 1e9)
        said = f"{short(plans[0].tokens)} tokens are {epochs:.2g} epochs of {dataset}, {size[1]} B by name"
        found.append(said + "; the law counts different tokens" * (epochs > 1))
    return found


def command(planned: Plan, gpus: int) -> str:
    """What trains a model of a family on so many GPUs, with the rates of its shipped configuration."""
    model = planned.model
    sequences = 2 ** int(math.log2(max(planned.tokens / ITERATIONS / model.block_size, 1)))
    sequences = min(max(sequences, SEQUENCES[0]), SEQUENCES[1])
    tokens_per_iter = max(sequences // gpus, 1) * gpus * model.block_size  # each GPU has as many
    iterations = math.ceil(planned.tokens / tokens_per_iter)
    keys = {"out_dir": f"out-{model.arch}-{short(parameters(model)).replace(' ', '').lower()}"}
    keys |= {config_key(field): getattr(model, field) for field in SHAPE_FIELDS}
    keys |= {"tokens_per_iter": tokens_per_iter, "max_iters": iterations, "lr_decay_iters": iterations}
    keys |= {"warmup_iters": min(2000, iterations // 10), "eval_interval": max(iterations // 25, 1)}
    each = next(n for n in range(8, 0, -1) if gpus % n == 0)  # of a machine
    several = f"--nnodes={gpus // each} --rdzv_id=plan --rdzv_backend=c10d --rdzv_endpoint=node0:29500"
    join = "--standalone" if each == gpus else several  # to be typed on each machine, node0 the first
    launcher = f"torchrun {join} --nproc_per_node={each}" if gpus > 1 else "python"
    flags = " ".join(f"--{key}={value}" for key, value in keys.items())
    return f"{launcher} train.py config/{FAMILIES[model.arch].shipped} {flags}"


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
    add = parser.add_argument
    add("--gpus", help="the machine, as in 8xH200")
    add("--mfu", type=real_number(0.001, 1), help="the share of its peak, as in 0.61")
    add("--price", type=real_number(0, 1e9), help="of a GPU for an hour, as in 2.50")
    add("--arch", choices=FAMILIES, help="the family of shapes (default: all)")
    add("--vocab_size", type=whole_number(1, MOST["vocab_size"]), help="(the family's)")
    add("--block_size", type=whole_number(1, MOST["block_size"]), help=f"({BLOCK_SIZE})")
    add("--law", type=own_law, default=HOFFMANN, help="hoffmann, besiroglu, or constants: E,A,B,alpha,beta")
    options = parser.parse_args(argv)
    own = options.arch or options.vocab_size or options.block_size
    wrong = {
        "state how long to train: --flops=1e21, or --hours with --gpus, or --tokens of a model": not (
            options.flops or options.hours or options.tokens
        ),
        "--tokens of which model? state --config or --size": options.tokens
        and not (options.config or options.size),
        "--hours of which machine? state --gpus, as in --gpus=8xH200": options.hours and not options.gpus,
        "state both or neither of --gpus and --mfu, as in --gpus=8xH200 --mfu=0.61": bool(options.gpus)
        != bool(options.mfu),
        "--price of which machine? state --gpus and --mfu": options.price and not options.gpus,
        f"--size needs one family: --arch={' or '.join(FAMILIES)}": options.size and not options.arch,
        "--config states the model: leave out --arch, --vocab_size and --block_size": options.config and own,
    }
    for message, is_so in wrong.items():
        if is_so:
            raise UserError(message)
    options.arch = [options.arch] if options.arch else list(FAMILIES)
    options.block_size = options.block_size or BLOCK_SIZE
    return options


def own_law(text: str) -> Law:
    if named := {"hoffmann": HOFFMANN, "besiroglu": BESIROGLU}.get(text):
        return named
    constants = [real_number(0, 1e30)(each) for each in text.split(",")]
    if len(constants) != 5 or max(constants[3:]) > 3:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not E,A,B,alpha,beta, as in 1.69,406.4,410.7,0.34,0.28"
        )
    return Law(*constants)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
