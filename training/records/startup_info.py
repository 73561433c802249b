"""Collects the record's startup_info: what runs, on which machine, and how it is counted. The start-up report
shows the same."""

from __future__ import annotations

import hashlib
import subprocess
from typing import Any

import model_builder
from training.batches.sources import Source, describe_sources
from training.batches.windows import Split
from training.checkpoints.resume import Resume
from training.configuration.keys import ROOT, TrainConfig
from training.configuration.rules import cuda_graphs_obstacle
from training.hardware.gpu_monitor import GpuMonitor
from training.hardware.peaks import Peak
from training.memory.estimate import estimate_memory
from training.memory.micro_batch import MicroBatch
from training.optimization.ffn_backend import describe_ffn_backend, versions
from training.optimization.optimizer import describe_optimizer, optimizer_warnings
from training.optimization.schedule import schedule_warnings
from training.process.launch import launch_record
from training.records.machine import machine_info
from training.strategies.fused_sums import describe_fusion
from training.strategies.parallelize import strategy_name

OTHER_ATTENTION = "attention_backend={asked!r} runs as {used} [{kernel}]: {reason}"  # it may be much slower
# versions that a number depends on
SOFTWARE = ("python", "torch", "numpy", "cuda", "cudnn", "nccl", "driver")


def startup_info(
    config: TrainConfig,
    flops: dict[str, Any],
    peak: Peak,
    machine: dict[str, Any],
    attention: dict[str, Any],
    world_size: int,
    micro_batch: MicroBatch,
) -> dict[str, Any]:
    """Everything that does not depend on the data or on an earlier run. `flops` is the result of
    count_flops(), `machine` that of describe_hardware()."""
    model_config = config.model_config()
    model = model_builder.build_model(model_config)  # on the meta device, only to count parameters
    counts = model.count_parameters()
    obstacle = cuda_graphs_obstacle(config) if config.use_cuda_graphs else None
    graphs = {"cuda_graphs": {"asked": "CUDA Graph", "used": "eager step", "reason": obstacle}}
    return {
        "model": {
            "total_params": counts["total"],
            "trainable_params": counts["trainable"],
            "non_embedding_params": counts["non_embedding"],
            "architecture": model_config.to_dict(),
        },
        "optimizer": describe_optimizer(model, config),
        "hardware": {
            **{name: value for name, value in machine.items() if name not in SOFTWARE},
            "num_gpus": world_size,
            "precision": config.dtype,
            "parallelism": strategy_name(config, world_size),
            "peak": _describe_peak(peak),
            **({"peak_fp8": _describe_peak(peak.fp8)} if peak.fp8 else {}),
        },
        "software": {name: machine[name] for name in SOFTWARE} | versions(config),
        "git": git_state(),
        "attention": attention,
        **describe_ffn_backend(config),
        **describe_fusion(config),
        **(graphs if obstacle else {}),
        "flops": flops,
        "tokens_per_iter": config.samples_per_iter(world_size) * config.block_size,
        "micro_batch": micro_batch.to_dict(),
        "estimated_memory_gb": estimate_memory(config, world_size),
        "warnings": [
            *([OTHER_ATTENTION.format(**attention)] if attention.get("reason") else []),
            *schedule_warnings(config),
            *optimizer_warnings(config),
            *micro_batch.warnings(),
        ],
    }


def run_info(
    config: TrainConfig,
    sources: list[Source],
    windows: dict[str, Split],
    fingerprint: str,
    resume: Resume,
    pretrained: dict[str, Any] | None,
    world_size: int,
    monitor: GpuMonitor,
) -> dict[str, Any]:
    """The rest of the record's startup_info: the machine, the data, who started the run, and where it
    continues."""
    samples = config.max_iters * config.samples_per_iter(world_size)
    return {
        "machine": machine_info(monitor),
        "data": describe_sources(sources, windows, samples, fingerprint),
        "launch": launch_record(),
        "resumed_from": str(resume.checkpoint) if resume.checkpoint else None,
        # without their config.json, which is in each checkpoint
        "pretrained": pretrained and {key: value for key, value in pretrained.items() if key != "config"},
        "changed_since_checkpoint": resume.changed,
        "checkpoints_set_aside": resume.renamed,
    }


def git_state() -> dict:
    """Commit of this code and whether it was changed, with the difference's digest; None outside a git
    checkout."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "modified": None}
    commit = commit.strip()
    if not _git("status", "--porcelain", "-uno"):
        return {"commit": commit, "modified": False}
    return {
        "commit": commit,
        "modified": True,
        "difference_sha256": difference_sha256(working_difference(commit)),
    }


def working_difference(commit: str) -> str | None:
    """The tracked files' difference to this commit, as `git diff` shows it; None if git cannot say."""
    return _git("diff", "--no-color", "--no-ext-diff", commit, "--")


def difference_sha256(difference: str | None) -> str | None:
    return None if difference is None else hashlib.sha256(difference.encode("utf-8", "replace")).hexdigest()


def _git(*arguments: str) -> str | None:
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _describe_peak(peak: Peak) -> dict:
    return {
        "tflops_per_gpu": peak.tflops,
        "source": peak.source,
        "reason": peak.reason,
        "sparse": peak.sparse,
        "measured": peak.measured,
        **({"gpus": peak.gpus} if peak.gpus else {}),
    }
