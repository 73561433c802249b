"""Learning-rate schedule. A pure function of the iteration, so a resume needs no scheduler state."""

from __future__ import annotations

import math

from training.configuration.keys import TrainConfig


def learning_rate(iteration: int, config: TrainConfig) -> float:
    """The rate of this iteration (0-based): linear warm-up, then lr_schedule to min_lr at lr_decay_iters."""
    if iteration < config.warmup_iters:
        return config.learning_rate * (iteration + 1) / (config.warmup_iters + 1)
    if not config.decay_lr:
        return config.learning_rate
    span = config.lr_decay_iters - config.warmup_iters
    progress = min(1.0, (iteration - config.warmup_iters) / max(1, span))  # 0 after warm-up, 1 at the end
    share = SCHEDULES[config.lr_schedule](progress, config)
    return config.min_lr + share * (config.learning_rate - config.min_lr)


def _cosine(progress: float, config: TrainConfig) -> float:
    """Loshchilov and Hutter 2017, eq. 5, without their warm restarts."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _linear(progress: float, config: TrainConfig) -> float:
    return 1.0 - progress


def _wsd(progress: float, config: TrainConfig) -> float:
    """Warm-up, stable, linear decay over the last wsd_decay_fraction. Hu et al. 2024, sec. 4."""
    span = config.lr_decay_iters - config.warmup_iters
    decay = min(1.0, config.wsd_decay_fraction * config.lr_decay_iters / max(1, span))
    return min(1.0, (1.0 - progress) / decay)


def _constant(progress: float, config: TrainConfig) -> float:
    return 1.0


# schedule -> share of (learning_rate - min_lr) left at `progress` in [0, 1]
SCHEDULES = {"cosine": _cosine, "linear": _linear, "wsd": _wsd, "constant": _constant}
