"""What every peer has: when it can be compared, how it joins our batches, and the rows that it prints.

Rows have the fields of a run record. The time of a row is the wall time of log_interval iterations, divided
by their number; the device is synchronized at both ends. MFU is by formula v3 with our peak.
"""

from __future__ import annotations

import importlib.util
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

import model_builder
from common.errors import UserError
from mfu_versions import model_builder_v3 as v3
from model_config import ModelConfig
from training.batches.sources import Source
from training.configuration.keys import TrainConfig
from training.hardware.gpu_monitor import watch_gpus
from training.hardware.peaks import resolve_peak
from training.process.exit_status import end_process
from training.process.memory import GIB
from training.process.world import World, init_world
from training.records.utilization import utilization

NOT_COUNTED = -100  # the target that torch's cross entropy leaves out


class Program(ABC):
    """Another program that trains our model."""

    name: ClassVar[str]  # what --peer takes

    @abstractmethod
    def require(self) -> None:
        """Raises UserError if it is not installed."""

    def obstacle(self, config: TrainConfig) -> str | None:
        """Why it cannot train this configuration; None if nothing known here speaks against it."""
        if config.doc_masking:
            return "its attention goes over the whole window; use --doc_masking=False for both"
        if config.init_from != "scratch" or config.init_weights is not None:
            return "it always begins with random weights; leave out init_from and init_weights"
        if config.dtype == "float16":
            return "float16 needs a loss scale, which is not compared; use bfloat16 or float32"
        if config.max_iters < 1:
            return "max_iters=0 leaves nothing to time"
        return self.of_model(config, config.model_config())

    def of_model(self, config: TrainConfig, model: ModelConfig) -> str | None:
        """The same, of the program's own models and settings."""
        return None

    def follows(self, config: TrainConfig) -> tuple:
        """Values of the keys that it follows beside shape, batch, dtype and compile."""
        return ()

    def join(self, config: TrainConfig) -> World:
        """All ranks. Its processes meet."""
        return init_world(config)

    @abstractmethod
    def train(self, config: TrainConfig, world: World, sources: list[Source]) -> dict[str, Any]:
        """All ranks. Facts: 'peer' is its name and version, 'parameters' their number; and its rows."""

    def end(self, world: World) -> None:
        """All ranks. The last call of a process."""
        end_process(world)


def need(module: str, peer: str, command: str) -> None:
    """Raises UserError if a module is not installed."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"--peer={peer} needs {module}: {command}")


def check_parameters(model: torch.nn.Module, config: ModelConfig, program: str) -> int:
    """Their number of trained parameters. Raises UserError if ours is another one: then the models differ."""
    theirs = sum(each.numel() for each in model.parameters() if each.requires_grad)
    ours = model_builder.build_model(config).count_parameters()["total"]
    if theirs != ours:
        raise UserError(
            f"{type(model).__name__} has {theirs:,} parameters, our {config.arch} {ours:,}; "
            f"a key asks for a shape that {program} does not have"
        )
    return theirs


class Rows:
    """One for the first iteration, then one for every log_interval, as in training/records/rows.py. Made when
    the training begins."""

    def __init__(self, config: TrainConfig, world: World):
        self.config, self.on_gpu = config, world.device.type == "cuda"
        self.monitor = watch_gpus(world)
        self.rows: list[dict[str, Any]] = []
        self.first, self.began = 0, time.perf_counter()  # of the current row

    def due(self, iteration: int) -> bool:
        return not iteration % self.config.log_interval or iteration == self.config.max_iters - 1

    def add(self, iteration: int, loss: float) -> None:
        memory = None
        if self.on_gpu:
            torch.cuda.synchronize()  # sync point
            most = {"allocated": torch.cuda.max_memory_allocated, "reserved": torch.cuda.max_memory_reserved}
            memory = {f"max_{name}_gb": read() / GIB for name, read in most.items()}
        now = time.perf_counter()
        milliseconds = 1000 * (now - self.began) / (iteration + 1 - self.first)
        row = {"iter": iteration, "loss": loss, "time_ms": milliseconds, "memory": memory}
        self.rows.append(row | self.monitor.take([(self.began, now)]))
        self.first, self.began = iteration + 1, now

    def close(self, program: str) -> list[dict[str, Any]]:
        """The rows. Raises UserError if they end early."""
        self.monitor.close()
        last = self.config.max_iters - 1
        if not self.rows or self.rows[-1]["iter"] != last:
            raise UserError(f"{program} ended before iteration {last + 1}; its log has the reason")
        return self.rows


def report(config: TrainConfig, world: World, found: dict[str, Any]) -> dict[str, Any]:
    """What is printed: the facts, with the rates of the rows, which have iter, loss, time_ms and memory."""
    flops = v3.count_flops(config.model_config(), config.block_size)
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    peak = resolve_peak(config.peak_tflops, name, config.dtype, config.use_sparse_specs, world.device)
    for row in found["training_iterations"]:
        rate = 1000 * config.samples_per_iter(world.size) * config.block_size / row["time_ms"]
        row |= {"tokens_per_sec": rate, "tokens_per_sec_per_gpu": rate / world.size}
        row |= {"mfu": None, "mfu_reason": peak.reason}
        if row["iter"] == 0:
            row["mfu_reason"] = "the first iteration includes compilation and warm-up"
        elif peak.flops:
            method = {"calculation_method": v3.CALCULATION_METHOD}
            try:
                row["mfu"] = utilization(rate, world.size, flops, peak, method)
            except ValueError as error:
                row["mfu_reason"] = str(error)
    return {**found, "num_gpus": world.size, "peak_tflops": peak.tflops}
