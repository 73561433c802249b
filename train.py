"""Trains GPT-2, LLaMA or Qwen3 models, and measures how well the hardware is used.

    python train.py config/quickstart.py --max_iters=100
    torchrun --standalone --nproc_per_node=8 train.py config/full_qwen3_1.8b_b200_optimal.py

Read it from top to bottom: check the inputs, join the ranks, choose where to start, build, parallelize, load,
loop, end. training/configuration/keys.py documents every setting.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from common.command import before_torch, prepare_output, run_command
from training.configuration.help import print_help, wants_help

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: an end without a traceback
    if wants_help(sys.argv[1:]):  # answered before torch is imported, which takes seconds
        sys.exit(run_command(print_help, sys.argv[1:]))
    before_torch()

# Reduces memory fragmentation. It is set here because torch may read it while it is imported.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# NCCL must not register such memory for CUDA graphs: illegal addresses (Megatron-LM demands the same).
os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")

import torch

import model_builder
from common.text import plain
from model import Transformer, manual_attention
from ops.documents import Documents
from ops.recipe import Recipe
from training.batches.fingerprint import agree_on_data
from training.batches.loader import Loader
from training.batches.sources import RunData, make_windows
from training.checkpoints.resume import choose_start, find_resume, load_resume
from training.checkpoints.saver import Saver
from training.checkpoints.train_state import TrainState
from training.configuration.choices import find
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.configuration.rules import captures_cuda_graphs, cuda_graphs_obstacle
from training.configuration.seeds import DROPOUT, stream_seed
from training.cuda_graphs.capture import CudaGraphs
from training.cuda_graphs.graphed_step import GraphedStep
from training.dry_run import dry_run
from training.evaluate_and_save import EvaluateAndSave
from training.faults.anomalies import AnomalyPolicy
from training.faults.consensus import Consensus
from training.faults.replica_check import ReplicaCheck
from training.faults.stragglers import Stragglers, make_work_timer
from training.faults.watchdog import Stopped, Watchdog
from training.hardware.attention_kernels import AttentionChoice, choose_attention
from training.hardware.peaks import agree_on_peak
from training.inputs import check_inputs
from training.memory.estimate import host_memory
from training.memory.micro_batch import resolve_micro_batch
from training.optimization.compile import compile_and_checkpoint, start_compilers
from training.optimization.low_precision import describe_recipe, use_recipe
from training.optimization.optimizer import build_optimizer
from training.optimization.precision import LossScale
from training.optimization.schedule import learning_rate
from training.optimization.step import EagerStep, Step
from training.optimization.update_guard import UpdateGuard
from training.pretrained.reading import begin_with_weights
from training.pretrained.settings import load_run_config
from training.process.agreement import check_machines, check_same_settings
from training.process.exit_status import end_process, end_with, leave_now, tell_launcher
from training.process.launch import check_launch, launch_info
from training.process.redaction import redact
from training.process.run_lock import RunLock
from training.process.work_timer import WorkTimer
from training.process.world import World, init_world
from training.records.beginning import begin_record, open_log
from training.records.clock import Clock
from training.records.profiler import Profiler, make_profiler
from training.records.report import announce, closing_lines
from training.records.rows import Logger
from training.records.startup_info import Setup
from training.records.utilization import count_flops
from training.strategies.parallelize import parallelize
from training.strategies.strategy import Strategy

log = logging.getLogger("nanomfu")


@dataclass(frozen=True)
class Run:
    """The objects that the loop uses, assembled once."""

    config: TrainConfig
    world: World
    watchdog: Watchdog
    logger: Logger
    loader: Loader
    step: Step
    anomalies: AnomalyPolicy
    replica_check: ReplicaCheck
    stragglers: Stragglers
    profiler: Profiler
    evaluate_and_save: EvaluateAndSave


def main(argv: list[str]) -> int:
    """Runs everything and returns the exit status."""
    rank, _, world_size = launch_info()
    # the watchdog handles signals, failed ranks and hanging ranks; the lock refuses a second run in out_dir
    with Watchdog() as watchdog:
        config = load_run_config(argv, world_size, needs_dataset=True)
        watchdog.begin(config)
        check_launch(config)
        if config.dry_run:
            lines = dry_run(config, world_size)
            if rank == 0:
                show("\n".join(lines))
            return 0
        with RunLock(Path(config.out_dir)) as lock:
            run = assemble(config, watchdog, lock)
            exit_status = train(run)
            end(run, exit_status, argv)
            return exit_status


def show(text: str) -> None:
    """Prints what is the whole output of a command, without secrets."""
    with contextlib.suppress(OSError):  # its reader has seen enough: train.py --dry_run ... | head
        print(plain(redact(text)), flush=True)


def assemble(config: TrainConfig, watchdog: Watchdog, lock: RunLock) -> Run:
    # 1) check the inputs: every error that can be found without a device is found here
    flops = count_flops(config)
    sources = check_inputs(config, lock)

    # 2) join the ranks; from here on the log is open
    world, consensus, path = join_ranks(config, watchdog)

    # 3) resolve batch_size='auto', and choose where to start
    config, micro_batch = resolve_micro_batch(config, world)
    config, token = choose_start(config, world)
    data = RunData(sources, agree_on_data(sources, world), make_windows(sources, config))
    resume = find_resume(config, world, data.fingerprint, data.windows["train"].count)
    config = resume.config  # as stated, with its last iteration and the schedule of the first attempt

    # 4) build
    model, attention, recipe = build(config, world)
    peak = agree_on_peak(config, world, recipe.peak if recipe.native else None)
    compile_and_checkpoint(model, config)

    # 5) parallelize: after compiling, as its hooks go on compiled blocks; before the optimizer of its shards
    timer = make_work_timer(config, world, watchdog)
    strategy = parallelize(model, config, world, timer)
    eager, state = build_step(config, strategy, model.documents, timer, recipe)

    # 6) load weights, what the optimizer keeps, random generators and data position
    torch.manual_seed(stream_seed(config.seed, DROPOUT, world.rank))  # each rank has a seed of its own
    progress = load_resume(resume, state)
    pretrained = begin_with_weights(config, resume, state)
    loader = Loader(data.windows["train"], config, world, progress.samples_seen, timer, model.documents)

    # 7) open the record; after the loader: a thread that is loading a library must not be in a forked worker
    memory = micro_batch.describe(config, world.size, recipe.native)
    clock = Clock(world.device)
    step, graphs = captured_if_asked(eager, state, config, clock, progress.iteration)
    setup = Setup(flops, peak, attention.to_dict(), memory, describe_recipe(config, recipe), graphs)
    logger = begin_record(config, world, lock, path, setup, data, resume, pretrained, progress, clock)
    watchdog.complete_at_end(logger)

    # 8) make what the loop calls
    anomalies = AnomalyPolicy(config, world, logger.record, logger.start, eager.second_look)
    replica_check = ReplicaCheck(state, config, logger.clock, logger.record, logger.start)
    facts = {"run": path.stem, "token": token, "data": data.fingerprint, "pretrained": pretrained}
    on_host = host_memory(config, world.size)
    saver = Saver(config, state, facts, logger.start, on_host, consensus.group)
    return Run(
        config=config,
        world=world,
        watchdog=watchdog,
        logger=logger,
        loader=loader,
        step=step,
        anomalies=anomalies,
        replica_check=replica_check,
        stragglers=Stragglers(timer, world, consensus, watchdog.liveness.name, logger.record),
        profiler=make_profiler(config, world, logger.clock, logger.start),
        evaluate_and_save=EvaluateAndSave(
            saver, data.windows, loader, progress, logger, anomalies, replica_check, watchdog, consensus
        ),
    )


def train(run: Run) -> int:
    """Trains until the last iteration or until a stop, and returns the exit status. However that ends,
    everything is closed; of several errors, the first is raised."""
    errors: list[BaseException] = []
    status, exit_status = "failed", 0
    try:
        status, exit_status = train_or_stop(run)
    except BaseException as error:
        errors.append(error)
    for close in (
        run.evaluate_and_save.close,
        lambda: run.logger.close("failed" if errors else status),
        run.loader.close,
    ):
        try:
            close()
        except BaseException as error:
            errors.append(error)
    for later in errors[1:]:
        log.warning(f"then, while the run was being closed: {type(later).__name__}: {later}")
    if errors:
        raise errors[0]
    return exit_status


def train_or_stop(run: Run) -> tuple[str, int]:
    """(the record's status, the exit status)."""
    try:
        announce(run.logger)
        if run.config.eval_only:
            run.evaluate_and_save.evaluate(run.logger.start, learning_rate(run.logger.start, run.config))
        else:
            loop(run)
        return "completed", 0
    except Stopped as stop:
        log.info(f"\n{stop}")
        run.evaluate_and_save.stop(stop.iteration)
        return "interrupted", stop.status


def loop(run: Run) -> None:
    """The training loop. It waits for the device only at log rows, evaluations and checkpoints."""
    config, logger, anomalies = run.config, run.logger, run.anomalies
    gc.collect()
    gc.freeze()  # objects that are alive now stay alive, so the collector need not visit them again
    for iteration in range(logger.start, config.max_iters):
        run.watchdog.check(iteration)
        rate = learning_rate(iteration, config)
        run.evaluate_and_save.before_update(iteration, rate)
        run.stragglers.check(iteration)
        run.profiler.before(iteration)
        extras = logger.wants_gradients(iteration), anomalies.wants_second_look(iteration)
        result = run.step(*run.loader.next(), rate, *extras)
        anomalies.add(result)
        logger.count(result)
        if logger.is_due(iteration):
            reading = logger.read(iteration, result, anomalies.pending_verdicts())  # sync point
            anomalies.act_on(reading.verdicts)
            logger.write(reading, rate, anomalies.take_skipped())
            anomalies.end_if_due()
            run.replica_check.after_update(iteration)
    run.watchdog.check(config.max_iters)
    run.evaluate_and_save.complete(learning_rate(config.max_iters, config))


def end(run: Run, exit_status: int, argv: list[str]) -> None:
    """Logs what came out, where it is, and what to do next. If there are several processes, ends this one."""
    checkpoint = run.evaluate_and_save.last_checkpoint
    for line in closing_lines(run.logger, checkpoint, run.loader.waited_seconds, argv):
        log.info(line)
    run.step.close()
    if exit_status and run.world.is_main:
        tell_launcher(f"stopped, as asked; exit status {exit_status}")
    run.watchdog.end(exit_status)
    end_process(run.world, exit_status)


# --- steps of the assembly ---


def join_ranks(config: TrainConfig, watchdog: Watchdog) -> tuple[World, Consensus, Path]:
    """This process among all of them, how they agree, and the path of the record that they are about to
    begin."""
    start_compilers(config)
    world = init_world(config, watchdog.meet())
    consensus = watchdog.join(world)
    check_same_settings(config, world)
    check_machines(config, world)
    return world, consensus, open_log(config, world)


def build(config: TrainConfig, world: World) -> tuple[Transformer, AttentionChoice, Recipe]:
    """The model on this rank's device. It is built on the meta device, then each weight is drawn from (seed,
    its name), so that every rank starts with the same weights."""
    model_config, dtype, device = config.model_config(), DTYPES[config.dtype], world.device
    needs = config.doc_masking, config.replay_check_interval > 0, config.use_cuda_graphs
    asked = config.attention_backend
    attention = choose_attention(asked, model_config, dtype, device, manual_attention, *needs)
    model = model_builder.build_model(model_config, attention.attend, dtype)
    model.documents = attention.documents()
    model.init_weights(device, config.seed)
    model.head.loss_chunks = config.logit_parts
    recipe = use_recipe(model, config, world)
    find("ffn_backend", config.ffn_backend).use(model)
    return model, attention, recipe


def build_step(
    config: TrainConfig,
    strategy: Strategy,
    documents: Documents | None,
    timer: WorkTimer | None,
    recipe: Recipe,
) -> tuple[EagerStep, TrainState]:
    """The step, whose optimizer has the weights that the strategy gives this rank, and the tensors that it
    changes: those of a checkpoint."""
    device = strategy.world.device
    optimizer = build_optimizer(strategy.shards, config, strategy.row_group)
    loss_scale = LossScale(config.dtype == "float16", device)
    guard = UpdateGuard(config, device)
    step = EagerStep(strategy, optimizer, loss_scale, config, guard, recipe, documents, timer)
    return step, TrainState(strategy, optimizer, loss_scale, strategy.world, guard, recipe)


def captured_if_asked(
    eager: EagerStep, state: TrainState, config: TrainConfig, clock: Clock, start: int
) -> tuple[Step, dict[str, str | None]]:
    """The eager step, or the one that replays it as a CUDA graph; and what the record says of the choice,
    which may change during the run: nothing if no graph was asked for."""
    if not captures_cuda_graphs(config):
        why = cuda_graphs_obstacle(config) if config.use_cuda_graphs else None
        return eager, {"asked": "CUDA Graph", "used": "eager step", "reason": why} if why else {}
    step = GraphedStep(eager, state, CudaGraphs(), clock.paused, start)
    return step, step.choice


def run(argv: list[str]) -> int:
    """main() with every error turned into a message and an exit status."""
    prepare_output()
    try:
        return main(argv)
    except (Exception, KeyboardInterrupt) as error:
        return end_with(error)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leave_now(run(sys.argv[1:]))
