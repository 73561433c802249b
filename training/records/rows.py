"""Log rows. The only place in the loop that waits for the device: it reads the loss there, and the time since
the last row, without evaluation and checkpoints, over the iterations since then, is the iteration time."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable

import torch
from tqdm import tqdm

from training.checkpoints.saver import Save
from training.configuration.keys import TrainConfig
from training.faults.anomalies import Verdicts
from training.hardware.peaks import Peak
from training.optimization.step import StepResult
from training.process.redaction import redact, redact_all
from training.process.world import World, mean_over_ranks, sum_over_ranks
from training.records.run_record import RunRecord
from training.records.utilization import (
    WARMUP_ITERS,
    document_flops,
    recomputed_flops,
    summarize,
    utilization,
)

log = logging.getLogger("nanomfu")
GB = 2**30  # memory figures are GiB, as torch and nvidia-smi count; the field's name for them is GB


class Logger:
    """Rows to the console, the record and W&B. All ranks call it; rank 0 writes."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        record: RunRecord | None,
        flops: dict,
        peak: Peak,
        facts: dict,
        start: int,
    ):
        self.config, self.world, self.record = config, world, record
        self.flops, self.peak, self.facts = flops, peak, facts
        self.recomputed = recomputed_flops(flops, config)
        self.tokens_per_iter = config.samples_per_iter(world.size) * config.block_size
        self.start = self.logged = start  # first iteration of this process; first one not yet in a row
        self.attended = torch.zeros((), device=world.device)  # StepResult's, summed since the last row
        self.verdicts = Verdicts(config, world, record, start)
        self.at_rows: list[Callable[[int], None]] = []  # called with a row's iteration, after it. All ranks
        self.paused_seconds = 0.0
        self.saved_at = start  # iteration of the last JSON rewrite
        self.wandb = _start_wandb(config, record) if world.is_main and config.wandb_log else None
        self.bar = None
        if record:  # disable=None: no bar where the output is not a terminal
            self.bar = tqdm(total=config.max_iters, initial=start, desc="Training", disable=None)
        self.lap_start = time.perf_counter()

    def is_due(self, iteration: int) -> bool:
        """Also after the first iteration of this process, so that its compilation is in no other row."""
        first_or_last = iteration in (self.start, self.config.max_iters - 1)
        return first_or_last or iteration % self.config.log_interval == 0

    def wants_gradients(self, iteration: int) -> bool:
        interval = self.config.gradient_log_interval
        return self.is_due(iteration) and bool(interval) and iteration % interval == 0

    def step(self, iteration: int, result: StepResult, learning_rate: float) -> None:
        """After every iteration; makes a row when one is due. All ranks."""
        self.verdicts.add(result)
        self.attended += result.attended
        if self.bar is not None:
            self.bar.update()
        if self.is_due(iteration):
            self._log(iteration, result, learning_rate)

    def _log(self, iteration: int, result: StepResult, learning_rate: float) -> None:
        means = mean_over_ranks(torch.stack([result.loss.float(), self.attended]), self.world)
        device_values = [*means, result.grad_norm]
        if result.grad_sum is not None:
            device_values.append(sum_over_ranks(result.grad_sum, self.world))
        of_this, verdicts = len(device_values), self.verdicts.tensors()
        values = torch.stack([value.float() for value in [*device_values, *verdicts]]).tolist()  # sync point
        loss, attended, grad_norm, *grad_sum = values[:of_this]
        seconds = self._lap()
        iterations, first = iteration + 1 - self.logged, self.logged
        self.logged = iteration + 1
        self.attended.zero_()
        self.verdicts.read(values[of_this:])
        skipped = self.verdicts.take_skipped()
        if self.record is not None:  # rank 0
            row = self._row(
                iteration, loss, learning_rate, seconds / iterations, first, attended / iterations
            )
            row["gradients"] = self._gradients(grad_norm, grad_sum)
            if skipped:
                row["skipped_updates"] = skipped
            self._write(row)
        self.verdicts.end_if_due()
        for action in self.at_rows:
            action(iteration)

    def _row(
        self, iteration: int, loss: float, lr: float, seconds: float, first: int, attended: float
    ) -> dict:
        tokens_per_sec = self.tokens_per_iter / seconds
        flops = self.flops
        if self.config.doc_masking:
            causal = document_flops(flops, attended, self.config.block_size)
            flops = {**flops, "flops_per_token_causal": causal}
        mfu, reason = None, self.peak.reason
        if first == self.start:
            reason = "the first iteration includes compilation and warm-up"
        elif reason is None:
            try:
                mfu = utilization(
                    tokens_per_sec, self.world.size, flops, self.peak, self.facts, self.recomputed
                )
                mfu["tokens_per_iter"] = self.tokens_per_iter
                if self.config.doc_masking:  # what the causal figure counts as attended to
                    mfu["document_length_per_token"] = attended
            except ValueError as error:
                reason = str(error)
        return {
            "iter": iteration,
            "loss": loss,
            "time_ms": 1000 * seconds,
            "lr": lr,
            "tokens_per_sec": tokens_per_sec,
            "tokens_per_sec_per_gpu": tokens_per_sec / self.world.size,
            "warmup": first < self.start + WARMUP_ITERS,
            "mfu": mfu,
            "mfu_reason": reason,
            "memory": self._memory(),
        }

    def _gradients(self, grad_norm: float, grad_sum: list[float]) -> dict:
        gradients = {"global_norm": grad_norm}
        if grad_sum:
            mean = grad_sum[0] / self.facts["total_params"]
            gradients["grad_mean"] = mean
            # the norm is the root of the sum of squares, so no further pass is needed
            gradients["grad_std"] = math.sqrt(max(0.0, grad_norm**2 / self.facts["total_params"] - mean**2))
        return gradients

    def _memory(self) -> dict | None:
        if self.world.device.type != "cuda":
            return None
        return {
            "allocated_gb": torch.cuda.memory_allocated() / GB,
            "reserved_gb": torch.cuda.memory_reserved() / GB,
            "max_allocated_gb": torch.cuda.max_memory_allocated() / GB,
            "max_reserved_gb": torch.cuda.max_memory_reserved() / GB,
        }

    def _write(self, row: dict) -> None:
        for line in _console_lines(row, self.facts["calculation_method"], self.flops["flops_per_token"]):
            log.info(line)
        self.record.add_iteration(row)
        if self.wandb:
            flat = {**row, **{f"mfu/{k}": v for k, v in (row["mfu"] or {}).items()}}
            self.wandb.log({k: v for k, v in flat.items() if isinstance(v, (int, float))}, step=row["iter"])
        if row["iter"] // self.config.log_save_interval != self.saved_at // self.config.log_save_interval:
            began = time.perf_counter()
            self.record.save()
            self.paused_seconds += time.perf_counter() - began  # it grows with the run; no iteration's time
            self.saved_at = row["iter"]

    # --- the clock ---

    def _lap(self) -> float:
        """Seconds of training since the last lap; pauses left out."""
        now = time.perf_counter()
        seconds = now - self.lap_start - self.paused_seconds
        self.lap_start, self.paused_seconds = now, 0.0
        return seconds

    @contextlib.contextmanager
    def paused(self):
        """Around evaluation and checkpoints: their time is nobody's iteration. Raises Diverged before them if
        an iteration since the last row ends the run. All ranks."""
        self._synchronize()  # so that training still in flight is not left out with them
        self.verdicts.settle()
        began = time.perf_counter()
        yield
        self._synchronize()
        self.paused_seconds += time.perf_counter() - began

    def _synchronize(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()

    def evaluated(self, iteration: int, losses: dict, learning_rate: float) -> None:
        log.info(
            f"📊 Eval {iteration:6d} │ Train loss: {losses['train']:.4f} │ Val loss: {losses['val']:.4f}"
        )
        for name, parts in losses.get("sources", {}).items():
            log.info(f"     {name} │ Train loss: {parts['train']:.4f} │ Val loss: {parts['val']:.4f}")
        if self.record is not None:
            self.record.add_evaluation(iteration, losses, learning_rate)
            self.record.save()
        if self.wandb:
            self.wandb.log(
                {"eval/train_loss": losses["train"], "eval/val_loss": losses["val"]}, step=iteration
            )

    def saved(self, save: Save) -> None:
        self.verdicts.saved_at = save.progress.iteration
        if self.record is not None:
            began = time.perf_counter()
            self.record.add_checkpoint(
                save.progress.iteration,
                save.progress.val_loss,
                save.final,
                blocked_seconds=save.blocked_seconds,
                write_seconds=save.seconds,
            )
            self.record.save()
            self.paused_seconds += time.perf_counter() - began

    def close(self, status: str, best_val_loss: float | None) -> None:
        """Ends the bar and completes the record. Rank 0 writes. No communication: safe after a failure."""
        if self.bar is not None:
            self.bar.close()
        if self.record is None:
            return
        rows = self.record.content["training_iterations"]
        summary = {
            "final_iter": rows[-1]["iter"] if rows else None,
            "final_loss": rows[-1]["loss"] if rows else None,
            "best_val_loss": best_val_loss,
            "warmup_iters_left_out": WARMUP_ITERS,
            **summarize(self.record.own_rows),
        }
        self.record.finish(status, summary)
        if self.wandb:
            self.wandb.finish(exit_code=0 if status == "completed" else 1)


def _console_lines(row: dict, method: str, flops_per_token: int) -> list[str]:
    mfu, memory = row["mfu"], row["memory"]
    lines = [
        f"📍 Iter {row['iter']:6d} │ Loss: {row['loss']:.4f} │ "
        f"Time: {row['time_ms']:.0f}ms │ LR: {row['lr']:.2e}"
    ]
    if mfu:
        lines.append(
            f"⚡ MFU: {mfu['mfu_percent']:.2f}% │ Achieved: {_tf(mfu['achieved_tflops'])} TF │ "
            f"Peak: {_tf(mfu['hardware_peak_tflops'])} TF"
            + (" (2:4 sparse)" if mfu["sparse_mode"] else "")
            + (f" │ Of the fp8 peak: {fp8:.2f}%" if (fp8 := mfu.get("mfu_fp8_percent")) else "")
            + (
                f" │ Causal, by document: {mfu['mfu_causal_percent']:.2f}%"
                if "document_length_per_token" in mfu
                else ""
            )
            + (f" │ HFU: {hfu:.2f}%" if (hfu := mfu["hfu_percent"]) not in (None, mfu["mfu_percent"]) else "")
        )
    else:
        lines.append(f"⚡ MFU: n/a ({row['mfu_reason']})")
    lines.append(
        f"   Tokens/s: {row['tokens_per_sec']:.0f} │ FLOPs/token: {flops_per_token / 1e9:.2f} GF ({method})"
    )
    if memory:
        lines.append(
            f"💾 Memory: {memory['allocated_gb']:.2f} GB alloc │ {memory['max_allocated_gb']:.2f} GB peak │ "
            f"{memory['reserved_gb']:.2f} GB reserved"
        )
    if row.get("skipped_updates"):
        lines.append(f"   Updates skipped since the last row: {row['skipped_updates']}")
    return lines


def _tf(tflops: float) -> str:
    return f"{tflops:.1f}" if tflops >= 10 else f"{tflops:.3g}"  # a CPU has fractions of one


def _start_wandb(config: TrainConfig, record: RunRecord):
    import wandb  # optional; training/configuration/rules.py has checked that it is there

    name = config.wandb_run_name or record.content["run_name"]
    wandb.init(project=redact(config.wandb_project), name=redact(name), config=redact_all(config.to_dict()))
    return wandb
