"""Answers --dry_run=True: the start-up report of a model on the meta device, and whether a run fits a GPU
that need not be here. It uses no GPU, no data, no process group and no file.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from common import units
from common.errors import UserError
from ops.recipe import CHECKED, NATIVE, REFUSED
from training.configuration.batch import is_auto
from training.configuration.choices import find
from training.configuration.keys import TrainConfig
from training.hardware.capability import CPU, Capability
from training.hardware.description import describe_hardware
from training.hardware.peaks import Peak, table_peak
from training.memory.gpus import (
    CARDS,
    Card,
    DeviceMemory,
    card_capability,
    card_memory,
    device_memory,
    find_card,
)
from training.memory.micro_batch import MicroBatch, choose, settings_that_fit
from training.optimization.low_precision import emulation_warnings, recipe_class
from training.process.launch import machine_size
from training.records.report import for_console, report_lines
from training.records.startup_info import Setup, startup_info
from training.records.utilization import count_flops

ASSUMED = "H100"  # for 'auto' where --gpu names none
ANY = DeviceMemory(math.inf, "a GPU that --gpu does not name")  # stated numbers need no memory to be known


def dry_run(config: TrainConfig, world_size: int) -> list[str]:
    """The lines of the report, for the GPU that --gpu names."""
    if config.gpu is not None and config.device == "cpu":
        raise UserError("gpu and device='cpu' contradict each other; leave one of them out")
    card, asked = find_card(config.gpu or ASSUMED), config
    memory = _memory(config, card)
    config, micro_batch = choose(config, world_size, memory)
    attention = {"line": f"asked for {config.attention_backend}; chosen on the device, not in a dry run"}
    machine = {**describe_hardware("cpu"), "gpu_name": f"{config.device} (dry run)"}
    memory_found = micro_batch.describe(config, world_size)
    setup, warnings = Setup(count_flops(config), _peak(config, card), attention, memory_found), []
    here = CPU if config.device == "cpu" else card_capability(card) if config.gpu else None
    if config.gpu:
        machine |= {"gpu_name": f"{card.device} (dry run)", "gpu_memory_gb": card.gib}
    if here:
        warnings = _problems(config, here)
    info = startup_info(config, world_size, setup, machine)
    if config.low_precision != "none":
        info["low_precision"] = {"support": _support(config, here)}
    lines = report_lines(config, info)
    if memory != ANY:
        lines += _fit_lines(asked, micro_batch, world_size, memory)
    return [*for_console(lines), *(f"\nwarning: {text}" for text in [*info["warnings"], *warnings])]


def _memory(config: TrainConfig, card: Card) -> DeviceMemory:
    if config.device == "cpu":
        return device_memory(torch.device("cpu"), machine_size())
    if config.gpu:
        return card_memory(card)
    return DeviceMemory(card.gib, f"{card.device}, as --gpu names none") if is_auto(config) else ANY


def _peak(config: TrainConfig, card: Card) -> Peak:
    """The stated peak, or that of the GPU that --gpu names."""
    sparse = config.use_sparse_specs
    if isinstance(config.peak_tflops, float):
        return Peak(config.peak_tflops, "stated by peak_tflops", None, sparse)
    if not config.gpu:
        reason = "a dry run looks at no device; name one with --gpu=H100, or state one with --peak_tflops=..."
        return Peak(None, "none", reason, sparse)
    peak = table_peak(card.device, config.dtype, sparse)
    recipe = recipe_class(config)
    if recipe.peak is None or recipe.support(card_capability(card)) != NATIVE:
        return peak
    return replace(peak, of_formats={recipe.peak: table_peak(card.device, recipe.peak, sparse)})


def _support(config: TrainConfig, here: Capability | None) -> str:
    """How the recipe runs here; where it would be native, if no GPU is named."""
    recipe = recipe_class(config)
    if here:
        return recipe.support(here) or REFUSED
    words = {name: recipe.support(card_capability(card)) for name, card in CARDS.items()}
    return "; ".join(
        f"{word} on {', '.join(name for name in words if words[name] == word)}"
        for word in (NATIVE, CHECKED)
        if word in words.values()
    )


def _fit_lines(config: TrainConfig, found: MicroBatch, world_size: int, memory: DeviceMemory) -> list[str]:
    """Whether the run fits, with what margin, and the settings that would."""
    spare = memory.gib - found.needed_gib
    margin = f"{units.memory(abs(spare))} ({100 * abs(spare) / memory.gib:.0f} %)"
    answer, others = f"yes, with {margin} to spare", []
    if not found.fits and config.eval_only:
        answer = "training does not; an evaluation alone needs less than the estimate"
    elif not found.fits:
        answer = f"no, {margin} is missing"
        fits = settings_that_fit(config, world_size, memory)
        others = ["Settings that would:", *(f"  {setting}" for setting in fits)]
    return [
        *("", "=" * 78, "DOES IT FIT", "=" * 78),
        f"{'Memory of:':<28} {memory.device}, {units.memory(memory.gib)}",
        f"{'Fits:':<28} {answer}",
        *others,
    ]


def _problems(config: TrainConfig, here: Capability) -> list[str]:
    """Why the run would be refused here, or slow, apart from its memory."""
    problems = emulation_warnings(config, here)
    if config.dtype == "bfloat16" and not here.bf16:
        problems.append(f"{here.name} has no bfloat16; use --dtype=float16")
    if recipe_class(config).support(here) is None:
        problems.append(f"{here.name} cannot run {config.low_precision}; use --low_precision=none")
    if why := find("ffn_backend", config.ffn_backend).problem(here):
        problems.append(f"{here.name} {why}; use --ffn_backend=torch")
    return problems
