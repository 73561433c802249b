"""Evaluation and checkpoints at their iterations: what is due, what is the best so far, what is saved."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from model_config import ModelConfig
from training.batches.loader import Loader, Split
from training.checkpoints.saver import Saver
from training.checkpoints.train_state import Progress, TrainState
from training.configuration.errors import RunError
from training.configuration.keys import TrainConfig
from training.configuration.rules import checkpoint_interval
from training.evaluation import evaluate
from training.faults.anomalies import Diverged
from training.faults.watchdog import Watch
from training.records.rows import Logger

log = logging.getLogger("nanomfu")

LAST_SAVE_S = 15.0  # that a run which has failed waits for the checkpoint that was being written
WORTH_A_LINE_S = 1.0  # of waiting for the checkpoint before


class Milestones:
    """Owns the best validation loss and the last checkpoint. All ranks call it."""

    def __init__(
        self,
        config: TrainConfig,
        model_config: ModelConfig,
        state: TrainState,
        windows: dict[str, Split],
        loader: Loader,
        logger: Logger,
        progress: Progress,
        watch: Watch,
        facts: dict,
    ):
        self.config, self.state = config, state
        self.windows, self.loader, self.logger = windows, loader, logger
        self.start, self.best_val_loss, self.watch = progress.iteration, progress.best_val_loss, watch
        self.evaluated_before = progress.val_loss is not None  # unless a stop request had come in between
        self.last_checkpoint: Path | None = None  # the last that is complete
        self.every_iterations, self.every_seconds = checkpoint_interval(config)
        self.saved_at, self.saved_time = self.start, time.monotonic()  # when the last one was begun
        self.before_saving: list[Callable[[int], None]] = []  # called with the updates made. All ranks
        self.saver = Saver(config, model_config, state, facts, self.start)
        may_save = config.always_save_checkpoint or config.eval_interval or config.checkpoint_interval
        if may_save and self.start < config.max_iters and not config.eval_only:
            self.saver.prepare()

    def reach(self, iteration: int, learning_rate: float) -> None:
        """Before the update of `iteration`: evaluates and saves if that is due. Raises RunError if the last
        checkpoint could not be written."""
        self._conclude()
        if iteration == self.start:
            missed = iteration > 0 and self._evaluates(iteration) and not self.evaluated_before
            if self.config.eval_at_start or missed:
                self.evaluate(iteration, learning_rate)
            return  # there is nothing new to save
        due = self._saves(iteration)
        val_loss, improved = None, False
        if self._evaluates(iteration):
            val_loss, improved = self.evaluate(iteration, learning_rate)
            due = due or self.config.always_save_checkpoint
        if improved or due:
            self.save(iteration, val_loss, improved)
            self.watch.check(at_once=True)  # who was asked to stop meanwhile need not save again

    def stop(self, iteration: int) -> None:
        """Instead of the update of `iteration`, as the run was asked to stop: saves what is not saved."""
        if iteration == self.start:
            log.info("Nothing to save: no iteration was completed")
        elif not (self.config.always_save_checkpoint or self.config.checkpoint_interval):
            log.info("Nothing was saved: always_save_checkpoint=False saves a new best only")
        elif self.saved_at != iteration:
            self.save(iteration, None, False)
        self._complete()

    def finish(self, learning_rate: float) -> None:
        """After the last update. always_save_checkpoint saves here whether an evaluation is due or not."""
        iteration = self.config.max_iters
        if iteration <= self.start:
            log.info(f"Nothing was left to train: iteration {self.start:,} of max_iters={iteration:,}")
            return
        val_loss, improved = None, False
        if self._evaluates(iteration):
            val_loss, improved = self.evaluate(iteration, learning_rate)
        if improved or self.config.always_save_checkpoint or self.config.checkpoint_interval:
            self.save(iteration, val_loss, improved)
        self._complete()
        if self.last_checkpoint is None:
            log.info("No checkpoint was saved: always_save_checkpoint=False and no evaluation set a new best")

    def evaluate(self, iteration: int, learning_rate: float) -> tuple[float, bool]:
        """(validation loss, whether it is a new best)."""
        with self.logger.paused(), self.watch.during("evaluation"):
            losses = evaluate(
                self.state.strategy.module, self.windows, self.config, self.state.world, self.watch.check
            )
            self.logger.evaluated(iteration, losses, learning_rate)
        val_loss = losses["val"]
        if not math.isfinite(val_loss):
            raise Diverged(f"the validation loss at iteration {iteration} is {val_loss}; nothing was saved")
        improved = self.best_val_loss is None or val_loss < self.best_val_loss
        if improved:
            self.best_val_loss = val_loss
        return val_loss, improved

    def save(self, iteration: int, val_loss: float | None, best: bool) -> None:
        """Begins a checkpoint; when it is complete, reach() hears of it."""
        for action in self.before_saving:
            action(iteration)
        progress = Progress(iteration, self.loader.position, self.best_val_loss, val_loss)
        with self.logger.paused(), self.watch.during("checkpoint"):
            began = time.monotonic()
            self._conclude(wait=None)
            if (waited := time.monotonic() - began) > WORTH_A_LINE_S:
                log.info(f"Waited {waited:.1f} s for the checkpoint before to be written; raise its interval")
            self.saver.begin(progress, " (best so far)" if best else "", waited)
            self.saved_at, self.saved_time = iteration, time.monotonic()
        self._conclude()

    def _conclude(self, wait: float | None = 0.0) -> None:
        """Notes the checkpoint under way if it is complete within `wait` seconds; None: waits for it."""
        save = self.saver.finished(wait)
        if save:
            self.last_checkpoint = save.final
            log.info(f"💽 Saved {save.final}{save.note}")
            self.logger.saved(save)

    def _complete(self) -> None:
        with self.watch.during("checkpoint"):
            self._conclude(wait=None)

    def close(self) -> None:
        """After the loop, however it ended: what a failed run was still writing is worth a moment."""
        try:
            self._conclude(wait=LAST_SAVE_S)
        except RunError as error:  # the run ends with an error of its own
            log.warning(str(error))

    def _saves(self, iteration: int) -> bool:
        """Whether checkpoint_interval is over. The time is rank 0's; an iteration later, all know."""
        if self.every_iterations:
            return iteration % self.every_iterations == 0
        if not self.every_seconds:
            return False
        if self.state.world.is_main and time.monotonic() - self.saved_time >= self.every_seconds:
            self.watch.agreement.ask("checkpoint", iteration)
        return self.watch.agreement.answer("checkpoint") > self.saved_at  # not one from before the last save

    def _evaluates(self, iteration: int) -> bool:
        return bool(self.config.eval_interval) and iteration % self.config.eval_interval == 0
