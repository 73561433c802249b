"""Hugging Face transformers training the same model: a comparison with a program that anyone can run.

    python -m bench.peer config/full_qwen3_1.8b_optimal.py --max_iters=31 --log_interval=5 --eval_interval=0
    python -m bench.peer config/full_qwen3_1.8b_optimal.py --liger --max_iters=31 --log_interval=5

Takes train.py's arguments and trains on the same inputs and targets, of mixtures and packed documents, too.
The recipe is the usual one: fp32 weights under bf16 autocast, SDPA, torch.compile, fused AdamW,
clip_grad_norm_, DDP under torchrun. The number of parameters must equal ours. MFU is computed by formula v3
with the same peak. Keys for which transformers has nothing similar have no effect if they change only how
the work is done (strategies, attention backends, low precision); the others are refused. The last line of the
output is JSON with rows as in a run record. The time of a row is the wall time of log_interval iterations,
divided by their number; the device is synchronized at both ends.

--liger gives the model liger-kernel's kernels: RMSNorm, rotation, SwiGLU, and the loss in one with the head.
It then runs without torch.compile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.peer_model import build, check_parameters, import_transformers, use_liger
from bench.peers import obstacle
from bench.process import end_with_status
from common.errors import UserError
from mfu_versions import model_builder_v3 as v3
from training.batches.fingerprint import agree_on_data
from training.batches.loader import Loader
from training.batches.sources import make_windows, open_sources
from training.configuration.keys import TrainConfig
from training.configuration.seeds import DROPOUT, stream_seed
from training.hardware.gpu_monitor import watch_gpus
from training.hardware.peaks import resolve_peak
from training.memory.micro_batch import resolve_micro_batch
from training.optimization.schedule import learning_rate
from training.pretrained.settings import load_run_config
from training.process.exit_status import end_process
from training.process.memory import GIB
from training.process.world import World, check_device, init_world, launch_info
from training.records.utilization import utilization

Step = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]  # (x, y, learning rate) -> mean loss
LIGER = "--liger"
NOT_COUNTED = -100  # the target that transformers leaves out of the loss


def main(argv: list[str]) -> int:
    liger = LIGER in argv
    config = load_run_config([word for word in argv if word != LIGER], launch_info()[2])
    check_keys(config)
    transformers = import_transformers()
    if liger:
        if reason := obstacle("liger", config):
            raise UserError(f"{LIGER}: {reason}; leave it out")
        config = dataclasses.replace(config, compile=False)
    check_device(config)
    sources = open_sources(config, scan=launch_info()[1] == 0)
    world = init_world(config)
    config, _ = resolve_micro_batch(config, world)  # as train.py does here, so both have the same numbers
    agree_on_data(sources, world)
    torch.manual_seed(config.seed)
    kernels = use_liger(config.model_config()) if liger else ""
    with world.device:
        model = build(transformers, config.model_config())
    torch.manual_seed(stream_seed(config.seed, DROPOUT, world.rank))
    parameters = check_parameters(model, config.model_config())
    loader = Loader(make_windows(sources, config)["train"], config, world)
    rows = train(config, world, make_step(model, config, world), loader)
    if world.is_main:
        program = f"{kernels}transformers {transformers.__version__}"
        facts = about_model(model, config, parameters)
        print(json.dumps(report(config, world, program, facts, rows)))
    loader.close()
    end_process(world)
    return 0


def check_keys(config: TrainConfig) -> None:
    """Raises UserError where train.py would train on other batches, or on other targets, than the peer."""
    if config.dtype == "float16":
        raise UserError("bench.peer has no loss scale for float16; use --dtype=bfloat16 or float32")
    if config.doc_masking:
        raise UserError(
            "doc_masking=True keeps attention inside each document, and bench.peer's models attend to the "
            "whole window, so they would train something else; use --doc_masking=False for both"
        )
    if config.init_from != "scratch":
        raise UserError(
            f"init_from={config.init_from!r} continues a run, and bench.peer always starts with random "
            "weights and the first batch; use --init_from=scratch"
        )
    if config.init_weights is not None:
        raise UserError("init_weights: bench.peer always starts with random weights; leave it out")
    if config.max_iters < 1:
        raise UserError("max_iters=0 leaves nothing to time")


# --- training ---


def make_step(model: torch.nn.Module, config: TrainConfig, world: World) -> Step:
    """The step makes one iteration as most training scripts do."""
    ddp = None
    if world.size > 1:
        ids = [world.local_rank] if world.device.type == "cuda" else None
        model = ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    forward = torch.compile(model) if config.compile else model
    parameters = list(model.parameters())
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=betas, weight_decay=config.weight_decay, fused=True
    )
    use_bf16 = config.dtype == "bfloat16"

    def step(x: torch.Tensor, y: torch.Tensor, rate: float) -> torch.Tensor:
        losses = []
        targets = torch.where(y < 0, NOT_COUNTED, y)  # negative: padding of packed documents
        for i, ids in enumerate(x):
            # gradients are reduced once for each iteration, after its last micro-step
            with ddp.no_sync() if ddp and i < len(x) - 1 else contextlib.nullcontext():
                with torch.autocast(world.device.type, torch.bfloat16, enabled=use_bf16):
                    # labels alone would be shifted: without the target of each window's last token
                    loss = forward(input_ids=ids, labels=targets[i], shift_labels=targets[i]).loss
                (loss / len(x)).backward()
            losses.append(loss.detach())
        if config.grad_clip:
            torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    return step


def train(config: TrainConfig, world: World, step: Step, loader: Loader) -> list[dict]:
    """One row for the first iteration, then one for every log_interval, as in training/records/rows.py."""
    rows: list[dict] = []
    monitor = watch_gpus(world)  # after the loader, as in train.py
    first, began = 0, time.perf_counter()  # of the current row
    for iteration in range(config.max_iters):
        loss = step(*loader.next(), learning_rate(iteration, config))
        if iteration % config.log_interval and iteration != config.max_iters - 1:
            continue
        value = loss.item()  # sync point
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds = (now - began) / (iteration + 1 - first)
        rows.append({"iter": iteration, "loss": value, "time_ms": 1000 * seconds, "memory": memory(world)})
        rows[-1] |= monitor.take([(began, now)])
        first, began = iteration + 1, now
    monitor.close()
    return rows


def memory(world: World) -> dict | None:
    if world.device.type != "cuda":
        return None
    return {
        "max_allocated_gb": torch.cuda.max_memory_allocated() / GIB,
        "max_reserved_gb": torch.cuda.max_memory_reserved() / GIB,
    }


# --- the result ---


def about_model(model: torch.nn.Module, config: TrainConfig, parameters: int) -> dict:
    return {
        "class": type(model).__name__,
        "parameters": parameters,
        "compile": config.compile,
        "attention": f"sdpa, as {type(model).__name__} calls it",
        "precision": f"{config.dtype}{' autocast' * (config.dtype == 'bfloat16')}, float32 weights",
    }


def report(config: TrainConfig, world: World, program: str, facts: dict, rows: list[dict]) -> dict:
    """What is printed: the program with its version, facts about what was run, and rows with the fields that
    a run record's rows have. `rows` have iter, loss, time_ms and memory."""
    flops = v3.count_flops(config.model_config(), config.block_size)
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    peak = resolve_peak(config.peak_tflops, name, config.dtype, config.use_sparse_specs, world.device)
    tokens = config.samples_per_iter(world.size) * config.block_size
    for row in rows:
        rate = tokens / (row["time_ms"] / 1000)
        mfu, reason = None, peak.reason
        if row["iter"] == 0:
            reason = "the first iteration includes compilation and warm-up"
        elif reason is None:
            try:
                mfu = utilization(
                    rate, world.size, flops, peak, {"calculation_method": v3.CALCULATION_METHOD}
                )
            except ValueError as error:
                reason = str(error)
        row |= {"tokens_per_sec": rate, "tokens_per_sec_per_gpu": rate / world.size}
        row |= {"mfu": mfu, "mfu_reason": reason}
    return {
        "peer": program,
        **facts,
        "num_gpus": world.size,
        "peak_tflops": peak.tflops,
        "training_iterations": rows,
    }


if __name__ == "__main__":
    sys.exit(end_with_status(main, sys.argv[1:]))
