"""Collects the record's startup_info: what runs, on which machine, and how it is counted. The start-up report
shows the same."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass, field
from typing import Any

import model_builder
from common.text import one_line
from training.batches.sources import RunData, describe_data
from training.checkpoints.resume import Resume
from training.configuration.choices import find
from training.configuration.keys import ROOT, TrainConfig
from training.hardware.gpu_monitor import GpuMonitor
from training.hardware.peaks import Peak
from training.optimization.optimizer import describe_optimizer, optimizer_warnings
from training.optimization.schedule import schedule_warnings
from training.process.launch import launch_record
from training.process.torch_build import version_warnings
from training.records.machine import machine_info
from training.strategies.fused_sums import describe_fusion
from training.strategies.parallelize import strategy_name

OTHER_ATTENTION = "attention_backend={asked!r} runs as {used} [{kernel}]: {reason}"  # it may be much slower
# versions that a number depends on
SOFTWARE = ("python", "torch", "numpy", "cuda", "cudnn", "nccl", "driver")
GIT_ERRORS = (OSError, subprocess.SubprocessError)  # git refuses, hangs, or is not there


@dataclass(frozen=True)
class Setup:
    """What was found or chosen before the record begins, as each part describes itself."""

    flops: dict[str, Any]  # count_flops()
    peak: Peak
    attention: dict[str, Any]
    memory: dict[str, Any]  # what fits: micro_batch, estimated_memory_gb, warnings
    low_precision: dict[str, Any] = field(default_factory=dict)
    cuda_graphs: dict[str, str | None] = field(default_factory=dict)  # asked, used, reason; it may change


def startup_info(
    config: TrainConfig, world_size: int, setup: Setup, machine: dict[str, Any]
) -> dict[str, Any]:
    """Everything that does not depend on the data or on an earlier run. `machine`: describe_hardware()'s."""
    attention, peak = setup.attention, setup.peak
    model_config = config.model_config()
    model = model_builder.build_model(model_config)  # on the meta device, only to count parameters
    counts = model.count_parameters()
    backend, asked = find("ffn_backend", config.ffn_backend), config.ffn_backend
    feed_forward = {"ffn_backend": {"used": asked, "line": line}} if (line := backend.describe()) else {}
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
            **{f"peak_{name}": _describe_peak(one) for name, one in peak.of_formats.items()},
        },
        "software": {name: machine[name] for name in SOFTWARE} | backend.versions(),
        "git": git_state(),
        "attention": attention,
        **feed_forward,
        **describe_fusion(config),
        **({"cuda_graphs": setup.cuda_graphs} if setup.cuda_graphs else {}),
        "flops": setup.flops,
        "tokens_per_iter": config.samples_per_iter(world_size) * config.block_size,
        "micro_batch": setup.memory["micro_batch"],
        "estimated_memory_gb": setup.memory["estimated_memory_gb"],
        "warnings": [
            *version_warnings(),
            *([OTHER_ATTENTION.format(**attention)] if attention.get("reason") else []),
            *schedule_warnings(config),
            *optimizer_warnings(config),
            *setup.memory["warnings"],
        ],
        **setup.low_precision,
    }


def accumulation_steps(config: TrainConfig, world_size: int) -> dict[str, int]:
    """The steps of one GPU and those of all: a log with one number for both once hid a wrong MFU."""
    per_gpu = config.micro_steps
    return {
        "gradient_accumulation_steps_per_gpu": per_gpu,
        "gradient_accumulation_steps_global": per_gpu * world_size,
    }


def run_info(
    config: TrainConfig,
    world_size: int,
    data: RunData,
    resume: Resume,
    pretrained: dict[str, Any] | None,
    monitor: GpuMonitor,
) -> dict[str, Any]:
    """The rest of the record's startup_info: the machine, the data, who started the run, and where it
    continues."""
    samples = config.max_iters * config.samples_per_iter(world_size)
    return {
        "machine": machine_info(monitor),
        "data": describe_data(data, samples),
        "launch": launch_record(),
        "resumed_from": str(resume.checkpoint) if resume.checkpoint else None,
        # without their config.json, which is in each checkpoint
        "pretrained": pretrained and {key: value for key, value in pretrained.items() if key != "config"},
        "changed_since_checkpoint": resume.changed,
        "checkpoints_set_aside": resume.renamed,
    }


def git_state() -> dict[str, Any]:
    """Commit of this code and whether it was changed, with the difference's digest. What git does not say is
    None, and `reason` says why."""
    state: dict[str, Any] = {"commit": None, "modified": None}
    try:
        state["commit"] = commit = _git("rev-parse", "HEAD").strip()
        state["modified"] = bool(_git("status", "--porcelain", "-uno"))
        if state["modified"]:
            state["difference_sha256"] = difference_sha256(working_difference(commit))
    except GIT_ERRORS as error:
        state["reason"] = str(error)
    return state


def code_text(code: dict[str, Any]) -> str:
    """'commit 1234, modified', of what git_state() or a seal says of the code, and why something is not
    known."""
    commit, why = code["commit"], code.get("note") or code.get("reason")
    changes = {True: ", modified", None: ", perhaps modified"}.get(code["modified"], "")
    text = f"commit {commit}{changes}" if commit else "commit not known"
    return f"{text} ({why})" if why else text


def working_difference(commit: str) -> str:
    """The tracked files' difference to this commit, as `git diff` shows it. Raises one of GIT_ERRORS."""
    return _git("diff", "--no-color", "--no-ext-diff", commit, "--")


def difference_sha256(difference: str) -> str:
    return hashlib.sha256(difference.encode("utf-8", "replace")).hexdigest()


def _git(*arguments: str) -> str:
    """What git prints. Of a checkout that another user owns, too: its code runs already."""
    command = ["git", "-c", f"safe.directory={ROOT}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=10)
    if done.returncode:
        said = one_line(done.stderr, 300)
        raise subprocess.SubprocessError(said or f"git ended with status {done.returncode}")
    return done.stdout


def _describe_peak(peak: Peak) -> dict:
    return {
        "tflops_per_gpu": peak.tflops,
        "source": peak.source,
        "reason": peak.reason,
        "sparse": peak.sparse,
        "measured": peak.measured,
    }
