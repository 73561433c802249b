"""Writes the start-up report to the console and the log. A dry run prints it, too."""

from __future__ import annotations

import logging
import math
import shlex
import sys
import textwrap
from pathlib import Path

from common import units
from training.checkpoints.plan import SAVE_NONE, checkpoint_bytes, plan_saves
from training.configuration.keys import AUTO, TrainConfig
from training.configuration.rules import cuda_graphs_obstacle
from training.hardware.peaks import FORMATS
from training.optimization.low_precision import low_precision_line
from training.optimization.optimizer import optimizer_class
from training.optimization.schedule import warmup_and_decay_iters
from training.process.memory import GB
from training.records.expected_time import expected_rows
from training.records.machine import machine_lines, speed_line
from training.records.rows import Logger
from training.records.startup_info import accumulation_steps, code_text
from training.records.summary import summary_of
from training.strategies.parallelize import parallelism_line

log = logging.getLogger("nanomfu")

Section = list[tuple[str, str]]

WINDOWS = {"stream": "tokens cut anywhere", "truncate": "whole documents, long ones cut off"}
MASKS = {True: "documents do not see each other", False: "no mask between documents"}
NARROW = 1024  # widths at which a GPU may wait for the host: 1.37 times faster in fp8 at 768 (LOG.md)


def announce(logger: Logger) -> None:
    """Writes the report of a run that begins, and the record for the first time. Rank 0 writes."""
    config, info, record, start = logger.config, logger.info, logger.record, logger.start
    for line in for_console(report_lines(config, info, start)):
        log.info(line)
    if record:
        record.save()
    log.info(f"\n{'=' * 78}\nSTARTING TRAINING\n{'=' * 78}")
    for text in info["warnings"]:
        log.warning(f"warning: {text}")
    if record and not config.eval_only:
        log.info(f"To watch this run: tail -F {shlex.quote(str(record.path.with_suffix('.log')))}")
    if info["resumed_from"]:
        log.info(f"Resuming from {info['resumed_from']}: iteration {start:,}")
        for name, (old, new) in info["changed_since_checkpoint"].items():
            log.info(f"  {name} was {old!r} when it was saved, is {new!r} now")
    if record and record.attempt > 1:
        log.info(f"Attempt {record.attempt} at this run; its record begins with the rows of those before")
    if config.compile:
        log.info("Compiling during the first iteration; it can take a minute")


def closing_lines(
    logger: Logger, checkpoint: Path | None, waited_seconds: float, argv: list[str]
) -> list[str]:
    """The last lines of a run; none on all ranks except 0. checkpoint: the last one that this process saved;
    waited_seconds: total time that the loop waited for batches; argv: what train.py was called with."""
    if logger.record is None:
        return []
    checkpoint = checkpoint or logger.info["resumed_from"]
    lines = {
        "Run record": logger.record.path if logger.config.save_log_to_json else None,
        "Log": logger.record.path.with_suffix(".log"),
        "Checkpoint": checkpoint,
        "GPU": speed_line(logger.summary),
        "Data": f"total time the loop waited for batches: {waited_seconds:.2f} s",
    }
    text = [f"{name + ':':<12} {text}" for name, text in lines.items() if text]
    summary = {} if logger.config.eval_only else summary_of(logger, bool(checkpoint), argv)
    return ["", *text, *([""] if summary else []), *(f"{name + ':':<12} {summary[name]}" for name in summary)]


# --- text ---


def report_lines(config: TrainConfig, info: dict, start: int = 0) -> list[str]:
    """The report as lines, one section after another. `start`: the first iteration."""
    sections = {
        "MODEL ARCHITECTURE": _architecture(info),
        "TRAINING CONFIGURATION": _training(config, info) + _checkpoints(config, info, start),
        "HARDWARE": _hardware(config, info),
        "THEORETICAL PERFORMANCE": _performance(info) + expected_rows(config, info, start),
    }
    lines = []
    for title, section in sections.items():
        lines += ["", "=" * 78, title, "=" * 78]
        lines += [f"{name + ':':<28} {text}" for name, text in section]
    return lines


def for_console(rows: list[str]) -> list[str]:
    """For a terminal, in lines of 80 columns. A file or a pipe gets whole rows."""
    if not sys.stdout.isatty():
        return rows
    wrap = textwrap.TextWrapper(80, subsequent_indent=29 * " ", break_long_words=False)
    wrap.break_on_hyphens = False
    return [line for row in rows for line in wrap.wrap(row) or [""]]


def _architecture(info: dict) -> Section:
    """The shape of the model, each field by its name in model_config.py."""
    model = info["model"]
    fields = [
        (name, f"{value:,}" if type(value) is int else str(value))
        for name, value in model["architecture"].items()
    ]
    counts = [("Parameters", "total_params"), ("  trainable", "trainable_params")]
    return fields + [(name, f"{model[key]:,}") for name, key in counts]


def _training(config: TrainConfig, info: dict) -> Section:
    gpus = info["hardware"]["num_gpus"]
    per_gpu, everywhere = accumulation_steps(config, gpus).values()
    warmup, end = warmup_and_decay_iters(config)
    schedule = f"{config.learning_rate:g} to {config.min_lr:g}, {config.lr_schedule}, warm-up {warmup:,}"
    decay = "" if config.lr_schedule == "constant" else f", decay to iteration {end:,}"
    groups, level = info["optimizer"]["param_groups"], config.activation_checkpointing
    recomputed = "" if level == "none" else f", activation checkpointing {level}"
    fp8 = info.get("fp8_weight_gradients")
    rows = [
        *_datasets(config, info),
        ("Micro-batch per GPU", _micro_batch(config, info)),
        ("Accumulation steps", f"{per_gpu} per GPU ({everywhere} over {gpus} GPU{'s' * (gpus > 1)})"),
        ("Tokens per iteration", _tokens_per_iter(info)),
        ("Iterations", _iterations(config, info)),
        ("Learning rate", schedule + decay),
        ("Optimizer", _optimizer(config, info)),
        ("  weight decay", "; ".join(f"{g['weight_decay']:g} on {g['params']:,}" for g in groups)),
        ("Gradient clipping", f"norm {config.grad_clip:g}" if config.grad_clip else "off"),
        ("Precision", _precision(config, info)),
        ("  low precision", info.get("low_precision", {}).get("support", "")),
        ("  fp8 weight gradients", f"added to their sums: {fp8}" if fp8 else ""),
        ("torch.compile", f"{config.compile}{recomputed}"),
        ("Attention backend", info["attention"]["line"]),
        ("Feed-forward backend", info.get("ffn_backend", {}).get("line", "")),
        ("CUDA Graph", _cuda_graphs(config)),
        ("Windows", f"{WINDOWS[config.packing]}; {MASKS[config.doc_masking]}"),
        ("DataLoader", _dataloader(config)),
    ]
    return [(name, text) for name, text in rows if text]


def _optimizer(config: TrainConfig, info: dict) -> str:
    return ", ".join(filter(None, (info["optimizer"]["type"], optimizer_class(config).line(config))))


def _micro_batch(config: TrainConfig, info: dict) -> str:
    text = f"{config.micro_batch} x {config.block_size} tokens"
    if config.logit_parts > 1:
        text += f", the logits in {config.logit_parts} parts"
    found = info["micro_batch"]
    if found["stated"]["batch_size"] != AUTO:
        return text
    if found["needed_gib"] > found["available_gib"]:
        return f"{text} (auto: the smallest, and it does not fit)"
    return f"{text} (auto: fits by the estimate)"


def _tokens_per_iter(info: dict) -> str:
    text = f"{info['tokens_per_iter']:,}"
    if not info["micro_batch"]["set_aside"]:
        return text
    stated = info["micro_batch"]["stated"]
    return (
        f"{text}; tokens_per_iter={stated['tokens_per_iter']:,} was set aside, because batch_size and "
        "gradient_accumulation_steps are stated"
    )


def _iterations(config: TrainConfig, info: dict) -> str:
    text = f"{config.max_iters:,} ({units.tokens(config.max_iters * info['tokens_per_iter'])})"
    if config.max_epochs is None:
        return text
    if "data" not in info:  # a dry run opens none
        return f"at most {text}; max_epochs={config.max_epochs:g} is counted in the data"
    samples = info["data"]["sources"][0]["samples_per_epoch"]
    return f"{text}; max_epochs={config.max_epochs:g} of {samples:,} samples"


def _checkpoints(config: TrainConfig, info: dict, start: int) -> Section:
    """What will be saved: a test of ten iterations should not fill a disk unnoticed."""
    plan = plan_saves(config, start)
    if plan.most == 0:
        return [("Checkpoints", "none")]
    size = checkpoint_bytes(info["model"]["total_params"], config)
    count = "" if plan.most is None else f"up to {plan.most:,}, " if plan.may_be_fewer else f"{plan.most:,}, "
    total = "all are kept"
    if plan.on_disk is not None:
        total = f"at most {plan.on_disk} on disk at a time: {plan.on_disk * size / GB:.3g} GB"
    elif plan.most is not None:
        total = f"all are kept: {plan.most * size / GB:.3g} GB"
    return [
        ("Checkpoints", f"{count}{plan.when}"),
        ("  size", f"{size / GB:.3g} GB each; {total}"),
        ("  to save none", SAVE_NONE + " --checkpoint_interval=0" * bool(config.checkpoint_interval)),
    ]


def _datasets(config: TrainConfig, info: dict) -> Section:
    if "data" not in info:
        return [("Dataset", config.dataset)]
    sources = info["data"]["sources"]
    rows = [("Dataset", f"{len(sources)} sources, mixed by weight")] if len(sources) > 1 else []
    for source in sources:
        size = f"{units.tokens(source['tokens']['train'])}, {source['epochs']:.3g} epochs"
        name, share = "Dataset", source["name"]
        if len(sources) > 1:
            name, share = f"  {source['name']}", f"{100 * source['weight']:.4g} % of samples"
        rows.append((name, f"{share}, {size}"))
        if packing := source.get("packing"):
            cut = packing["tokens_cut_off"] / source["tokens"]["train"]
            text = f"{packing['documents']:,} documents in {packing['windows']:,} windows"
            lost = f"{cut:.1%} of the tokens cut off, {packing['share_padded']:.2%} padding"
            rows.append(("  packed", f"{text}; {lost}"))
    if config.verify_data == "size":
        rows.append(("  verified", "sizes and recorded ids; no hash of a file that was never read whole"))
    return rows


def _precision(config: TrainConfig, info: dict) -> str:
    stored, moments = config.param_dtype, info["optimizer"].get("moments")
    text = f"{config.dtype} compute, {stored} weights"
    if moments:
        text += f"{' and' if stored == moments else f', {moments}'} optimizer state"
    if config.gradient_dtype != "float32":
        text += f", gradients summed in {config.gradient_dtype}"
    if config.weight_rounding != "nearest":
        text += f", {config.weight_rounding} rounding to bfloat16"
    if config.low_precision != "none":
        text += f"; {low_precision_line(config, info.get('low_precision', {}).get('executed'))}"
    return text


def _cuda_graphs(config: TrainConfig) -> str:
    obstacle, eager = cuda_graphs_obstacle(config), "the eager step runs"
    if config.use_cuda_graphs:
        return f"not used, {eager}: {obstacle}" if obstacle else "asked for; used if its check passes"
    try_it = "off; try --use_cuda_graphs=True, the GPU may wait"
    return try_it if config.n_embd <= NARROW and not obstacle else f"off, {eager}"


def _dataloader(config: TrainConfig) -> str:
    if not config.use_dataloader:
        return "off, batches are read in the training process"
    return (
        f"{config.dataloader_num_workers} workers, {config.dataloader_prefetch_factor} iterations ahead each"
    )


def _hardware(config: TrainConfig, info: dict) -> Section:
    hardware, software = info["hardware"], info["software"]
    memory = f" ({hardware['gpu_memory_gb']:.1f} GiB)" if hardware.get("gpu_memory_gb") else ""
    peaks = {"Peak per GPU": "peak", **{f"  {name}": f"peak_{name}" for name in FORMATS}}
    estimate = info["estimated_memory_gb"]
    return [
        ("Device", f"{hardware['num_gpus']} x {hardware['gpu_name']}{memory}"),
        *machine_lines(info),
        ("Parallelism", parallelism_line(config, hardware["parallelism"])),
        ("Code", code_text(info["git"])),
        ("torch, CUDA, cuDNN, NCCL", ", ".join(str(software[k]) for k in ("torch", "cuda", "cudnn", "nccl"))),
        *((name, _peak(hardware[key])) for name, key in peaks.items() if key in hardware),
        ("Estimated memory per GPU", units.memory(sum(estimate.values()))),
        *((f"  {name}", units.memory(size)) for name, size in estimate.items()),
        ("  with a reserve", _fit(info["micro_batch"])),
    ]


def _fit(micro_batch: dict) -> str:
    needed, available = micro_batch["needed_gib"], micro_batch["available_gib"]
    if available == math.inf:  # a dry run for no GPU
        return units.memory(needed)
    verdict = "fits" if needed <= available else "does not fit"
    return f"{units.memory(needed)} of {units.memory(available)}: {verdict} by the estimate"


def _peak(peak: dict) -> str:
    if peak["tflops_per_gpu"] is None:
        return f"none ({peak['reason']})"
    flops = units.flops(peak["tflops_per_gpu"] * 1e12)
    return f"{flops}LOPS{' 2:4 sparse' * peak['sparse']} ({peak['source']})"


def _performance(info: dict) -> Section:
    flops, peak = info["flops"], info["hardware"]["peak"]
    per_token = units.flops(flops["flops_per_token"], decimals=2, prefixes="GMk")
    rows = [("FLOPs/token", f"{per_token} ({flops['calculation_method']})")]
    rows += [(f"FLOPs/token, {method}", f"{total:,}") for method, total in flops["totals"].items()]
    rows += [
        ("  causal half of the scores", f"{flops['flops_per_token_causal']:,}"),
        ("Audit by FlopCounterMode", _audit(flops["audit"])),
    ]
    if ratio := flops["attention_to_ffn_ratio"]:  # v1 has none
        rows.append(("Attention/FFN FLOPs", f"{ratio:.4f}"))
    if peak["tflops_per_gpu"]:
        tokens = peak["tflops_per_gpu"] * 1e12 * info["hardware"]["num_gpus"] / flops["flops_per_token"]
        rows += [(f"Tokens/s at {percent} % MFU", f"{tokens * percent / 100:,.0f}") for percent in (100, 50)]
    return rows


def _audit(audit: dict) -> str:
    if audit["exact"]:
        return f"exact ({audit['counted_flops_per_sequence']:,} per sequence)"
    deviation = 100 * (audit["formula_over_counted"] - 1)
    return f"{deviation:+.2f} % ({audit['counted_flops_per_sequence']:,} counted per sequence)"
