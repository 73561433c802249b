"""Trains GPT-2, LLaMA or Qwen3, and says how well the hardware was used.

    python train.py config/quickstart.py --max_iters=100
    torchrun --standalone --nproc_per_node=8 train.py config/full_qwen3_1.8b_b200_optimal.py --batch_size=22

Read it from top to bottom: configuration, devices, model, compile and parallelize, optimizer, resume, report,
loop, finish. training/configuration/keys.py documents every setting.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

# Less fragmentation. Set before torch is imported, which may read it then.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# NCCL must not register such memory for CUDA graphs: illegal addresses (Megatron-LM demands the same).
os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")

import torch

import model_builder
from model import manual_attention
from model_config import ModelConfig
from ops.documents import Documents
from training.batches.fingerprint import agree_on_data
from training.batches.loader import Loader, hash_seed
from training.batches.packing import end_of_text_id
from training.batches.sources import describe_sources, make_windows, open_sources
from training.checkpoints.folder import find_checkpoint
from training.checkpoints.resume import find_resume
from training.checkpoints.start import settle_start
from training.checkpoints.train_state import Progress, TrainState, load_checkpoint
from training.configuration.dtypes import DTYPES
from training.configuration.files_and_flags import load_config
from training.configuration.keys import TrainConfig
from training.cuda_graphs.capture import CudaGraphs
from training.cuda_graphs.graphed_step import GraphedStep
from training.evaluate_and_save import Milestones
from training.faults.replica_check import DriftCheck
from training.faults.stragglers import watch_stragglers
from training.faults.watchdog import Stopped, Watch
from training.hardware.attention_kernels import choose_attention
from training.hardware.capability import capability, require_low_precision
from training.hardware.peaks import Peak, describe_hardware, resolve_peak
from training.optimization.compile import compile_and_checkpoint
from training.optimization.optimizer import build_optimizer, describe_optimizer
from training.optimization.precision import LossScale, use_low_precision
from training.optimization.schedule import learning_rate
from training.optimization.step import make_step
from training.optimization.update_guard import Health
from training.process.console import start_logging
from training.process.exit_status import end_with
from training.process.run_lock import RunLock, check_writable
from training.process.world import (
    World,
    check_device,
    end_process,
    gather_objects,
    init_world,
    launch_info,
    launch_record,
    leave_now,
    tell_launcher,
)
from training.records.attempts import find_history
from training.records.report import accumulation_steps, report_lines, startup_info
from training.records.rows import Logger
from training.records.run_record import RunRecord, new_run_path
from training.records.utilization import audit_flops
from training.strategies.parallelize import parallelize
from training.strategies.strategy import Shard

log = logging.getLogger("nanomfu")

FORMULAS = ("model_builder_v1", "model_builder_v2", "model_builder_v3")  # in mfu_versions/


def main(argv: list[str]) -> int:
    """A whole run; its exit status."""
    _, _, world_size = launch_info()
    config = load_config(argv, world_size)
    if config.dry_run:
        dry_run(config, world_size)
        return 0
    # for signals, for ranks that fail and for ranks that hang; for a second run in this out_dir
    with Watch(config) as watch, RunLock(Path(config.out_dir)) as lock:
        return launch(config, watch, lock)


def launch(config: TrainConfig, watch: Watch, lock: RunLock) -> int:
    # 1) configuration and data: whatever can be wrong without a device is found here
    rank, local_rank, _ = launch_info()
    model_config = config.model_config()
    flops = count_flops(model_config, config.block_size)
    check_device(config)
    require_low_precision(config.low_precision, capability(torch.device(config.device)))
    out_dir = Path(config.out_dir)
    if rank == 0:
        check_writable(out_dir)
        if not config.eval_only:  # which writes nothing but a record of its own
            lock.acquire()
        if config.init_from == "resume":
            find_checkpoint(out_dir, config.resume_from)  # is there one at all
    sources = open_sources(config, scan=local_rank == 0)  # one process of each machine
    eot_id = end_of_text_id(config, sources[0].meta)  # all have one tokenizer

    # 2) devices, the log, the checkpoint to go on from and the peak
    world = init_world(config)
    watch.join(world)
    run_path = gather_objects(new_run_path(out_dir) if world.is_main else None, world)[0]
    start_logging(run_path.with_suffix(".log") if world.is_main else None, console=world.is_main)
    config = settle_start(config, world)
    data = agree_on_data(sources, world)
    facts = {"run": run_path.stem, "data": data}
    resume = find_resume(config, world, data)
    peak = gather_objects(find_peak(config, world) if world.is_main else None, world)[0]

    # 3) model: built on meta, then drawn on the device by (seed, name), so every rank starts alike
    dtype = DTYPES[config.dtype]
    attention = choose_attention(
        config.attention_backend, model_config, dtype, world.device, manual_attention, config.doc_masking
    )
    model = model_builder.build_model(model_config, attention.attend, dtype)
    model.documents = Documents(eot_id, attention.mask) if config.doc_masking else None
    model.init_weights(world.device, config.seed)
    model.head.loss_chunks = config.loss_chunks
    use_low_precision(model, config)
    counts = model.count_parameters()

    # 4) compile, then parallelize, then the optimizer: a strategy hooks into compiled blocks, and the
    #    optimizer binds to the shards that the strategy leaves to this rank
    compile_and_checkpoint(model, config)
    strategy = parallelize(model, config, world)
    optimizer = build_optimizer(strategy.shards, config)
    loss_scale = LossScale(config.dtype == "float16", world.device)
    health = Health(config, world.device)
    step = make_step(strategy, optimizer, loss_scale, config, model.documents, health)

    # 5) resume: weights, moments, generators and position; a new run seeds its dropout by rank
    torch.manual_seed(hash_seed(config.seed, world.rank))
    state = TrainState(strategy, optimizer, loss_scale, world, health)
    progress = Progress(0, 0)
    if resume.checkpoint:
        progress = load_checkpoint(resume.checkpoint, state, model_config)
    windows = make_windows(sources, config)
    loader = Loader(windows["train"], config, world, position=progress.samples_seen)

    # 6) report
    info = startup_info(
        config,
        model_config,
        counts,
        flops,
        peak,
        describe_hardware(world.device),
        describe_optimizer(strategy.shards, config),
        attention.to_dict(),
        world.size,
    )
    samples = config.max_iters * config.samples_per_iter(world.size)
    info["data"] = describe_sources(sources, windows, samples, data["sha256"])
    info["launch"] = launch_record()
    info["resumed_from"] = str(resume.checkpoint) if resume.checkpoint else None
    info["changed_since_checkpoint"] = resume.changed
    info["checkpoints_set_aside"] = resume.set_aside
    resolved = {**config.to_dict(), **accumulation_steps(config, world.size)}
    record = None
    if world.is_main:
        history = None if config.eval_only else find_history(out_dir, resume.run, info["launch"])
        record = RunRecord(run_path, resolved, info, config.save_log_to_json, history, progress.iteration)

    # 7) loop
    logger = Logger(config, world, record, flops, peak, row_facts(info), start=progress.iteration)
    milestones = Milestones(config, model_config, state, windows, loader, logger, progress, watch, facts)
    drift = DriftCheck(state, config, logger)
    logger.at_rows.append(drift.row)
    milestones.before_saving.append(drift.compare)
    if config.use_cuda_graphs:
        step = GraphedStep(step, state, CudaGraphs(optimizer), logger.paused, progress.iteration)
        info["cuda_graphs"] = step.choice  # filled in as the run finds out
    watch_stragglers(loader, strategy, config, world, watch, record)
    watch.last_words = lambda status: logger.close(status, milestones.best_val_loss)
    status, exit_status = "failed", 0
    try:
        announce(config, info, record, progress)
        train(config, step, loader, milestones, logger, watch, progress.iteration)
        status = "completed"
    except Stopped as stop:
        log.info(f"\n{stop}")
        milestones.stop(stop.iteration)
        status, exit_status = "interrupted", stop.status
    finally:
        milestones.close()
        logger.close(status, milestones.best_val_loss)
        loader.close()

    # 8) finish
    for line in closing_lines(config, run_path, milestones.last_checkpoint or resume.checkpoint):
        log.info(line)
    log.info(f"Data:        the loop waited {loader.waited_seconds:.2f} s for batches in all")
    if config.use_cuda_graphs:
        step.close()
    if exit_status and world.is_main:
        tell_launcher(f"stopped, as asked; exit status {exit_status}")
    watch.end(exit_status)
    end_process(world, exit_status)
    return exit_status


def train(
    config: TrainConfig,
    step,
    loader: Loader,
    milestones: Milestones,
    logger: Logger,
    watch: Watch,
    start: int,
) -> None:
    """The loop. Nothing in it waits for the device, but for rows, evaluations and checkpoints."""
    if config.eval_only:
        milestones.evaluate(start, learning_rate(start, config))
        return
    gc.collect()
    gc.freeze()  # what is alive now stays alive; the collector need not walk it again
    for iteration in range(start, config.max_iters):
        watch.check(iteration)
        rate = learning_rate(iteration, config)
        milestones.reach(iteration, rate)
        result = step(*loader.next(), rate, logger.wants_gradients(iteration))
        logger.step(iteration, result, rate)
    watch.check(config.max_iters)
    milestones.finish(learning_rate(config.max_iters, config))


# --- parts of the start ---


def count_flops(model_config: ModelConfig, seq_len: int) -> dict:
    """The active formula's counts, all formulas' totals, and the audit of the active one."""
    flops = model_builder.count_flops(model_config, seq_len)
    formulas = [importlib.import_module(f"mfu_versions.{name}") for name in FORMULAS]
    flops["calculation_method"] = model_builder.CALCULATION_METHOD
    flops["totals"] = {
        formula.CALCULATION_METHOD: formula.count_flops(model_config, seq_len)["flops_per_token"]
        for formula in formulas
    }
    on_meta = model_builder.build_model(model_config)
    flops["audit"] = audit_flops(on_meta, flops, seq_len, model_builder.EXACT)
    return flops


def find_peak(config: TrainConfig, world: World) -> Peak:
    """The peak of one device, by table, as stated, or measured. One rank, so that all use one figure."""
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    precisions = [config.dtype] if config.low_precision == "none" else [config.dtype, "fp8"]
    peak, *fp8 = (
        resolve_peak(config.peak_tflops, name, precision, config.use_sparse_specs, world.device)
        for precision in precisions
    )
    return replace(peak, fp8=fp8[0]) if fp8 else peak


def row_facts(info: dict) -> dict:
    """What every row's mfu repeats, so that one row can be read alone."""
    architecture = info["model"]["architecture"]
    return {
        "gpu_name": info["hardware"]["gpu_name"],
        "precision": info["hardware"]["precision"],
        "architecture": architecture["arch"],
        "gqa_group_size": architecture["n_head"] // architecture["n_kv_head"],
        "calculation_method": info["flops"]["calculation_method"],
        "total_params": info["model"]["total_params"],
    }


def announce(config: TrainConfig, info: dict, record: RunRecord | None, progress: Progress) -> None:
    """The report, and a record that exists from here on. Rank 0 writes."""
    for line in report_lines(config, info):
        log.info(line)
    if record:
        record.save()
    log.info(f"\n{'=' * 78}\nSTARTING TRAINING\n{'=' * 78}")
    if info["resumed_from"]:
        log.info(f"Resuming from {info['resumed_from']}: iteration {progress.iteration:,}")
        for name, (old, new) in info["changed_since_checkpoint"].items():
            log.info(f"  {name} was {old!r} when it was saved, is {new!r} now")
    if record and record.attempt > 1:
        log.info(f"Attempt {record.attempt} at this run; its record begins with the rows of those before")
    if config.compile:
        log.info("Compiling during the first iteration; it can take a minute")


def closing_lines(config: TrainConfig, run_path: Path, checkpoint: Path | None) -> list[str]:
    lines = [
        f"\nRun record:  {run_path}" if config.save_log_to_json else "",
        f"Log:         {run_path.with_suffix('.log')}",
    ]
    if checkpoint:
        lines.append(f"Checkpoint:  {checkpoint}")
    return lines


def dry_run(config: TrainConfig, world_size: int) -> None:
    """The start-up report from the meta device: no GPU, no data, no process group, no file."""
    model_config = config.model_config()
    flops = count_flops(model_config, config.block_size)
    model = model_builder.build_model(model_config)
    stated = config.peak_tflops if isinstance(config.peak_tflops, float) else None
    reason = None if stated else "a dry run looks at no device; state one with --peak_tflops=..."
    asked = config.attention_backend
    info = startup_info(
        config,
        model_config,
        model.count_parameters(),
        flops,
        Peak(stated, "stated by peak_tflops" if stated else "none", reason, config.use_sparse_specs),
        {**describe_hardware("cpu"), "gpu_name": f"{config.device} (dry run)"},
        describe_optimizer([Shard(name, p, p) for name, p in model.named_parameters()], config),
        {"line": f"asked for {asked}; chosen on the device, not in a dry run"},
        world_size,
    )
    start_logging(None, console=launch_info()[0] == 0)
    for line in report_lines(config, info):
        log.info(line)


def run(argv: list[str]) -> int:
    """main() with every error turned into a message and an exit status."""
    try:
        return main(argv)
    except (Exception, KeyboardInterrupt) as error:
        return end_with(error)


if __name__ == "__main__":
    leave_now(run(sys.argv[1:]))
