"""Draws the random bits of emulated NVFP4 inside its kernel: those of ops/quantization/random_bits.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ops.quantization.random_bits import KEY_STEPS, MULTIPLIERS
from ops.triton_kernels.arithmetic import in_threads_of

PHILOX_MULTIPLIERS, PHILOX_KEY_STEPS = tl.constexpr(MULTIPLIERS), tl.constexpr(KEY_STEPS)


@triton.jit
def _philox(c0, c1, c2, c3, seed):
    """tl.philox with one multiplication for both halves of a product."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        a, b = c0.to(tl.uint64) * PHILOX_MULTIPLIERS[0], c2.to(tl.uint64) * PHILOX_MULTIPLIERS[1]
        c0, c1 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, b.to(tl.uint32)
        c2, c3 = (a >> 32).to(tl.uint32) ^ c3 ^ k1, a.to(tl.uint32)
        k0, k1 = k0 + tl.cast(PHILOX_KEY_STEPS[0], tl.uint32), k1 + tl.cast(PHILOX_KEY_STEPS[1], tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def random_words(key, stream: tl.constexpr, n, N, words):
    """For the first column of each word and for the second one, four words of random bits: a byte for each of
    the program's 16 rows."""
    group = 2 * (tl.program_id(1).to(tl.int64) * N + n).to(tl.uint32)
    group = in_threads_of(group, words)
    tensor = (tl.load(key + 3) + (stream << 30)).to(tl.uint32)
    zero = group * 0
    micro_step, iteration = tl.load(key + 2).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    rest = zero + tensor, zero + micro_step, zero + iteration, tl.load(key)
    return _philox(group, *rest), _philox(group + 1, *rest)


@triton.jit
def random_bytes(random, row: tl.constexpr, STOCHASTIC: tl.constexpr):
    if STOCHASTIC:
        first, second = random[0][row // 4], random[1][row // 4]
        return (first >> (8 * (row % 4))) & 255, (second >> (8 * (row % 4))) & 255
    else:
        return random, random
