"""torchtitan's own Trainer training Qwen3 or LLaMA of our shape: https://github.com/pytorch/torchtitan.

    python -m bench.peer_torchtitan config/full_qwen3_1.8b_optimal.py --max_iters=31 --eval_interval=0

Takes train.py's arguments. The model, torch.compile, mixed precision (autocast on one GPU, FSDP on several),
the optimizer and the loop are torchtitan's, from its train_spec with two parts of ours: a data loader that
returns our batches, and a metrics processor that keeps rows. Its own line of each row stays in the log; MFU
there is by another formula. Times and the last line, JSON, are as those of bench.peer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.peer import NOT_COUNTED, memory, report
from bench.peer_model import check_parameters
from bench.peers import TORCHTITAN_VERSION, check_torchtitan, obstacle
from bench.process import end_with_status
from bench.torchtitan_job import (
    FLAVOR,
    NAME,
    llama_arguments,
    make_job,
    qwen3_arguments,
    scaling_arguments,
)
from common.errors import UserError
from training.batches.fingerprint import agree_on_data
from training.batches.loader import Loader
from training.batches.sources import make_windows, open_sources
from training.configuration.keys import TrainConfig
from training.hardware.gpu_monitor import GpuMonitor, watch_gpus
from training.memory.micro_batch import resolve_micro_batch
from training.pretrained.settings import load_run_config
from training.process.exit_status import end_process
from training.process.world import World, check_device, is_launched, launch_info, machine_size

# What torchrun tells its processes; torchtitan reads it in a run of one process, too. Port 0: any free one.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

START_TIMEOUT_S = 3600  # for joining: one rank may have to scan a large dataset first


def main(argv: list[str]) -> int:
    rank, local_rank, size = launch_info()
    config = load_run_config(argv, size)
    check_torchtitan()
    if reason := obstacle("torchtitan", config, size):
        raise UserError(f"bench.peer_torchtitan: {reason}")
    check_device(config)
    sources = open_sources(config, scan=rank == 0)
    device = torch.device(config.device, local_rank)
    world = World(rank, local_rank, size, device, machine_size())
    titan = import_torchtitan()
    start_processes(titan, config, world)
    config, _ = resolve_micro_batch(config, world)  # as train.py does here, so both have the same numbers
    agree_on_data(sources, world)
    # its trainer takes batches from the host, and copies each micro-batch itself
    on_host = dataclasses.replace(world, device=torch.device("cpu"))
    loader = Loader(make_windows(sources, config)["train"], config, on_host)
    facts, rows = train(titan, config, world, loader)
    if world.is_main:
        print(json.dumps(report(config, world, f"torchtitan {TORCHTITAN_VERSION}", facts, rows)))
    loader.close()
    if world.size == 1:
        torch.distributed.destroy_process_group()  # NCCL warns about groups that are left open
    end_process(world)
    return 0


@dataclasses.dataclass(frozen=True)
class Titan:
    """What is used of torchtitan."""

    trainer: type
    job: type  # JobConfig
    metrics: type  # MetricsProcessor
    spec: Any  # the module of train_spec
    distributed: Any  # the module of process groups
    models: dict[str, Any]  # the modules of its models


def import_torchtitan() -> Titan:
    """Imported where it is used: it is optional. Raises UserError."""
    try:
        import torchtitan.components.metrics as metrics
        import torchtitan.distributed.utils as distributed
        import torchtitan.models.llama3 as llama3
        import torchtitan.models.llama3.model.args as llama3_args
        import torchtitan.models.qwen3 as qwen3
        import torchtitan.protocols.train_spec as train_spec
        from torchtitan.config import JobConfig
        from torchtitan.tools.logging import init_logger
        from torchtitan.train import Trainer
    except ImportError as error:
        raise UserError(
            f"torchtitan cannot be imported ({error}): pip install -r requirements-peers.txt; it was used "
            f"with torch 2.11, and this is {torch.__version__}"
        ) from error
    init_logger()
    models = {"qwen3": qwen3, "llama3": llama3, "llama3_args": llama3_args}
    return Titan(Trainer, JobConfig, metrics.MetricsProcessor, train_spec, distributed, models)


def start_processes(titan: Titan, config: TrainConfig, world: World) -> None:
    """torchtitan's process group, of one process, too. All ranks."""
    if not is_launched():
        os.environ.update(ALONE)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    comm = titan.job().comm
    comm.init_timeout_seconds = START_TIMEOUT_S
    titan.distributed.init_distributed(comm, base_folder=config.out_dir)


# --- training ---


class Batches:
    """Our batches, in the form that its trainer takes: one micro-batch after another, on the host."""

    def __init__(self, loader: Loader):
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            x, y = self.loader.next()  # (A, B, T)
            targets = torch.where(y < 0, NOT_COUNTED, y)  # negative: padding of packed documents
            for i in range(len(x)):
                yield {"input": x[i].contiguous()}, targets[i].contiguous()

    # its checkpoints would hold them; here it makes none
    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class RowLog:
    """Rows as those of bench.peer, of what torchtitan's trainer logs. It comes before torchtitan's
    MetricsProcessor in a class of both, and prints its line, too. Its steps are numbered from 1."""

    def keep(self, config: TrainConfig, world: World, monitor: GpuMonitor) -> None:
        self.config, self.world, self.monitor = config, world, monitor
        self.rows: list[dict] = []
        self.first, self.began = 0, time.perf_counter()  # of the current row

    def should_log(self, step: int) -> bool:
        return not (step - 1) % self.config.log_interval or step == self.config.max_iters

    def log(self, step: int, global_avg_loss: float, *others: Any, **more: Any) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()  # sync point
        now, iteration = time.perf_counter(), step - 1
        seconds = (now - self.began) / (iteration + 1 - self.first)
        row: dict[str, Any] = {"iter": iteration, "loss": float(global_avg_loss), "time_ms": 1000 * seconds}
        row["memory"] = memory(self.world)
        self.rows.append(row | self.monitor.take([(self.began, now)]))
        self.first, self.began = iteration + 1, now
        super().log(step, global_avg_loss, *others, **more)  # type: ignore[misc]  # sets the peak memory to 0


def train(titan: Titan, config: TrainConfig, world: World, loader: Loader) -> tuple[dict, list[dict]]:
    """Facts about what was run, and its rows. All ranks."""

    class Metrics(RowLog, titan.metrics):  # type: ignore[name-defined]
        pass

    base, arguments = model_of(titan, config)
    spec = dataclasses.replace(
        base,
        model_args={FLAVOR: arguments},
        build_dataloader_fn=lambda **_: Batches(loader),
        build_tokenizer_fn=None,  # the batches are tokens already
        build_metrics_processor_fn=lambda job, dims, _: Metrics(job, dims),
        state_dict_adapter=None,  # reads weights from a folder, of which there is none
    )
    titan.spec.register_train_spec(NAME, spec)
    job = make_job(titan.job(), config, world.size)
    trainer = titan.trainer(job)
    try:
        (model,) = trainer.model_parts
        parameters = check_parameters(model, config.model_config(), "torchtitan")
        monitor = watch_gpus(world)
        trainer.metrics_processor.keep(config, world, monitor)
        trainer.train()
        monitor.close()
    finally:
        trainer.close()
    rows = trainer.metrics_processor.rows
    if not rows or rows[-1]["iter"] != config.max_iters - 1:
        raise UserError(f"torchtitan ended before iteration {config.max_iters}; its log has the reason")
    facts = {"class": base.model_cls.__name__, "parameters": parameters}
    return {**facts, **about_run(config, world, job)}, rows


def model_of(titan: Titan, config: TrainConfig) -> tuple[Any, Any]:
    """The train_spec of torchtitan's model, and the model's arguments for our shape."""
    model = config.model_config()
    if model.qk_norm:
        qwen3 = titan.models["qwen3"]
        return qwen3.get_train_spec(), qwen3.Qwen3ModelArgs(**qwen3_arguments(model))
    classes = titan.models["llama3_args"]
    scaling = classes.RoPEScalingArgs(**scaling_arguments(model))
    arguments = classes.TransformerModelArgs(**llama_arguments(model), rope_scaling_args=scaling)
    return titan.models["llama3"].get_train_spec(), arguments


def about_run(config: TrainConfig, world: World, job: Any) -> dict:
    precision = "bfloat16 by FSDP" if world.size > 1 else "bfloat16 autocast"
    float8 = ", float8 of torchao but in the head" if job.model.converters else ""
    return {
        "compile": config.compile,
        "attention": "sdpa, as torchtitan calls it",
        "recomputation": job.activation_checkpoint.mode,
        "precision": f"{precision}, float32 weights{float8}",
    }


if __name__ == "__main__":
    sys.exit(end_with_status(main, sys.argv[1:]))
