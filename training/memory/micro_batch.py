"""Resolves batch_size='auto': the micro-batch that fits by the estimate of memory, and as many of them as
make tokens_per_iter.

All ranks choose the same, for the smallest memory among them. Only batch_size, gradient_accumulation_steps
and loss_chunks change, never what is recomputed or sharded, so the samples of each iteration and their order
are the same on every GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from common import units
from common.errors import UserError
from training.configuration.batch import divisors, is_auto, sequences_per_gpu
from training.configuration.keys import AUTO, TrainConfig
from training.configuration.rules import check
from training.memory.estimate import estimate_memory, needed_memory
from training.memory.gpus import CPU_NAME, DeviceMemory, device_memory
from training.optimization.optimizer import optimizer_class
from training.process.world import World, gather_objects

# More is not faster: Qwen3 1.8B on one H200 had 61.4 % MFU with 16 x 2048, 60.3 % with 22 x 2048 (LOG.md).
MOST_TOKENS = 32_768
ENOUGH_TOKENS = 16_384  # matmuls of so many rows are fast, so the logits stay in one part
# Each part of the logits reads and writes the head's whole gradient: below the first figure this costs more
# than a larger micro-batch gains; below the second it is only worth it if nothing else fits.
FAST_PART, SMALLEST_PART = 4096, 512

# Recomputation that could make a run fit, from the least slowdown to the greatest
LEVELS = "memory_bound", "attention", "selective", "full"
FULL = {"activation_checkpointing": "full"}
MOST_REMEDIES = 3  # so many of those that fit are shown
LARGE_BATCH = {"loss_chunks": 8, **FULL}  # with which a stated batch may fit
FSDP = {"use_fsdp": True, "reshard_after_forward": True, "use_zero1": False}
FSDP_GPUS = (2, 4, 8)
NUMBERS = ("batch_size", "gradient_accumulation_steps", "loss_chunks")  # what the program may choose


@dataclass(frozen=True)
class MicroBatch:
    """What was asked, and whether what is used fits. The used numbers are in the record's config."""

    stated: dict[str, Any]  # the four keys as they were stated
    set_aside: bool  # tokens_per_iter, because the stated numbers make another product
    needed_gib: float  # by the estimate, with the reserve
    available_gib: float
    device: str

    @property
    def fits(self) -> bool:
        return self.needed_gib <= self.available_gib

    @property
    def is_chosen(self) -> bool:
        """Whether the program chose the size, and not the user."""
        return bool(self.stated["batch_size"] == AUTO)

    def warnings(self, config: TrainConfig, world_size: int) -> list[str]:
        """What the report warns of: stated numbers are used even if the estimate speaks against them."""
        if self.fits or self.is_chosen or self.device == CPU_NAME:
            return []
        best = settings_that_fit(config, world_size, DeviceMemory(self.available_gib, self.device))[0]
        return [
            f"by the estimate this needs {units.memory(self.needed_gib)}, and {self.device} has "
            f"{units.memory(self.available_gib)}; what fits: {best}"
        ]

    def describe(self, config: TrainConfig, world_size: int, native: bool = False) -> dict[str, Any]:
        """What fits, as values that the start-up report and the record show. native: as in
        estimate_memory()."""
        return {
            "micro_batch": asdict(self),
            "estimated_memory_gb": estimate_memory(config, world_size, native),
            "warnings": self.warnings(config, world_size),
        }


def resolve_micro_batch(config: TrainConfig, world: World) -> tuple[TrainConfig, MicroBatch]:
    """The configuration with numbers in place of 'auto'. All ranks. Raises UserError if nothing fits."""
    memories = gather_objects(device_memory(world.device, world.local_size), world)
    memory = min(memories, key=lambda one: one.gib)
    numbers, found = choose(config, world.size, memory)
    if found.is_chosen and not found.fits and not config.eval_only:
        fits = "\n  ".join(settings_that_fit(config, world.size, memory))
        raise UserError(
            f"batch_size='auto' finds nothing that fits: {numbers.batch_size} x {numbers.block_size} tokens "
            f"with loss_chunks={numbers.loss_chunks} need {units.memory(found.needed_gib)} by the estimate, "
            f"and {memory.device} has {units.memory(memory.gib)}. These fit:\n  {fits}\n"
            "Numbers for batch_size and gradient_accumulation_steps are not checked against the estimate."
        )
    return numbers, found


def choose(config: TrainConfig, world_size: int, memory: DeviceMemory) -> tuple[TrainConfig, MicroBatch]:
    """The configuration with numbers, and whether they fit. If nothing fits: the smallest micro-batch."""
    candidates = list(_candidates(config, world_size))
    fitting = (one for one in candidates if needed_memory(one, world_size) <= memory.gib)
    numbers = next(fitting, candidates[-1])
    stated = {name: getattr(config, name) for name in (*NUMBERS, "tokens_per_iter")}
    made = numbers.samples_per_iter(world_size) * config.block_size
    set_aside = not is_auto(config) and config.tokens_per_iter not in (None, made)
    needed = needed_memory(numbers, world_size)
    return numbers, MicroBatch(stated, set_aside, needed, memory.gib, memory.device)


# --- the rule ---


def _candidates(config: TrainConfig, world_size: int) -> Iterator[TrainConfig]:
    """Settings with numbers, the best first; at least one.

    1. the largest micro-batch, up to MOST_TOKENS, with the logits in one part, if it has ENOUGH_TOKENS;
    2. the largest one with logits in the fewest parts that are not below FAST_PART tokens;
    3. the largest one with logits in the fewest parts that are not below SMALLEST_PART tokens.

    A number that the user states stays. With a stated micro-batch, loss_chunks='auto' is the fewest parts
    that fit on a GPU, none below SMALLEST_PART tokens; 1 if none fits.
    """
    T, batches, leasts = config.block_size, _batch_sizes(config, world_size), (FAST_PART, SMALLEST_PART)
    if config.batch_size == AUTO:
        numbers = [(B, 1) for B in batches if B * T >= ENOUGH_TOKENS]
        numbers += [(B, parts) for least in leasts for B in batches for parts in _parts(B * T, least)]
    else:
        several = _parts(batches[0] * T, SMALLEST_PART) if config.device == "cuda" else []
        numbers = [(batches[0], parts) for parts in (*several, 1)]
    steps, parts = config.gradient_accumulation_steps, config.loss_chunks
    sequences = 0 if steps != AUTO or config.eval_only else sequences_per_gpu(config, world_size)
    for B, fewest in numbers:
        yield replace(
            config,
            batch_size=B,
            gradient_accumulation_steps=max(1, sequences // B) if steps == AUTO else steps,
            loss_chunks=fewest if parts == AUTO else parts,
        )


def _batch_sizes(config: TrainConfig, world_size: int) -> list[int]:
    """Sequences of a micro-batch that divide those of the iteration, the largest first."""
    if config.batch_size != AUTO:
        return [config.batch_size]
    sequences = sequences_per_gpu(config, world_size)
    if config.gradient_accumulation_steps != AUTO and not config.eval_only:
        return [sequences // config.gradient_accumulation_steps]
    return [d for d in reversed(divisors(sequences)) if d * config.block_size <= MOST_TOKENS or d == 1]


def _parts(tokens: int, least: int) -> list[int]:
    """1, 2, 4, ... equal parts of the logits, none below `least` tokens; one part may be of any size."""
    powers = (2**n for n in range(1, tokens.bit_length()))
    return [1] + [parts for parts in powers if tokens % parts == 0 and tokens // parts >= least]


# --- if it does not fit ---


def settings_that_fit(config: TrainConfig, world_size: int, memory: DeviceMemory) -> list[str]:
    """A line for each way to train this model with these tokens per iteration in this memory; if there is
    none, a line that says so."""
    tokens = config.tokens_per_iter if is_auto(config) else None
    tokens = tokens or config.samples_per_iter(world_size) * config.block_size
    numbers: dict[str, Any] = dict.fromkeys(NUMBERS, AUTO)
    free = replace(config, **numbers, tokens_per_iter=tokens, eval_only=False)
    stated = [name for name in NUMBERS if getattr(config, name) != AUTO]  # which flags have to replace
    found = (_line(free, stated, remedy, world_size, memory) for remedy in remedies(config))
    lines = list(itertools.islice(filter(None, found), MOST_REMEDIES))
    if not is_auto(config):
        lines += filter(None, [_line(replace(config, eval_only=False), (), LARGE_BATCH, world_size, memory)])
    for gpus in FSDP_GPUS:
        if gpus >= world_size:
            found = (_line(free, stated, FSDP | remedy, gpus, memory) for remedy in remedies(config))
            lines += itertools.islice(filter(None, found), 1)
    return lines or ["nothing that was tried: it needs more GPUs"]


def remedies(config: TrainConfig) -> list[dict[str, Any]]:
    """Settings that could make a run fit, from the least slowdown to the greatest."""
    smaller, smallest = optimizer_class(config).smaller
    half = {**FULL, **smaller, "param_dtype": "bfloat16"}
    least = {**FULL, **smallest, "param_dtype": "bfloat16", "weight_rounding": "stochastic"}
    levels = [{"activation_checkpointing": level} for level in LEVELS]
    kept = [{**FULL, **smaller}] if smaller else []
    return [{}, *levels, *kept, half, least, {**least, "gradient_dtype": "bfloat16"}]


def _line(
    config: TrainConfig, stated: Sequence[str], remedy: dict[str, Any], gpus: int, memory: DeviceMemory
) -> str | None:
    """The flags and what they make, if it fits."""
    changed = {name: value for name, value in remedy.items() if getattr(config, name) != value}
    config = replace(config, **changed)
    try:
        check(config, gpus)
    except UserError:  # for example, the tokens cannot be divided among so many GPUs
        return None
    numbers, found = choose(config, gpus, memory)
    if not found.fits or (remedy and not changed):
        return None
    flags = [f"--{name}={getattr(numbers, name)}" for name in (*changed, *stated)]
    made = f"{numbers.batch_size} x {numbers.block_size} tokens, {units.memory(found.needed_gib)}"
    return f"{gpus} GPU{'s' * (gpus > 1)}: {' '.join(flags)} ({made})"
