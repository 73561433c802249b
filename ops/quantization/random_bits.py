"""Random bits for stochastic rounding, as a function of what they are for: there is no state to save.

    bits = f(seed, iteration, micro-step, tensor, stream, element)

So a run that resumes, a captured CUDA graph, and any division of a tensor among programs or ranks see the
same bits. f is Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", sec. 3):
ten rounds that mix a counter of 128 bits under a key of 64.

    key       seed, low and high half
    counter   element // elements in 128 bits · tensor + stream x 2^30 · micro-step · iteration, 32 bits each

No two of them share a counter, and Philox maps counters under one key to outputs one to one. Replicas that
must agree have one seed; ranks that must differ have seeds of their own. Tensor numbers below WEIGHTS are for
gradients of activations; those from there on are for weights and their moments (weight_key).

What the bits are for is a tensor on the device that uses them: a captured graph and compiled code read it
anew each time, and the host never waits for it.
"""

from __future__ import annotations

import torch

from ops.quantization.formats import round_to_bf16_stochastically

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 32
MASK = 2**WORD - 1
BITS_OF_A_COUNTER = 4 * WORD
TENSOR_BITS = 30  # of one word of the counter, whose other two are the stream
KEY_BITS = {"seed": 63, "iteration": WORD, "micro_step": WORD, "tensor": TENSOR_BITS}
WEIGHTS = 2 ** (TENSOR_BITS - 1)  # the upper half of all tensor numbers


def random_key(
    seed: int, iteration: int = 0, micro_step: int = 0, tensor: int = 0, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """What bits are for, int64 (4). Whoever counts iterations and micro-steps writes them to [1] and [2]. A
    tensor that draws bits has a number of its own.
    ValueError: a number that does not fit."""
    numbers = dict(zip(KEY_BITS, (seed, iteration, micro_step, tensor), strict=True))
    for name, number in numbers.items():
        if not 0 <= number < 2 ** KEY_BITS[name]:
            raise ValueError(f"{name}={number} is not from 0 to 2^{KEY_BITS[name]} - 1")
    return torch.tensor(list(numbers.values()), dtype=torch.int64, device=device)


def weight_key(seed: int, number: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """random_key() of a weight and its moments. number: the place of the weight among all of its model."""
    return random_key(seed, tensor=WEIGHTS + number, device=device)


def philox(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
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
    elements: int, key: torch.Tensor, *, stream: int = 0, bits: int = 8, start: int = 0
) -> torch.Tensor:
    """int32 (elements), on the device of key: numbers below 2^bits for the elements `start`, `start` + 1, ..
    of a tensor, counted in its row-major order. key: as random_key() makes it. stream: 0 to 3, sets of bits
    for what a tensor needs several of. bits: 8, 16 or 32 (a number of 32 bits is negative if its highest bit
    is 1). Counter c gives the elements from c * 128 / bits on, the low bits of the first word to the first.
    ValueError: more elements than a counter tells apart; the numbers in key are not looked at."""
    per_counter = BITS_OF_A_COUNTER // bits
    if elements < 0 or start < 0 or start + elements > per_counter << WORD:
        raise ValueError(f"elements {start} to {start + elements} are not within 0 to {per_counter << WORD}")
    first, last = start // per_counter, -(-(start + elements) // per_counter)
    seed, iteration, micro_step, tensor = key.unbind()
    block = torch.arange(first, last, device=key.device)
    tensor = tensor + (stream << TENSOR_BITS)
    counter = (block, *(number.expand_as(block) for number in (tensor, micro_step, iteration)))
    words = torch.stack(philox(counter, (seed & MASK, (seed >> WORD) & MASK)), dim=-1)
    shifts = torch.arange(0, WORD, bits, device=key.device)
    numbers = (words[..., None] >> shifts & (2**bits - 1)).flatten()
    return numbers[start - first * per_counter :][:elements].to(torch.int32)


def bf16_stochastically(
    x: torch.Tensor, key: torch.Tensor, *, stream: int = 0, start: int = 0
) -> torch.Tensor:
    """x, fp32, any shape -> bf16, rounded stochastically. x may be a part of a larger tensor, cut from its
    row-major order; `start` is then the index of x's first element in the whole. So any number of ranks,
    with a part each, makes the same numbers."""
    bits = random_bits(x.numel(), key, stream=stream, bits=16, start=start)
    return round_to_bf16_stochastically(x, bits.view(x.shape))
