"""Writes a planned model as a configuration that train.py takes."""

from __future__ import annotations

import json
import math
from pathlib import Path

from common import durable_file
from common.errors import UserError
from tools.plan.search import Plan
from tools.plan.shapes import FAMILIES

ITERATIONS = 2000  # at least, where a batch of the largest or a smaller size allows it
SEQUENCES = (8, 256)  # per iteration: least and most
MOST_ITERATIONS = 2**31


def check_path(path: Path) -> None:
    """Raises UserError; called before anything is computed."""
    if path.suffix != ".py":
        raise UserError(f"--write={path} must end in .py, as in config/NAME.py")
    if path.exists() or path.is_symlink():
        raise UserError(f"--write={path} exists, and is not overwritten; state another name or delete it")
    if not path.parent.is_dir():
        raise UserError(f"--write={path}: there is no folder {path.parent}")


def write(path: Path, plan: Plan, dataset: str | None) -> None:
    durable_file.write_bytes(path, text(path.stem, plan, dataset).encode("utf-8"))


def text(name: str, plan: Plan, dataset: str | None) -> str:
    shape, model = plan.shape, plan.shape.model
    sequences = sequences_per_iteration(plan)
    max_iters = math.ceil(plan.tokens / (sequences * model.block_size))
    if max_iters > MOST_ITERATIONS:
        raise UserError(f"--write: {plan.tokens:.3g} tokens are {max_iters:.3g} iterations, more than 2^31")
    vocabulary = "" if model.vocab_size % 64 == 0 else "  # no multiple of 64: a slower output matmul"
    return f"""\
# A {shape.name} model of {shape.parameters:,} parameters for {plan.tokens:,.0f} tokens, by tools.plan:
# {plan.flops:.4g} training FLOPs by v3, predicted loss {plan.loss:.3f} (docs/plan.md). Unmeasured.
out_dir = {json.dumps("out-" + name.replace("_", "-"))}
dataset = {json.dumps(dataset or FAMILIES[shape.name].dataset)}

# model
arch_preset = "{shape.name}"
n_layer = {model.n_layer}
n_head = {model.n_head}
num_key_value_heads = {model.n_kv_head}
n_embd = {model.n_embd}
d_ff = {model.d_ff}
vocab_size = {model.vocab_size}{vocabulary}
block_size = {model.block_size}

# batch: the same tokens per iteration on every number and size of GPUs that can divide and hold them
batch_size = "auto"
gradient_accumulation_steps = "auto"
tokens_per_iter = {sequences * model.block_size:_}  # {sequences} sequences
dtype = "bfloat16"
compile = True
attention_backend = "sdpa"

# training: the rates of the shipped configurations; not tuned for this size
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = {min(2000, max_iters // 10)}
lr_decay_iters = {max_iters}
max_iters = {max_iters}
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0

# evaluation and logging
eval_interval = {max(max_iters // 25, 1)}
eval_iters = 100
eval_batch_size = 16
log_interval = 10
"""


def sequences_per_iteration(plan: Plan) -> int:
    """A power of two: the largest that leaves ITERATIONS iterations, within SEQUENCES."""
    wanted = plan.tokens / ITERATIONS / plan.shape.model.block_size
    least, most = SEQUENCES
    return min(max(1 << max(math.floor(math.log2(max(wanted, 1))), 0), least), most)
