"""What a plan says: the table of models, the notes, the command that trains a model."""

from __future__ import annotations

import math
import re

from common.text import aligned
from model_config import config_key
from plots.figure import tokens_text as short
from tools.plan.law import Law
from tools.plan.search import Plan
from tools.plan.shapes import FAMILIES, WIDTHS

SHAPE = "layers-heads-width-ff, KV heads"
ITERATIONS = 2000  # at least, where a batch of SEQUENCES allows it
SHAPE_FIELDS = ("n_layer", "n_head", "n_kv_head", "n_embd", "d_ff", "vocab_size", "block_size")
SEQUENCES = (8, 256)  # of an iteration: least and most


def model_lines(plan: Plan) -> list[str]:
    shape = plan.shape
    return [
        f"model: {shape.model.arch}, {SHAPE}: {shape}; {shape.parameters:,} parameters",
        f"tokens: {plan.tokens:,.0f}, {plan.tokens / shape.parameters:.1f} per parameter",
        f"FLOPs/token: {shape.flops_per_token:,}",
        f"predicted loss: {plan.loss:.3f}",
    ]


def table(families: list[list[Plan]]) -> str:
    """Of each family: the compute-optimal plan first."""
    head = ["arch", SHAPE, "parameters", "of optimal", "FLOPs/token", "tokens", "tokens/parameter", "loss"]
    rows = [
        [
            plan.shape.model.arch,
            str(plan.shape),
            short(plan.shape.parameters),
            f"{100 * plan.shape.parameters / plans[0].shape.parameters:.0f} %",
            f"{plan.shape.flops_per_token:.4g}",
            short(plan.tokens),
            f"{plan.tokens / plan.shape.parameters:.1f}",
            f"{plan.loss:.3f}",
        ]
        for plans in families
        for plan in plans
    ]
    return "\n".join(aligned(head, rows, ("arch", SHAPE)))


def notes(law: Law, plans: list[Plan], families: list[list[Plan]], dataset: str) -> list[str]:
    """Where the law does not hold or was not fitted, and where the best shape is not in its family."""
    found = [law.caveat]
    for best, *_ in families:
        if best.shape.model.n_embd in (WIDTHS[0], WIDTHS[-1]):
            found.append(
                f"the best {best.shape.model.arch} model of these FLOPs is beyond the sizes of its family"
            )
    for plan in plans:
        found += law.beyond(plan.shape.parameters, plan.tokens)
        vocab_size = plan.shape.model.vocab_size
        if plan.loss > (guess := math.log(vocab_size)):
            found.append(
                f"a loss of {plan.loss:.3f} is above that of a random guess, ln({vocab_size}) = "
                f"{guess:.3f}: the law does not hold for this plan"
            )
    if (size := re.search(r"_(\d+)b(_|$)", dataset)) and len(plans) == 1:
        epochs = plans[0].tokens / (int(size[1]) * 1e9)
        said = f"{short(plans[0].tokens)} tokens are {epochs:.2g} epochs of {dataset}, {size[1]} B by name"
        found.append(said + "; the law counts different tokens" * (epochs > 1))
    return [f"note: {line}" for line in dict.fromkeys(found) if line]


def command(plan: Plan, gpus: int) -> str:
    """What trains a model of a family on so many GPUs, with the rates of its shipped configuration."""
    model = plan.shape.model
    sequences = 2 ** int(math.log2(max(plan.tokens / ITERATIONS / model.block_size, 1)))
    sequences = min(max(sequences, SEQUENCES[0]), SEQUENCES[1])
    tokens_per_iter = max(sequences // gpus, 1) * gpus * model.block_size  # each GPU has as many
    iterations = math.ceil(plan.tokens / tokens_per_iter)
    out_dir = f"out-{model.arch}-{short(plan.shape.parameters).replace(' ', '').lower()}"
    keys = {
        "out_dir": out_dir,
        **{config_key(field): getattr(model, field) for field in SHAPE_FIELDS},
        "tokens_per_iter": tokens_per_iter,
        "max_iters": iterations,
        "lr_decay_iters": iterations,
        "warmup_iters": min(2000, iterations // 10),
        "eval_interval": max(iterations // 25, 1),
    }
    flags = " ".join(f"--{key}={value}" for key, value in keys.items())
    each = next(n for n in range(8, 0, -1) if gpus % n == 0)  # of a machine
    several = f"--nnodes={gpus // each} --rdzv_id=plan --rdzv_backend=c10d --rdzv_endpoint=node0:29500"
    join = "--standalone" if each == gpus else several  # to be typed on each machine, node0 the first
    launcher = f"torchrun {join} --nproc_per_node={each}" if gpus > 1 else "python"
    return f"{launcher} train.py config/{FAMILIES[model.arch].shipped} {flags}"
