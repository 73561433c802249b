"""Draws the random bits of emulated NVFP4 inside its kernel: those of ops/quantization/random_bits.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ops.quantization.random_bits import KEY_STEPS, MULTIPLIERS, TENSOR_BITS
from ops.triton_kernels.arithmetic import in_threads_of

PHILOX_MULTIPLIERS, PHILOX_KEY_STEPS = tl.constexpr(MULTIPLIERS), tl.constexpr(KEY_STEPS)
STREAM = tl.constexpr(2**TENSOR_BITS)


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
def load_key(key):
    """seed, iteration, micro-step, tensor: once a program, before its loops."""
    return tl.load(key), tl.load(key + 1), tl.load(key + 2), tl.load(key + 3)


@triton.jit
def random_words(group, numbers, stream: tl.constexpr, like):
    """Four words of random bits for each counter of `group`, whose first word it is, in the threads that have
    `like`. numbers: as load_key() gives them."""
    group = in_threads_of(group.to(tl.uint32), like)
    zero = group * 0
    tensor = (numbers[3] + stream * STREAM).to(tl.uint32)
    micro_step, iteration = numbers[2].to(tl.uint32), numbers[1].to(tl.uint32)
    return _philox(group, zero + tensor, zero + micro_step, zero + iteration, numbers[0])
