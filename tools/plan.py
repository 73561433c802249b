"""Says what a budget buys: the compute-optimal model and tokens, the predicted loss, the hours.

    python -m tools.plan --flops=1.36e21
    python -m tools.plan --gpus=8xH200 --hours=72 --mfu=0.61 --arch=qwen3 --price=2.5
    python -m tools.plan --config=config/full_llama3_1.5b_optimal.py --tokens=101.909e9
    python -m tools.plan --arch=llama3 --size=1e9 --tokens=20e9

docs/plan.md has the formulas and their sources, the families, and says where the law was not fitted.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from common.arguments import real_number, user_folder, whole_number
from common.command import run_command
from common.errors import UserError
from common.text import aligned, shown
from mfu_versions import model_builder_v3 as v3
from model_config import MOST, ModelConfig, config_key, model_config
from plots.figure import tokens_text as short
from training.configuration.files_and_flags import load_config
from training.hardware.peaks import table_peak
from training.memory.gpus import find_card


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
CAVEAT = "fitted to MassiveText with 32,000 entries: compare plans of a family, or state your own --law"


# {family: (the shipped config, layers for 1,024 columns of width, d_ff / width, heads for a KV head)}
FAMILIES = {
    "qwen3": ("full_qwen3_1.8b_optimal.py", 12, 3, 2),
    "llama3": ("full_llama3_1.5b_optimal.py", 9, Fraction(7, 2), 2),
    "llama": ("full_llama_1.36b.py", 8, Fraction(8, 3), 1),
    "gpt2": ("full_gpt2_1.36b.py", 8, 4, 1),
}
WIDTHS = (*range(128, 2048, 128), *range(2048, 8192 + 1, 256))
ITERATIONS = 2000  # at least, where a batch of SEQUENCES allows it
SEQUENCES = (8, 256)  # of an iteration: least and most


@functools.cache
def parameters(model: ModelConfig) -> int:
    """All of them, embeddings included. Layers are alike, so two small models tell."""
    one, two = (v3.build_model(replace(model, n_layer=n)).count_parameters()["total"] for n in (1, 2))
    return one + (model.n_layer - 1) * (two - one)


def models_of(arch: str, vocab_size: int | None = None, block_size: int = 2048) -> list[ModelConfig]:
    """The model of each width, the smallest first: d_ff is rounded up to a multiple of 128."""
    _, layers, d_ff, share = FAMILIES[arch]
    models = []
    for width in WIDTHS:
        heads = width // (64 if width < 2048 else 128)
        shape = {"n_head": heads, "n_kv_head": heads // share, "n_embd": width}
        shape |= {
            "n_layer": max(round(layers * width / 1024), 1),
            "d_ff": math.ceil(d_ff * width / 128) * 128,
        }
        models.append(model_config(arch, vocab_size=vocab_size, block_size=block_size, **shape))
    return models


def model_for(arch: str, size: float, *like: int) -> ModelConfig:
    """About `size` parameters: the width whose model comes nearest, with as many layers as the size needs.
    like: vocab_size and block_size. Raises UserError."""
    models = models_of(arch, *like)
    least, most = parameters(models[0]), parameters(models[-1])
    if not least / 2 <= size <= 2 * most:
        hint = "a smaller --vocab_size makes smaller models"
        raise UserError(f"the {arch} family has {least:,} to {most:,} parameters, got {size:.4g}; {hint}")
    model = min(models, key=lambda model: abs(math.log(parameters(model) / size)))
    one, two = (parameters(replace(model, n_layer=n)) for n in (1, 2))
    return replace(model, n_layer=min(max(1 + round((size - one) / (two - one)), 1), MOST["n_layer"]))


class Plan(NamedTuple):
    model: ModelConfig
    tokens: float
    loss: float  # predicted, nats per token
    flops_per_token: int  # of training, by v3, with the full score matrix


def plan(law: Law, model: ModelConfig, tokens: float | None = None, flops: float = 0.0) -> Plan:
    """Of this model for so many tokens, or FLOPs."""
    each = v3.count_flops(model, model.block_size)["flops_per_token"]
    tokens = tokens or flops / each
    return Plan(model, tokens, law.loss(parameters(model), tokens), each)


def optimal(law: Law, models: Sequence[ModelConfig], flops: float) -> Plan:
    """The model of least loss at these FLOPs."""
    return min((plan(law, model, flops=flops) for model in models), key=lambda each: each.loss)


def main(argv: list[str]) -> None:
    options = parse(argv)
    law, like = options.law, (options.vocab_size, options.block_size)
    gpus, card, peak = machine(options.gpus) if options.gpus else (0, "", 0.0)
    per_hour = 3600 * gpus * peak * (options.mfu or 0)
    flops = options.hours * per_hour if options.hours else options.flops
    model = model_for(options.arch, options.size, *like) if options.size else None
    if options.config:
        config = load_config([str(options.config)])
        if config.init_weights:
            raise UserError(
                f"{options.config} begins with trained weights; the law is of training from scratch"
            )
        model = config.model_config()
    arches, named = [options.arch] if options.arch else [*FAMILIES], []
    if model:
        named = [plan(law, model, options.tokens, flops)]
        arches, like = [model.arch], (model.vocab_size, model.block_size)
        flops = named[0].tokens * named[0].flops_per_token
    best = [optimal(law, models_of(arch, *like), flops) for arch in arches if arch in FAMILIES]
    print("law: L = {} + {} / N^{} + {} / D^{}".format(*law[:2], law.alpha, law.B, law.beta))
    print(f"     {SOURCES.get(law, '--law')}; N: all parameters, D: tokens, L: nats per token")
    print(f"budget: {flops:.5g} training FLOPs by v3 (every matmul, the full score matrix)")
    if gpus:
        hours = flops / per_hour
        print(f"machine: {gpus} x {card}, peak {peak / 1e12:,.5g} TFLOPS each, MFU {100 * options.mfu:.4g} %")
        print(f"time: {hours:,.4g} hours, {gpus * hours:,.4g} GPU-hours")
        if options.price:
            print(f"cost: {options.price * gpus * hours:,.2f} at {options.price:,.2f} for a GPU-hour")
    print("", *table(named, best), "", *notes(law, named or best), sep="\n")
    if not options.config and len(arches) == 1:
        print("", "To train this model:", command((named or best)[0], max(gpus, 1)), sep="\n")


def table(named: list[Plan], best: list[Plan]) -> list[str]:
    head = ["model", "layers-heads-width-ff, KV heads", "parameters", "FLOPs/token", "tokens", "loss"]
    rows: list[list[str]] = []
    for model, tokens, loss, flops in [*named, *best]:
        name = model.arch + ", compute-optimal" * (len(rows) >= len(named))
        shape = f"{model.n_layer}-{model.n_head}-{model.n_embd}-{model.d_ff}, {model.n_kv_head}"
        amount = f"{tokens:,.0f} ({tokens / parameters(model):.1f} N)"
        rows.append([name, shape, f"{parameters(model):,}", f"{flops:,}", amount, f"{loss:.3f}"])
    return aligned(head, rows, head[:2])


def notes(law: Law, plans: list[Plan]) -> list[str]:
    """Where the law does not hold or was not fitted."""
    found = {CAVEAT: None} if law in SOURCES else {}
    for each in plans:
        amounts = {"parameters": parameters(each.model), "tokens": each.tokens}
        for name, (least, most) in FITTED.items() if law in SOURCES else ():
            if not least <= amounts[name] <= most:
                found[f"extrapolated: {amounts[name]:.3g} {name}; fitted to {least:.3g} to {most:.3g}"] = None
        if each.loss > (guess := math.log(each.model.vocab_size)):
            found[f"a loss of {each.loss:.3f} is above that of a random guess, {guess:.3f}"] = None
    return [f"note: {line}" for line in found]


def command(planned: Plan, gpus: int) -> str:
    """What trains a model of a family on so many GPUs, with the rates of its shipped configuration."""
    model, length = planned.model, planned.model.block_size
    sequences = 2 ** int(math.log2(max(planned.tokens / ITERATIONS / length, 1)))
    sequences = min(max(sequences, SEQUENCES[0]), SEQUENCES[1])
    tokens_per_iter = max(sequences // gpus, 1) * gpus * length  # each GPU has as many
    iterations = math.ceil(planned.tokens / tokens_per_iter)
    keys = {"out_dir": f"out-{model.arch}-{short(parameters(model)).replace(' ', '').lower()}"}
    fields = ("n_layer", "n_head", "n_kv_head", "n_embd", "d_ff", "vocab_size", "block_size")
    keys |= {config_key(field): getattr(model, field) for field in fields}
    keys |= {"tokens_per_iter": tokens_per_iter, "max_iters": iterations, "lr_decay_iters": iterations}
    keys |= {"warmup_iters": min(2000, iterations // 10), "eval_interval": max(iterations // 25, 1)}
    each = next(n for n in range(8, 0, -1) if gpus % n == 0)  # of a machine
    several = f"--nnodes={gpus // each} --rdzv_id=plan --rdzv_backend=c10d --rdzv_endpoint=node0:29500"
    join = "--standalone" if each == gpus else several  # to be typed on each machine, node0 the first
    launcher = f"torchrun {join} --nproc_per_node={each}" if gpus > 1 else "python"
    flags = " ".join(f"--{key}={value}" for key, value in keys.items())
    return f"{launcher} train.py config/{FAMILIES[model.arch][0]} {flags}"


# --- flags ---


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises UserError for flags that do not go together."""
    parser = argparse.ArgumentParser("python -m tools.plan", description=__doc__[:83], allow_abbrev=False)
    amount = real_number(1e-6, 1e30)  # far above any budget, far below an overflow
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--flops", type=amount, help="the budget: training FLOPs, by v3")
    length.add_argument("--hours", type=amount, help="the budget: hours of --gpus")
    length.add_argument("--tokens", type=amount, help="tokens on which the model trains")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--config", type=user_folder, help="a config file: the model")
    model.add_argument("--size", type=amount, help="parameters of a model of the family --arch")
    add = parser.add_argument
    add("--gpus", help="the machine, as in 8xH200")
    add("--mfu", type=real_number(0.001, 1), help="the share of its peak, as in 0.61")
    add("--price", type=real_number(0, 1e9), help="of a GPU for an hour, as in 2.50")
    add("--arch", choices=FAMILIES, help="the family of shapes (default: all)")
    add("--vocab_size", type=whole_number(1, MOST["vocab_size"]), help="(the family's)")
    add("--block_size", type=whole_number(1, MOST["block_size"]), default=2048, help="of a family (2048)")
    add("--law", type=own_law, default=HOFFMANN, help="hoffmann, besiroglu, or constants: E,A,B,alpha,beta")
    options = parser.parse_args(argv)
    no_model = options.tokens and not (options.config or options.size)
    of_machine = options.hours or options.price or options.gpus or options.mfu
    no_machine = of_machine and not (options.gpus and options.mfu)
    told_twice = options.config and (options.arch or options.vocab_size)
    for is_wrong, message in (
        (no_model, "--tokens of which model? state --config or --size"),
        (no_machine, "state both --gpus and --mfu, as in --gpus=8xH200 --mfu=0.61"),
        (options.size and not options.arch, f"--size needs one family: --arch={' or '.join(FAMILIES)}"),
        (told_twice, "--config states the model: leave out --arch and --vocab_size"),
    ):
        if is_wrong:
            raise UserError(message)
    return options


def machine(text: str) -> tuple[int, str, float]:
    """(GPUs, their name, the peak of one) of 8xH200. Raises UserError."""
    found = re.fullmatch(r"([1-9]\d{0,5})[x*](\S.*)", text)
    if not found:
        raise UserError(f"--gpus={shown(text)} is not a number and a GPU; write it as 8xH200")
    card = find_card(found[2]).device
    peak = table_peak(card, "bfloat16").flops
    if peak is None:
        raise UserError(f"--gpus={shown(text)}: no bf16 peak is known for the {card}")
    return int(found[1]), card, peak


def own_law(text: str) -> Law:
    if named := {"hoffmann": HOFFMANN, "besiroglu": BESIROGLU}.get(text):
        return named
    constants = [real_number(0, 1e30)(each) for each in text.split(",")]
    if len(constants) != 5 or max(constants[3:]) > 3:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not E,A,B,alpha,beta, as docs/plan.md has them")
    return Law(*constants)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
