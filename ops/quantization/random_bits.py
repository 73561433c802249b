"""Random bits for stochastic rounding, as a function of what they are for: there is no state to save.

    bits = f(seed, iteration, micro-step, tensor, element)

So a run that resumes, a captured CUDA graph, and any division of a tensor among programs or ranks see the
same bits. f is Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", sec. 3):
ten rounds that mix a counter of 128 bits under a key of 64.

    key       seed, low and high half
    counter   element // elements in 128 bits · tensor · micro-step · iteration, 32 bits each

No two of them share a counter, and Philox maps counters under one key to outputs one to one. Replicas that
must agree have one seed; ranks that must differ have seeds of their own.
"""

from __future__ import annotations

import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 32
MASK = 2**WORD - 1
BITS_OF_A_COUNTER = 4 * WORD

Number = int | torch.Tensor  # a tensor is one int64 on the device, so that a CUDA graph can read it


def philox(counter: tuple[torch.Tensor, ...], key: tuple[Number, Number]) -> tuple[torch.Tensor, ...]:
    """Four random words for four words of counter and two of key. Words are numbers from 0 to 2^32 - 1 in
    int64; those of the counter are tensors whose shapes broadcast, and so are the results."""
    first, second, third, fourth = counter
    left, right = key
    for _ in range(ROUNDS):
        high_a, low_a = _product(first, MULTIPLIERS[0])
        high_b, low_b = _product(third, MULTIPLIERS[1])
        first, second, third, fourth = high_b ^ second ^ left, low_b, high_a ^ fourth ^ right, low_a
        left, right = (left + KEY_STEPS[0]) & MASK, (right + KEY_STEPS[1]) & MASK
    return first, second, third, fourth


def _product(word: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of the product. In halves of 16 bits: the whole would not fit into int64."""
    low, high = (word & 0xFFFF) * multiplier, (word >> 16) * multiplier
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & MASK


def random_bits(
    elements: int,
    seed: Number,
    iteration: Number,
    micro_step: Number,
    tensor: Number,
    *,
    bits: int = 8,
    start: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """int32 (elements): numbers below 2^bits for the elements `start`, `start` + 1, .. of a tensor, counted
    in its row-major order. seed: up to 64 bits; iteration, micro_step, tensor: up to 32. bits: 8, 16 or 32 (a
    number of 32 bits is negative if its highest bit is 1). Counter c gives the elements from c * 128 / bits
    on, the low bits of the first word to the first of them.
    ValueError: a number that does not fit."""
    if bits not in (8, 16, 32):
        raise ValueError(f"random numbers have 8, 16 or 32 bits, not {bits}")
    per_counter = BITS_OF_A_COUNTER // bits
    _check("seed", seed, 2 * WORD)
    for name, number in (("iteration", iteration), ("micro_step", micro_step), ("tensor", tensor)):
        _check(name, number, WORD)
    if elements < 0 or start < 0 or start + elements > per_counter << WORD:
        raise ValueError(f"elements {start} to {start + elements} are not within 0 to {per_counter << WORD}")
    first, last = start // per_counter, -(-(start + elements) // per_counter)
    block = torch.arange(first, last, device=device)
    counter = (block, *(torch.zeros_like(block) + number for number in (tensor, micro_step, iteration)))
    words = torch.stack(philox(counter, (seed & MASK, (seed >> WORD) & MASK)), dim=-1)
    shifts = torch.arange(0, WORD, bits, device=device)
    numbers = (words[..., None] >> shifts & (2**bits - 1)).flatten()
    return numbers[start - first * per_counter :][:elements].to(torch.int32)


def _check(name: str, number: Number, bits: int) -> None:
    """A number on the device is not looked at: the host would wait for it."""
    if isinstance(number, int) and not 0 <= number < 2**bits:
        raise ValueError(
            f"{name}={number} is not from 0 to 2^{bits} - 1, the numbers that random bits tell apart"
        )
