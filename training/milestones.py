"""Evaluation and checkpoints at their iterations: what is due, what is the best so far, what is saved."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from model_config import ModelConfig
from training.checkpoint import Progress, TrainState, save_checkpoint
from training.checkpoint_folder import set_aside
from training.config import TrainConfig
from training.evaluate import evaluate
from training.loader import Loader, Split
from training.logger import Diverged, Logger

log = logging.getLogger("nanomfu")


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
    ):
        self.config, self.model_config, self.state = config, model_config, state
        self.windows, self.loader, self.logger = windows, loader, logger
        self.start, self.best_val_loss = progress.iteration, progress.best_val_loss
        self.last_checkpoint: Path | None = None

    def reach(self, iteration: int, learning_rate: float) -> None:
        """Before the update of `iteration`: evaluates and saves if that is due."""
        if iteration == self.start:
            if self.config.eval_at_start:
                self.evaluate(iteration, learning_rate)
            return  # there is nothing new to save
        if not self._evaluates(iteration):
            return
        val_loss, improved = self.evaluate(iteration, learning_rate)
        if improved or self.config.always_save_checkpoint:
            self.save(iteration, val_loss, improved)

    def finish(self, learning_rate: float) -> None:
        """After the last update. always_save_checkpoint saves here whether an evaluation is due or not."""
        iteration = self.config.max_iters
        if iteration <= self.start:
            log.info(f"Nothing was left to train: iteration {self.start:,} of max_iters={iteration:,}")
            return
        val_loss, improved = None, False
        if self._evaluates(iteration):
            val_loss, improved = self.evaluate(iteration, learning_rate)
        if improved or self.config.always_save_checkpoint:
            self.save(iteration, val_loss, improved)
        if self.last_checkpoint is None:
            log.info("No checkpoint was saved: always_save_checkpoint=False and no evaluation set a new best")

    def evaluate(self, iteration: int, learning_rate: float) -> tuple[float, bool]:
        """(validation loss, whether it is a new best)."""
        with self.logger.paused():
            losses = evaluate(self.state.strategy.module, self.windows, self.config, self.state.world)
            self.logger.evaluated(iteration, losses, learning_rate)
        val_loss = losses["val"]
        if not math.isfinite(val_loss):
            raise Diverged(f"the validation loss at iteration {iteration} is {val_loss}; nothing was saved")
        improved = self.best_val_loss is None or val_loss < self.best_val_loss
        if improved:
            self.best_val_loss = val_loss
        return val_loss, improved

    def save(self, iteration: int, val_loss: float | None, best: bool) -> None:
        out_dir = Path(self.config.out_dir)
        progress = Progress(iteration, self.loader.position, self.best_val_loss, val_loss)
        with self.logger.paused():
            if self.start == 0 and self.last_checkpoint is None and self.state.world.is_main:
                aside = set_aside(out_dir)
                if aside:
                    log.info(f"Checkpoints of an earlier run in this out_dir are now in {aside}")
            self.last_checkpoint = save_checkpoint(
                out_dir, self.state, progress, self.config, self.model_config
            )
            log.info(f"💽 Saved {self.last_checkpoint}{' (best so far)' if best else ''}")
            self.logger.saved(iteration, val_loss, self.last_checkpoint)

    def _evaluates(self, iteration: int) -> bool:
        return bool(self.config.eval_interval) and iteration % self.config.eval_interval == 0
