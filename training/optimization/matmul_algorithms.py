"""Measures which of cuBLASLt's algorithms is the fastest for each matmul of the step, for matmul_algorithms.

Why
    torch takes the algorithm that cuBLASLt's model of the GPU expects to be fastest. On an H200 that trains
    Qwen3 1.8B, another of the first eight was faster for most forwards and some dgrads (LOG.md, 2026-11-22).
    wgrads are left out: there, the first was the best.
How
    Before the first iteration, torch's own call and each algorithm run in blocks, in turns, on random
    numbers. Another algorithm than the first is taken only if its slowest block beat the fastest block of the
    usual ones. So noise may hide a gain, but seldom invents one.
The traps
    A GPU at its power limit runs short bursts faster than sustained work, and not by the same factor for all
    algorithms. So the GPU never rests between blocks, and the first round is not counted.
    Another algorithm rounds differently. So rank 0 measures for all ranks, and checkpoints have its choice:
    a resume with the same GPU and cuBLASLt takes the same algorithms without measuring, and is bit-exact.
    cuBLASLt never gets an algorithm from a checkpoint: it is looked up among those that the library offers.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from common.errors import UserError
from model import Transformer
from ops import cublaslt, float8
from ops.linear import Linear
from ops.low_precision_methods import METHODS
from ops.matmul import Matmul, Plan, candidates, chosen, matmul_by_torch, multiply
from training.configuration.keys import TrainConfig
from training.optimization.low_precision import GRADIENT_DTYPES
from training.process.world import World, gather_objects

log = logging.getLogger("nanomfu")

ALGORITHMS = 8  # the best of an H200 were among so many
ROUNDS, BLOCK_S = 3, 0.08  # counted rounds of blocks; with the first round, 3 seconds for a matmul
USUAL = 2  # torch's own call and cuBLASLt's first algorithm, which are the same but for noise
MARGIN = 0.005  # by which the slowest block must beat the usual ones' fastest
TOLERANCE = 0.02  # of results in bf16: algorithms differ by about 0.003, a wrong layout or scale by about 1
SAMPLE_ROWS = 64  # of a result, for the comparison
LARGEST = 6.0  # normal numbers are cut there; in fp8 it becomes the largest number
CHUNK = 2**26  # random numbers that are made at a time, in fp32
NOT_EXACT = "this resume is not bit-exact"


class Choice(NamedTuple):
    """The outcome of choose_algorithms."""

    info: dict[str, Any] = {}  # a part of the record's startup_info
    saved: dict[str, Any] | None = None  # for checkpoints: the GPU and cuBLASLt, and {matmul: its algorithm}


class Timing(NamedTuple):
    """What was measured of one matmul."""

    usual_ms: float  # torch's own call
    chosen_ms: float  # the chosen algorithm; usual_ms if there is none
    sure_ms: float  # by which its slowest block beat the usual ones' fastest
    algorithm: str | None  # its 64 bytes in hex; None: torch's own call


# --- which matmuls there are ---


def step_matmuls(model: Transformer, config: TrainConfig) -> Counter[tuple[str, Matmul]]:
    """(name, matmul) of the forwards and dgrads of a micro-step, and how many of each it has."""
    by_quack = ("up forward", "down dgrad") if config.ffn_backend == "quack" else ()
    return Counter(found for found in _step_matmuls(model, config) if found[0] not in by_quack)


def _step_matmuls(model: Transformer, config: TrainConfig) -> Iterator[tuple[str, Matmul]]:
    tokens = config.micro_batch * config.block_size
    for path, module in model.named_modules():
        if not isinstance(module, Linear):
            continue
        name, N, K = path.split(".")[-1], module.out_features, module.in_features
        for M in head_tokens(config) if module is model.head.lm_head else [tokens]:
            low = module.low_precision
            if low is None or METHODS[low.method].emulated:
                bf16 = (torch.bfloat16, torch.bfloat16)
                yield f"{name} forward", Matmul(M, K, N, *bf16, transposed=True, fast=False)
                yield f"{name} dgrad", Matmul(M, N, K, *bf16, transposed=False, fast=False)
            elif module.has_one_scale:
                weight = float8.FORWARD
                gradient = GRADIENT_DTYPES[config.fp8_gradients]
                yield f"{name} forward", Matmul(M, K, N, float8.FORWARD, weight, transposed=True, fast=True)
                yield f"{name} dgrad", Matmul(M, N, K, gradient, weight, transposed=True, fast=False)


def head_tokens(config: TrainConfig) -> list[int]:
    """Tokens of each part in which the head computes, as torch.chunk divides them."""
    tokens = config.micro_batch * config.block_size
    part = -(-tokens // config.logit_parts)
    return [min(part, tokens - first) for first in range(0, tokens, part)]


# --- choosing ---


def choose_algorithms(
    model: Transformer, config: TrainConfig, world: World, saved: dict[str, Any] | None
) -> Choice:
    """Makes the plans of ops/matmul.py, if the key is 'measured'. saved: what the checkpoint has of the run's
    earlier choice. All ranks. Raises UserError."""
    chosen.replace({})
    if config.matmul_algorithms == "cublas":
        return Choice()
    machines = gather_objects(_machine(config, world.device), world)
    if reason := _obstacle(machines):
        if saved is not None and not config.eval_only:
            log.warning(f"The checkpoint's matmul algorithms are not used, so {NOT_EXACT}: {reason}")
        line = f"not measured, those that cuBLAS expects to be fastest: {reason}"
        return Choice({"matmul_algorithms": {"used": "cublas", "reason": reason, "line": line}})
    machine, matmuls = machines[0], step_matmuls(model, config)
    why = _why_not_restored(saved, machine, matmuls, world.device) if world.is_main else None
    why = gather_objects(why, world)[0]
    facts: dict[str, Any] = {"used": "measured", "measured_because": why, **machine}
    if why is None:
        assert saved is not None
        source = "as in the checkpoint"
        algorithms = {matmul.label: saved["algorithms"][matmul.label] for _, matmul in matmuls}
    else:
        if saved is not None:
            log.warning(f"Matmul algorithms are measured again, so {NOT_EXACT}: {why}")
        timings = gather_objects(_measure(matmuls, world.device) if world.is_main else None, world)[0]
        algorithms = {label: timing.algorithm for label, timing in timings.items()}
        facts |= describe(matmuls, timings)
        source = f"which saves at least {facts['sure_gain_ms']:.3g} ms a micro-step, as measured"
    plans = {matmul: _plan(matmul, algorithms[matmul.label], world) for _, matmul in matmuls}
    chosen.replace({matmul: plan for matmul, plan in plans.items() if plan is not None})
    facts["line"] = f"for {len(chosen.plans)} of {len(plans)} another than cuBLAS's first, {source}"
    return Choice({"matmul_algorithms": facts}, {**machine, "algorithms": algorithms})


def _machine(config: TrainConfig, device: torch.device) -> dict[str, str]:
    """What a choice holds for, or the reason why there is none."""
    if device.type != "cuda":
        return {"reason": f"device={config.device!r} has no cuBLASLt"}
    if config.eval_only:
        return {"reason": "eval_only=True trains nothing"}
    if config.dtype != "bfloat16":
        return {"reason": f"dtype={config.dtype!r}, and only matmuls in bfloat16 and fp8 are measured"}
    try:
        return {"gpu": torch.cuda.get_device_name(device), "cublaslt": cublaslt.version()}
    except cublaslt.Unavailable as error:
        return {"reason": str(error)}


def _obstacle(machines: list[dict[str, str]]) -> str | None:
    for machine in machines:
        if "reason" in machine:
            return machine["reason"]
        if machine != machines[0]:
            return f"the ranks differ: {_named(machines[0])}, and {_named(machine)}"
    return None


def _named(machine: dict[str, str]) -> str:
    return f"{machine['gpu']} with cuBLASLt {machine['cublaslt']}"


def _why_not_restored(
    saved: dict[str, Any] | None, machine: dict[str, str], matmuls: Counter, device: torch.device
) -> str | None:
    if saved is None:
        return "there is no earlier choice"
    was = {name: saved[name] for name in machine}
    if was != machine:
        return f"it was {_named(was)}, it is {_named(machine)} now"
    algorithms = saved["algorithms"]
    if missing := [name for name, matmul in matmuls if matmul.label not in algorithms]:
        return f"the checkpoint has no choice for this size of {', '.join(missing)}"
    for name, matmul in matmuls:
        wanted = algorithms[matmul.label]
        if wanted is not None and _find(matmul, wanted, device) is None:
            return f"cuBLASLt does not offer the saved algorithm for {name}"
    return None


def _plan(matmul: Matmul, algorithm: str | None, world: World) -> Plan | None:
    if algorithm is None:
        return None
    plan = _find(matmul, algorithm, world.device)
    if plan is None:
        raise UserError(
            f"rank {world.rank}: cuBLASLt does not offer the algorithm that rank 0 chose for {matmul.label}, "
            "although both have the same GPU and version; set matmul_algorithms='cublas'"
        )
    return plan


def _find(matmul: Matmul, algorithm: str, device: torch.device) -> Plan | None:
    """The plan whose algorithm has these bytes."""
    try:
        plans = candidates(matmul, device.index, ALGORITHMS)
    except cublaslt.Unavailable:
        return None
    return next((plan for plan in plans if _bytes(plan) == algorithm), None)


def _bytes(plan: Plan) -> str:
    """cuBLASLt's manual allows to store them and to use them again with the same version."""
    return bytes(plan.algorithm.configuration).hex()


def describe(matmuls: Counter[tuple[str, Matmul]], timings: dict[str, Timing]) -> dict[str, Any]:
    """For the record: every matmul's times, and what a micro-step gains."""
    rows = [
        {"name": name, "count": count, "size": matmul.label, **timings[matmul.label]._asdict()}
        for (name, matmul), count in matmuls.items()
    ]
    return {
        "sure_gain_ms": sum(row["count"] * row["sure_ms"] for row in rows),
        "gain_ms": sum(row["count"] * (row["usual_ms"] - row["chosen_ms"]) for row in rows),
        "timings": rows,
    }


# --- measuring ---


def _measure(matmuls: Counter[tuple[str, Matmul]], device: torch.device) -> dict[str, Timing]:
    """{label: what was measured}. Rank 0 alone; the run's random numbers and memory statistics stay as they
    are."""
    distinct = {matmul: name for name, matmul in matmuls}
    seconds = len(distinct) * (USUAL - 1 + ALGORITHMS) * (1 + ROUNDS) * BLOCK_S
    log.info(f"Measuring {ALGORITHMS} algorithms of {len(distinct)} matmuls: about {seconds:.0f} s")
    generator = torch.Generator(device).manual_seed(0)
    began, timings = time.monotonic(), {}
    for matmul, name in distinct.items():
        try:
            timings[matmul.label] = measure_one(matmul, generator)
        except (cublaslt.Unavailable, torch.cuda.OutOfMemoryError) as error:
            reason = str(error).strip().splitlines()[0]
            log.warning(f"{name} keeps cuBLAS's own algorithm, because it cannot be measured: {reason}")
            timings[matmul.label] = Timing(0.0, 0.0, 0.0, None)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    log.info(f"Measured in {time.monotonic() - began:.0f} s")
    return timings


def measure_one(matmul: Matmul, generator: torch.Generator) -> Timing:
    """Raises cublaslt.Unavailable or OutOfMemoryError."""
    shape = (matmul.N, matmul.K) if matmul.transposed else (matmul.K, matmul.N)
    a, a_inverse = random_operand((matmul.M, matmul.K), matmul.a, generator)
    b, b_inverse = random_operand(shape, matmul.b, generator)

    def by_torch() -> torch.Tensor:
        return matmul_by_torch(a, b, matmul.transposed, a_inverse, b_inverse, matmul.fast)

    def call(plan: Plan) -> Callable[[], torch.Tensor]:
        return lambda: multiply(plan, a, b, matmul.N, a_inverse, b_inverse)

    first, *others = candidates(matmul, generator.device.index, ALGORITHMS)
    expected = _sample(by_torch())
    correct = [plan for plan in others if _is_close(call(plan), expected)]
    blocks = time_in_turns([by_torch, call(first), *map(call, correct)])
    usual_ms, winner = statistics.median(blocks[0]), sure_winner(blocks)
    if winner is None:
        return Timing(usual_ms, usual_ms, 0.0, None)
    sure_ms = min(sum(blocks[:USUAL], [])) - max(blocks[winner])
    return Timing(usual_ms, statistics.median(blocks[winner]), sure_ms, _bytes(correct[winner - USUAL]))


def sure_winner(blocks: list[list[float]]) -> int | None:
    """The index of what is surely faster than the first two, the usual ones; None if nothing is. blocks:
    times of each."""
    usual = min(sum(blocks[:USUAL], []))
    best = min(range(USUAL, len(blocks)), key=lambda index: max(blocks[index]), default=None)
    if best is None or max(blocks[best]) >= (1 - MARGIN) * usual:
        return None
    return best


def time_in_turns(calls: list[Callable[[], object]]) -> list[list[float]]:
    """Milliseconds a call, in each counted block of each."""
    counts = []
    for call in calls:
        call()  # the first one also initializes
        counts.append(max(1, round(1000 * BLOCK_S / _block_ms(call, 3))))
    rounds = [[_block_ms(*pair) for pair in zip(calls, counts, strict=True)] for _ in range(1 + ROUNDS)]
    return [list(times) for times in zip(*rounds[1:], strict=True)]


def _block_ms(call: Callable[[], object], count: int) -> float:
    """Milliseconds a call, of `count` of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()  # sync point
    return start.elapsed_time(end) / count


def random_operand(
    shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Normal numbers, because zeros need less power; in fp8 with their inverse scale."""
    operand = torch.empty(shape, dtype=dtype, device=generator.device)
    scale = torch.finfo(dtype).max / LARGEST if dtype.itemsize == 1 else 1.0
    for part in operand.split(max(1, CHUNK // shape[1])):
        numbers = torch.randn(part.shape, generator=generator, device=generator.device)
        part.copy_(numbers.clamp_(-LARGEST, LARGEST).mul_(scale))
    inverse = torch.tensor(1 / scale, device=generator.device) if dtype.itemsize == 1 else None
    return operand, inverse


def _sample(result: torch.Tensor) -> torch.Tensor:
    return result[:: max(1, len(result) // SAMPLE_ROWS)].float()


def _is_close(call: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
    """False also for an algorithm that fails."""
    try:
        found = _sample(call())
    except cublaslt.Unavailable:
        return False
    return bool((found - expected).norm() < TOLERANCE * expected.norm())  # sync point
