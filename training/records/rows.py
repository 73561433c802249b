"""Writes log rows, the only place in the loop that waits for the device: to read the loss.

The time since the last log row, divided by the iterations since then, is the iteration time
(training/records/clock.py).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from common.arguments import target_losses
from common.time_to_loss import describe_targets, targets_reached
from data.pipeline.token_files import MASKED
from training.checkpoints.saver import Save
from training.checkpoints.train_state import Progress
from training.configuration.keys import TrainConfig
from training.hardware.gpu_monitor import GpuMonitor
from training.hardware.peaks import Peak
from training.optimization.step import StepResult
from training.process.memory import GIB, resident_bytes
from training.process.work_timer import UNMEASURED_ITERS
from training.process.world import World, mean_over_ranks, sum_over_ranks
from training.records.clock import Clock
from training.records.console_lines import ProgressText, console_lines
from training.records.follower import Follower
from training.records.run_record import RunRecord
from training.records.utilization import document_flops, recomputed_flops, summarize, utilization

log = logging.getLogger("nanomfu")


class Reading(NamedTuple):
    """What a log row says of the iterations since the last one, as numbers on the host."""

    iteration: int  # the last of these iterations
    first: int  # the first of them
    loss: float  # of the last iteration, mean over all ranks
    grad_norm: float
    grad_sum: float | None
    attended: float  # length of the document that a token is in, mean over tokens and iterations
    targets: float  # share of the positions that have a target, mean over iterations
    optimizer_ms: float  # of the last iteration, on rank 0
    seconds: float  # per iteration
    verdicts: list[float]  # of the update guard, for the anomaly policy
    intervals: Sequence[tuple[float, float]] = ()  # when these iterations ran, without pauses


class Logger:
    """Writes log rows to the console and the record. All ranks call it; rank 0 writes."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        record: RunRecord | None,
        clock: Clock,
        peak: Peak,
        info: dict[str, Any],
        progress: Progress,
        monitor: GpuMonitor | None = None,
        follower: Follower | None = None,
    ):
        """`record` is None on all ranks except 0. `info` is the record's startup_info, `progress` where this
        process begins. Without a monitor, no GPU is sampled. `follower` sends the record to trackers."""
        self.config, self.world, self.record, self.clock = config, world, record, clock
        self.info, self.flops, self.peak, self.facts = info, info["flops"], peak, row_facts(info)
        self.recomputed = recomputed_flops(self.flops, config)
        self.tokens_per_iter = config.samples_per_iter(world.size) * config.block_size
        self.tokens_before = progress.samples_seen * config.block_size
        self.start = progress.iteration  # first iteration of this process
        self.logged = self.start  # first one in no log row yet
        self.best_val_loss = progress.best_val_loss
        self.monitor, self.follower = monitor or GpuMonitor([]), follower
        self.content: dict[str, Any] = {}  # of the record, once the run is over, and its summary
        self.summary: dict[str, Any] = {}
        # of StepResult, summed since the last log row
        self.attended, self.targets = (torch.zeros((), device=world.device) for _ in range(2))
        self.saved_at = self.start  # iteration of the last JSON rewrite
        self.lacks_checkpoint = False  # whether the JSON does, which its journal then has
        self.progress = ProgressText(config.max_iters)
        self.reasons_said = {peak.reason}  # why there is no MFU; the start-up report says this one
        self.bar: tqdm | None = None
        if record:  # disable=None: no bar where the output is not a terminal
            self.bar = tqdm(total=config.max_iters, initial=self.start, desc="Training", disable=None)

    def is_due(self, iteration: int) -> bool:
        """Whether a log row is due. One is due after the first iteration of this process, too, so that its
        compilation is in no other row."""
        first_or_last = iteration in (self.start, self.config.max_iters - 1)
        return first_or_last or iteration % self.config.log_interval == 0

    def wants_gradients(self, iteration: int) -> bool:
        interval = self.config.gradient_log_interval
        return self.is_due(iteration) and bool(interval) and iteration % interval == 0

    # --- a row: count, read, write ---

    def count(self, result: StepResult) -> None:
        """After every iteration. All ranks. Does not wait."""
        self.attended += result.attended
        self.targets += result.targets
        self._draw(lambda bar: bar.update())

    def read(self, iteration: int, result: StepResult, verdicts: list[torch.Tensor]) -> Reading:
        """Reads the log row's numbers and the verdicts together. All ranks. The loop's only sync point."""
        means = mean_over_ranks(torch.stack([result.loss.float(), self.attended]), self.world)
        of_row = [*means, self.targets, result.grad_norm, result.optimizer_ms]
        if result.grad_sum is not None:
            of_row.append(sum_over_ranks(result.grad_sum, self.world))
        values = torch.stack([value.float() for value in [*of_row, *verdicts]]).tolist()  # sync point
        loss, attended, targets, grad_norm, optimizer_ms, *grad_sum = values[: len(of_row)]
        lap = self.clock.lap()
        iterations, first = iteration + 1 - self.logged, self.logged
        self.logged = iteration + 1
        self.attended.zero_()
        self.targets.zero_()
        return Reading(
            iteration,
            first,
            loss,
            grad_norm,
            grad_sum[0] if grad_sum else None,
            attended / iterations,
            targets / iterations,
            optimizer_ms,
            lap.seconds / iterations,
            values[len(of_row) :],
            lap.intervals,
        )

    def write(self, reading: Reading, learning_rate: float, skipped: int) -> None:
        """skipped: updates that were skipped since the last log row. Rank 0 writes."""
        if self.record is None:
            return
        self.check_out_dir()
        row = self._row(reading, learning_rate)
        if self.config.packing == "truncate":
            if any(source["meta"]["dtype"] == MASKED for source in self.info["data"]["sources"]):
                row["target_percent"] = 100 * reading.targets  # of conversations, few of the tokens are
            else:
                row["padding_percent"] = 100 * (1 - reading.targets)
        row["gradients"] = self._gradients(reading)
        row |= self.monitor.take(reading.intervals)
        if skipped:
            row["skipped_updates"] = skipped
        self._show(row)
        self.record.add("training_iterations", row)
        if flat := flat_row(row):
            self.record.add("training_progress", flat)
        interval = self.config.log_save_interval
        first = reading.first == self.start  # at once: scripts expect that a record has a row
        if first or self.lacks_checkpoint or row["iter"] // interval != self.saved_at // interval:
            with self.clock.paused():  # takes longer as the run grows; the GPU has nothing else to do here
                self.record.save(at_once=first)
            self.saved_at, self.lacks_checkpoint = row["iter"], False

    def _show(self, row: dict[str, Any]) -> None:
        progress = self.progress.text(row["iter"] + 1, time.monotonic())
        known = row["mfu_reason"] in self.reasons_said
        self.reasons_said.add(row["mfu_reason"])
        self._draw(lambda bar: bar.set_postfix_str(f"loss {row['loss']:.4f}", refresh=False))
        for line in console_lines(row, progress, known):
            log.info(line)

    def _row(self, reading: Reading, learning_rate: float) -> dict[str, Any]:
        tokens_per_sec = self.tokens_per_iter / reading.seconds
        mfu, reason = self._mfu(reading, tokens_per_sec)
        return {
            "iter": reading.iteration,
            "loss": reading.loss,
            "time_ms": 1000 * reading.seconds,
            "optimizer_ms": reading.optimizer_ms,
            "lr": learning_rate,
            "tokens_seen": self._tokens_seen(reading.iteration + 1),
            "tokens_per_sec": tokens_per_sec,
            "tokens_per_sec_per_gpu": tokens_per_sec / self.world.size,
            "warmup": reading.first < self.start + UNMEASURED_ITERS,
            "mfu": mfu,
            "mfu_reason": reason,
            "memory": self._memory(),
        }

    def _tokens_seen(self, iteration: int) -> int:
        """By the run, over all GPUs, before the update of this iteration."""
        return self.tokens_before + (iteration - self.start) * self.tokens_per_iter

    def _mfu(self, reading: Reading, tokens_per_sec: float) -> tuple[dict[str, Any] | None, str | None]:
        """(the row's mfu, None), or (None, why there is none)."""
        if reading.first == self.start:
            return None, "the first iteration includes compilation and warm-up"
        if self.peak.reason is not None:
            return None, self.peak.reason
        flops = self.flops
        if self.config.doc_masking:
            causal = document_flops(flops, reading.attended, self.config.block_size)
            flops = {**flops, "flops_per_token_causal": causal}
        try:
            mfu = utilization(tokens_per_sec, self.world.size, flops, self.peak, self.facts, self.recomputed)
        except ValueError as error:
            return None, str(error)
        mfu["tokens_per_iter"] = self.tokens_per_iter
        if self.config.doc_masking:  # the length that the causal figure assumes
            mfu["document_length_per_token"] = reading.attended
        return mfu, None

    def _gradients(self, reading: Reading) -> dict[str, float]:
        gradients = {"global_norm": reading.grad_norm}
        if reading.grad_sum is not None:
            parameters = self.facts["total_params"]
            mean = reading.grad_sum / parameters
            gradients["grad_mean"] = mean
            # the norm is the root of the sum of squares, so no further pass is needed
            gradients["grad_std"] = math.sqrt(max(0.0, reading.grad_norm**2 / parameters - mean**2))
        return gradients

    def _memory(self) -> dict[str, float] | None:
        if self.world.device.type != "cuda":
            return None
        return {
            "allocated_gb": torch.cuda.memory_allocated() / GIB,
            "reserved_gb": torch.cuda.memory_reserved() / GIB,
            "max_allocated_gb": torch.cuda.max_memory_allocated() / GIB,
            "max_reserved_gb": torch.cuda.max_memory_reserved() / GIB,
        }

    # --- evaluations, checkpoints, the end ---

    def check_out_dir(self) -> None:
        """Raises RunError on rank 0 if out_dir was removed under the run; the watchdog ends the others."""
        if self.record is not None:
            self.record.run_lock.check()

    def evaluated(self, iteration: int, losses: dict[str, Any], learning_rate: float) -> None:
        self.check_out_dir()
        log.info(
            f"📊 Eval {iteration:6d} │ Train loss: {losses['train']:.4f} │ Val loss: {losses['val']:.4f}"
        )
        for name, source in losses.get("sources", {}).items():
            log.info(f"     {name} │ Train loss: {source['train']:.4f} │ Val loss: {source['val']:.4f}")
        if self.record is not None:
            best = math.inf if self.best_val_loss is None else self.best_val_loss
            sources = {"sources": losses["sources"]} if "sources" in losses else {}  # of a mixture
            named = {"train_loss": losses["train"], "val_loss": losses["val"], "lr": learning_rate}
            self.record.add("eval_steps", {"iter": iteration, **named, **sources})
            targets = target_losses(self.config.loss_targets)
            new = [loss for loss in targets if losses["val"] <= loss < best]
            if new and not self.config.eval_only:
                self._say_reached(new, iteration, self.record.content)
            self.record.save()

    def _say_reached(self, targets: list[float], iteration: int, content: dict[str, Any]) -> None:
        """A line for each of these loss_targets, which this evaluation is the first to reach. Within its
        pause."""
        rows = content["training_iterations"]
        if iteration > self.logged or not rows:  # what the next row will say of these iterations
            seconds = self.clock.since_lap() / max(iteration - self.logged, 1)
            row = {"iter": iteration - 1, "attempt": content["attempt"], "time_ms": 1000 * seconds}
            rows.append({**row, "tokens_seen": self._tokens_seen(iteration), "gpus": self.world.size})
        for loss, reached in targets_reached(content, targets):
            log.info(f"🎯 Val loss {loss:g} reached at {reached}")

    def saved(self, save: Save) -> None:
        log.info(f"💽 Saved {save.final}{save.note}")
        if self.record is None:
            return
        seconds = {"blocked_seconds": save.blocked_seconds, "write_seconds": save.seconds}
        losses = {"iter": save.progress.iteration, "val_loss": save.progress.val_loss}
        self.record.add("checkpoints", {**losses, "path": str(save.final), **seconds})
        self.lacks_checkpoint = True  # to rewrite it now would stop the GPU, or be counted as if it had

    def close(self, status: str) -> None:
        """Completes the record, and ends the sampling and the bar. Rank 0 writes. Safe after a failure: no
        communication."""
        if self.record is None:
            return
        self.content = self.record.content
        rows, attempt = self.content["training_iterations"], self.record.attempt
        self.summary = {
            "final_iter": rows[-1]["iter"] if rows else None,
            "final_loss": rows[-1].get("loss") if rows else None,
            "best_val_loss": self.best_val_loss,
            "warmup_iters_left_out": UNMEASURED_ITERS,
            # earlier attempts may have had other hardware
            **summarize([row for row in rows if row["attempt"] == attempt]),
        }
        if self.config.loss_targets and not self.config.eval_only:
            self.summary["loss_targets"] = describe_targets(self.content)
        try:
            self.record.close(status, self.summary)  # before all other output, which may fail or block
        finally:
            self._draw(lambda bar: bar.close())
            self.monitor.close()
            if self.follower:
                self.follower.wait()

    def _draw(self, action: Callable[[tqdm], object]) -> None:
        """Changes the bar, if there is one. It ends where the terminal takes no more: training goes on."""
        bar = self.bar
        if bar is not None:
            try:
                action(bar)
            except (OSError, ValueError):
                bar.disable = True  # it draws itself once more when it is deleted
                self.bar = None


def flat_row(row: dict[str, Any]) -> dict[str, Any] | None:
    """The same for one-line scripts; None without a loss or an MFU, as they calculate with them."""
    mfu, memory = row["mfu"], row["memory"]
    if mfu is None or not math.isfinite(row["loss"]):
        return None
    return {
        "iter": row["iter"],
        "loss": row["loss"],
        "mfu": mfu["mfu"],
        "tokens_per_sec": row["tokens_per_sec"],
        "memory_allocated_gb": memory["allocated_gb"] if memory else resident_bytes() / GIB,
        "memory_kind": "allocated on the GPU" if memory else "resident memory of the process",
        "dt_ms": row["time_ms"],
    }


def row_facts(info: dict[str, Any]) -> dict[str, Any]:
    """What every log row's mfu repeats, so that one row can be read alone."""
    architecture = info["model"]["architecture"]
    return {
        "gpu_name": info["hardware"]["gpu_name"],
        "precision": info["hardware"]["precision"],
        **({"executed": low["executed"]} if (low := info.get("low_precision")) else {}),
        "architecture": architecture["arch"],
        "gqa_group_size": architecture["n_head"] // architecture["n_kv_head"],
        "calculation_method": info["flops"]["calculation_method"],
        "total_params": info["model"]["total_params"],
    }
