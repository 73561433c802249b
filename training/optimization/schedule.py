"""The learning-rate schedule: a pure function of the iteration, so a resume needs no scheduler state.

The trap is a schedule that does not fit the length of the run: one that is longer than the run never leaves
the warm-up, and nothing is learned. So its length is the run's, unless it is stated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from training.configuration.keys import KEYS, TrainConfig
from training.configuration.rules import check_schedule

MAX_WARMUP = 2000  # iterations of warm-up, unless warmup_iters is stated


# --- how long ---


def end_after_epochs(
    config: TrainConfig, epoch: int, per_iteration: int, iteration: int = 0, samples_seen: int = 0
) -> TrainConfig:
    """The configuration with max_iters lowered to where max_epochs ends the run. epoch, per_iteration:
    numbers of samples; iteration, samples_seen: where this attempt begins.

    No sample of the last epoch is left out, so the last iteration may begin another epoch.
    """
    if config.max_epochs is None or config.eval_only:
        return config
    samples = math.ceil(Fraction(repr(config.max_epochs)) * epoch) - samples_seen
    left = max(0, -(-samples // per_iteration))
    return replace(config, max_iters=min(config.max_iters, iteration + left))


def warmup_and_decay_iters(config: TrainConfig) -> tuple[int, int]:
    """(warmup_iters, lr_decay_iters) of a run that starts from scratch, with the defaults of what is None."""
    end = max(1, config.max_iters) if config.lr_decay_iters is None else config.lr_decay_iters
    warmup = min(MAX_WARMUP, end // 10) if config.warmup_iters is None else config.warmup_iters
    return warmup, end


def fix_schedule(config: TrainConfig, saved: Mapping[str, Any]) -> TrainConfig:
    """The configuration with numbers for both lengths. `saved`: the settings in the checkpoint from which the
    run resumes, whose schedule goes on; {} from scratch. Raises UserError."""
    fixed = replace(
        config,
        warmup_iters=_stated_or_saved("warmup_iters", config.warmup_iters, saved),
        lr_decay_iters=_stated_or_saved("lr_decay_iters", config.lr_decay_iters, saved),
    )
    warmup, end = warmup_and_decay_iters(fixed)
    fixed = replace(fixed, warmup_iters=warmup, lr_decay_iters=end)
    if config.lr_decay_iters is not None:
        check_schedule(fixed)  # the warm-up that it was not compared with is known now
    return fixed


def _stated_or_saved(name: str, stated: int | None, saved: Mapping[str, Any]) -> int | None:
    """None if nothing is stated and the checkpoint holds no value that the key takes. What it holds then
    differs from the default, and the resume is refused."""
    value = saved.get(name) if stated is None else stated
    if type(value) is int and (KEYS[name].minimum or 0) <= value <= KEYS[name].most(value):
        return value
    return None


def schedule_warnings(config: TrainConfig) -> list[str]:
    """What is probably not meant, with the fix."""
    (warmup, end), last = warmup_and_decay_iters(config), config.max_iters
    found: list[str] = []
    if config.eval_only:
        return found
    if 2 * warmup > last > 0:
        fitting = replace(config, warmup_iters=None, lr_decay_iters=None)
        flags = "--warmup_iters={} --lr_decay_iters={}".format(*warmup_and_decay_iters(fitting))
        highest = min(1.0, last / (warmup + 1))
        found.append(
            f"warmup_iters={warmup:,} is more than half of max_iters={last:,}: the rate rises "
            f"for most of the run and reaches {highest:.2g} of learning_rate, so the model may learn little. "
            f"To train for so many iterations, add {flags}; a test of the speed needs no change"
        )
    if last > end >= warmup and learning_rate(end, config) < config.learning_rate:
        allow = dict.fromkeys([*(config.allow_changes or "").split(","), "lr_decay_iters"])
        allowed = f" --allow_changes={','.join(filter(None, allow))}" if config.init_from == "resume" else ""
        what = f"at min_lr={config.min_lr:g}" if config.min_lr else "at a rate of 0, so it changes no weight"
        found.append(
            f"lr_decay_iters={end:,} comes before max_iters={last:,}: every iteration from {end:,} on trains "
            f"{what}. To decay until the end of the run, add --lr_decay_iters={last}{allowed}"
        )
    return found


# --- the rate ---


def learning_rate(iteration: int, config: TrainConfig) -> float:
    """The rate of this iteration (0-based): linear warm-up, then lr_schedule to min_lr at lr_decay_iters."""
    warmup, end = warmup_and_decay_iters(config)
    if iteration < warmup:
        return config.learning_rate * (iteration + 1) / (warmup + 1)
    progress = min(1.0, (iteration - warmup) / max(1, end - warmup))  # 0 after warm-up, 1 at the end
    share = SCHEDULES[config.lr_schedule](progress, config)
    return config.min_lr + share * (config.learning_rate - config.min_lr)


def _cosine(progress: float, config: TrainConfig) -> float:
    """Loshchilov and Hutter 2017, eq. 5, without their warm restarts."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _linear(progress: float, config: TrainConfig) -> float:
    return 1.0 - progress


def _wsd(progress: float, config: TrainConfig) -> float:
    """Warm-up, stable, decay over the last wsd_decay_fraction in wsd_decay_shape. Hu et al. 2024, sec. 4."""
    warmup, end = warmup_and_decay_iters(config)
    decay = min(1.0, config.wsd_decay_fraction * end / max(1, end - warmup))
    return WSD_DECAYS[config.wsd_decay_shape](min(1.0, (1.0 - progress) / decay))


# wsd_decay_shape -> share of (learning_rate - min_lr), of the share of the decay's iterations that are left:
# 1 where the decay begins, 0 at lr_decay_iters. '1-sqrt': Haegele et al. 2024 (arXiv 2405.18392), sec. 3.
WSD_DECAYS = {
    "linear": lambda left: left,
    "cosine": lambda left: 0.5 * (1.0 - math.cos(math.pi * left)),
    "1-sqrt": lambda left: 1.0 - math.sqrt(1.0 - left),
}


def _constant(progress: float, config: TrainConfig) -> float:
    return 1.0


# schedule -> share of (learning_rate - min_lr) left at `progress` in [0, 1]
SCHEDULES = {"cosine": _cosine, "linear": _linear, "wsd": _wsd, "constant": _constant}
