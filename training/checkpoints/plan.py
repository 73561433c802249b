"""Says what a run will save, before it begins: how many checkpoints, when, and how much disk they need."""

from __future__ import annotations

import math
from dataclasses import dataclass

from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.configuration.rules import checkpoint_interval
from training.optimization.optimizer import kept_bytes

SAVE_NONE = "--always_save_checkpoint=False --eval_interval=0"  # to be added to a command


@dataclass(frozen=True)
class SavePlan:
    """The checkpoints of a run from its first iteration to its last."""

    most: int | None  # checkpoints written, deleted ones included; None: the time decides
    may_be_fewer: bool  # a checkpoint is saved only if the validation loss is a new best
    on_disk: int | None  # the most at one time, the one that is being written included; None: all of them
    when: str


def plan_saves(config: TrainConfig, start: int) -> SavePlan:
    """`start`: the first iteration."""
    last, every = config.max_iters, []
    iterations, seconds = checkpoint_interval(config)
    if config.eval_only or start >= last:
        return SavePlan(0, False, 0, "none")
    if iterations:
        every.append(iterations)
    if config.eval_interval:
        every.append(config.eval_interval)
    ends = bool(config.always_save_checkpoint or config.checkpoint_interval)
    count = _multiples(every, start, last - 1) + (ends or may_save_last_best(config))
    most = None if seconds else count
    on_disk = None if config.keep_last is None else config.keep_last + bool(config.eval_interval) + 1
    if most is not None and start == 0:
        on_disk = min(most, on_disk or most)
    bests_only = bool(config.eval_interval) and not config.always_save_checkpoint
    return SavePlan(most, bests_only, on_disk, _when(config, iterations, seconds, ends))


def may_save_last_best(config: TrainConfig) -> bool:
    """Whether the evaluation after the last update may be saved as a new best. Not if it is the only one: a
    short run with always_save_checkpoint=False, such as a measurement of speed, saves nothing."""
    interval = config.eval_interval
    return bool(interval) and (interval <= config.max_iters or config.eval_at_start)


def checkpoint_bytes(parameters: int, config: TrainConfig) -> int:
    """The size of one, except for a few kilobytes: the weights, and what the optimizer keeps of them."""
    return parameters * DTYPES[config.param_dtype].itemsize + sum(kept_bytes(config).values())


def _when(config: TrainConfig, iterations: int, seconds: float, ends: bool) -> str:
    times = [f"every {iterations:,} iterations"] if iterations else []
    times += [f"every {config.checkpoint_interval}"] if seconds else []
    if config.eval_interval:
        bests = "" if config.always_save_checkpoint else " if the validation loss is a new best"
        times.append(f"at each evaluation, every {config.eval_interval:,} iterations{bests}")
    times += ["at the end"] if ends else []
    return "; ".join(times)


def _multiples(every: list[int], first: int, last: int) -> int:
    """How many iterations after the first one, up to the last one, are a multiple of any of them."""
    single = sum(last // n - first // n for n in every)
    if len(every) == 2:
        both = math.lcm(*every)
        single -= last // both - first // both
    return single
