"""Evaluates and saves a checkpoint at the iterations where that is due."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

from common.errors import RunError
from training.batches.loader import Loader
from training.batches.windows import Split
from training.checkpoints.plan import may_save_last_best, plan_saves
from training.checkpoints.saver import Saver
from training.checkpoints.train_state import Progress
from training.configuration.rules import checkpoint_interval
from training.evaluation import evaluate, measure
from training.faults.anomalies import AnomalyPolicy, Diverged
from training.faults.consensus import Consensus
from training.faults.replica_check import ReplicaCheck
from training.faults.watchdog import Watchdog
from training.records.rows import Logger

log = logging.getLogger("nanomfu")

SHUTDOWN_SAVE_TIMEOUT_S = 15.0  # how long a failed run waits for the checkpoint that is being written
LOGGED_WAIT_S = 1.0  # a longer wait for the previous checkpoint is logged


class EvaluateAndSave:
    """Knows the last checkpoint; the logger keeps the best validation loss. All ranks call it."""

    def __init__(
        self,
        saver: Saver,
        windows: dict[str, Split],
        loader: Loader,
        progress: Progress,
        logger: Logger,
        anomalies: AnomalyPolicy,
        replica_check: ReplicaCheck,
        watchdog: Watchdog,
        consensus: Consensus,
    ):
        """`progress` is where this process starts."""
        config = saver.config
        self.config, self.state = config, saver.state
        self.windows, self.loader, self.saver = windows, loader, saver
        self.logger, self.anomalies, self.replica_check = logger, anomalies, replica_check
        self.start, self.watchdog, self.consensus = progress.iteration, watchdog, consensus
        self.evaluated_before = progress.val_loss is not None  # False if a stop came first
        self.measured = self._measured(progress)
        self.last_checkpoint: Path | None = None  # the last complete one
        self.every_iterations, self.every_seconds = checkpoint_interval(config)
        self.saved_at, self.saved_time = self.start, time.monotonic()  # when the last save began
        if plan_saves(config, self.start).most != 0:
            saver.prepare()

    def _measured(self, progress: Progress) -> tuple[str | None, int]:
        """What validation losses are the mean of, and since which iteration. A best loss of another measure
        would refuse every new one, or none, so that the best begins anew."""
        before, since = progress.measure, progress.measured_since
        now = measure(self.windows, self.config, self.saver.facts["data"]) or before
        if before in (None, now) or progress.best_val_loss is None:
            return now, since
        what = (
            f"validation losses are of other tokens or windows than before iteration {self.start:,}: their "
            f"best, {progress.best_val_loss:.4f}, stays in the record, and the best begins anew"
        )
        log.warning(what)
        self.logger.best_val_loss = None
        if self.logger.record is not None:
            best = progress.best_val_loss
            self.logger.record.add_event(self.start, "other_measure", best_val_loss=best, message=what)
        return now, self.start

    def before_update(self, iteration: int, learning_rate: float) -> None:
        """Evaluates and saves before the update of `iteration`, if that is due. Raises RunError if the last
        checkpoint could not be written."""
        self._note_save()
        if iteration == self.start:
            missed = iteration > 0 and self._evaluation_is_due(iteration) and not self.evaluated_before
            if self.config.eval_at_start or missed:
                self.evaluate(iteration, learning_rate)
            return  # there is nothing new to save
        due = self._save_is_due(iteration)
        val_loss, improved = None, False
        if self._evaluation_is_due(iteration):
            val_loss, improved = self.evaluate(iteration, learning_rate)
            due = due or self.config.always_save_checkpoint
        if improved or due:
            self.save(iteration, val_loss, improved)
            self.watchdog.check(at_once=True)  # a stop asked for meanwhile need not save again

    def stop(self, iteration: int) -> None:
        """Runs instead of the update of `iteration` if the run was asked to stop: saves what is not saved."""
        if iteration == self.start:
            log.info("Nothing to save: no iteration was completed")
        elif not (self.config.always_save_checkpoint or self.config.checkpoint_interval):
            log.info("Nothing was saved: always_save_checkpoint=False saves a new best only")
        elif self.saved_at != iteration:
            self.save(iteration, None, False)
        self._wait_for_save()

    def complete(self, learning_rate: float) -> None:
        """After the last update. Evaluates and saves, whether or not eval_interval says so."""
        iteration = self.config.max_iters
        if iteration <= self.start:
            if iteration == self.start > 0 and self.config.eval_interval and not self.evaluated_before:
                self.evaluate(iteration, learning_rate)  # a stop came between the last update and this
            log.info(
                f"Nothing was left to train: iteration {self.start:,} of max_iters={iteration}; to train on, "
                "raise --max_iters, which counts all iterations"
            )
            return
        val_loss, improved = None, False
        if self.config.eval_interval:  # always, so that a run ends with the loss of what it made
            val_loss, improved = self.evaluate(iteration, learning_rate)
            improved = improved and may_save_last_best(self.config)
        if improved or self.config.always_save_checkpoint or self.config.checkpoint_interval:
            self.save(iteration, val_loss, improved)
        self._wait_for_save()
        if self.last_checkpoint is None:
            log.info("No checkpoint was saved: always_save_checkpoint=False and no evaluation set a new best")

    def evaluate(self, iteration: int, learning_rate: float) -> tuple[float, bool]:
        """(validation loss, whether it is a new best)."""
        self.anomalies.read_now()
        with self.logger.clock.paused(), self.watchdog.during("evaluation"):
            losses = evaluate(
                self.state.strategy.module, self.windows, self.config, self.state.world, self.watchdog.check
            )
            self.logger.evaluated(iteration, losses, learning_rate)
        val_loss = losses["val"]
        if not math.isfinite(val_loss):
            raise Diverged(f"the validation loss at iteration {iteration} is {val_loss}; nothing was saved")
        best = self.logger.best_val_loss
        improved = best is None or val_loss < best
        if improved:
            self.logger.best_val_loss = val_loss
        return val_loss, improved

    def save(self, iteration: int, val_loss: float | None, best: bool) -> None:
        """Begins a checkpoint. A later before_update() notes that it is complete."""
        self.anomalies.read_now()
        self.logger.check_out_dir()
        self.replica_check.compare(iteration)
        losses = self.logger.best_val_loss, val_loss
        progress = Progress(iteration, self.loader.position, *losses, *self.measured)
        with self.logger.clock.paused(), self.watchdog.during("checkpoint"):
            began = time.monotonic()
            self._note_save(wait=None)
            if (waited := time.monotonic() - began) > LOGGED_WAIT_S:
                log.info(f"Waited {waited:.1f} s for the checkpoint before to be written; raise its interval")
            self.saver.begin(progress, " (best so far)" if best else "", waited)
            self.saved_at, self.saved_time = iteration, time.monotonic()
        self._note_save()

    def _note_save(self, wait: float | None = 0.0) -> None:
        """Notes the checkpoint in progress if it is complete within `wait` seconds; None: waits for it."""
        try:
            save = self.saver.completed(wait)
        except RunError:
            self.logger.check_out_dir()  # names the reason, if out_dir is gone
            raise
        if save:
            self.last_checkpoint = save.final
            self.anomalies.saved_at = save.progress.iteration
            self.logger.saved(save)

    def _wait_for_save(self) -> None:
        with self.watchdog.during("checkpoint"):
            self._note_save(wait=None)

    def close(self) -> None:
        """After the loop, however it ended: a failed run waits a moment for the checkpoint in progress."""
        try:
            self._note_save(wait=SHUTDOWN_SAVE_TIMEOUT_S)
        except RunError as error:  # the run itself ends with another error
            log.warning(str(error))

    def _save_is_due(self, iteration: int) -> bool:
        """Whether checkpoint_interval has passed. Rank 0 measures the time; an iteration later, all know."""
        if self.every_iterations:
            return iteration % self.every_iterations == 0
        if not self.every_seconds:
            return False
        if self.state.world.is_main and time.monotonic() - self.saved_time >= self.every_seconds:
            self.consensus.ask("checkpoint", iteration)
        # a request from before the last save does not count
        return self.consensus.answer("checkpoint") > self.saved_at

    def _evaluation_is_due(self, iteration: int) -> bool:
        return bool(self.config.eval_interval) and iteration % self.config.eval_interval == 0
