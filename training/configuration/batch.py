"""Divides the tokens of an iteration: what follows from the numbers that a user states, before a device is
known. Whatever cannot be exact is an error that names the nearest numbers that can.

tokens_per_iter = GPUs x gradient_accumulation_steps x batch_size x block_size
"""

from __future__ import annotations

from common.errors import UserError
from training.configuration.keys import AUTO, TrainConfig

BATCH = ("batch_size", "gradient_accumulation_steps")  # what may be 'auto'
# eval_batch_size where it is not stated: the windows of an evaluation must not depend on how an iteration is
# divided among GPUs and micro-steps
EVAL_BATCH = 16


def check_batch(config: TrainConfig, world_size: int) -> None:
    """Raises UserError if the stated numbers cannot give the tokens of an iteration exactly."""
    check_tokens(config, config, world_size)
    if is_auto(config) and not config.eval_only:  # an evaluation alone has no iterations
        _check_division(config, world_size)


def check_tokens(config: TrainConfig, own: TrainConfig, world_size: int) -> None:
    """Raises UserError if 'auto' has no tokens to reach. own: with the batch that the config file states."""
    if not is_auto(config) or config.tokens_per_iter is not None:
        return
    sequences = EVAL_BATCH * world_size if is_auto(own) else own.samples_per_iter(world_size)
    flags = [f"--{name}=auto" for name in BATCH if getattr(config, name) != AUTO]
    flags.append(f"--tokens_per_iter={sequences * config.block_size}")
    raise UserError(
        f"{_stated(config)} needs tokens_per_iter, or the training would depend on the memory of the GPU; "
        f"set {' '.join(flags)}, or state both numbers"
    )


def is_auto(config: TrainConfig) -> bool:
    return AUTO in (config.batch_size, config.gradient_accumulation_steps)


def sequences_per_gpu(config: TrainConfig, world_size: int) -> int:
    """What each GPU has to do in an iteration, or in a batch of an evaluation alone, where 'auto' stands."""
    if config.eval_only or config.tokens_per_iter is None:
        return config.eval_batch_size or EVAL_BATCH
    return config.tokens_per_iter // (config.block_size * world_size)


def divisors(number: int) -> list[int]:
    """In rising order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _check_division(config: TrainConfig, world_size: int) -> None:
    assert config.tokens_per_iter is not None
    stated = [number for number in (config.batch_size, config.gradient_accumulation_steps) if number != AUTO]
    unit = config.block_size * world_size * (stated[0] if stated else 1)
    if config.tokens_per_iter % unit:
        below = config.tokens_per_iter // unit * unit
        nearest = " or ".join(f"--tokens_per_iter={tokens}" for tokens in (below, below + unit) if tokens)
        raise UserError(
            f"tokens_per_iter={config.tokens_per_iter:,} cannot be reached exactly: {_stated(config)}, "
            f"block_size={config.block_size} and {world_size} process{'es' * (world_size > 1)} make "
            f"multiples of {unit:,} tokens; set {nearest}, or change what divides it"
        )


def _stated(config: TrainConfig) -> str:
    return (
        f"batch_size={config.batch_size!r} with gradient_accumulation_steps="
        f"{config.gradient_accumulation_steps!r}"
    )
