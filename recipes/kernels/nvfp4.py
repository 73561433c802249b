"""The Triton kernels of emulated NVFP4: bf16 matrices whose numbers are those of the format.

Activations and gradients are quantized in blocks of 16 along their rows, and, after the Hadamard transform,
along their columns; weights in squares of 16 x 16. They give the bits of recipes/nvfp4.py's plain forms.

A program has the 16 rows of one block. It walks over them twice, in loops whose code is small. Straight code
for all of a thread's numbers was 93 KB and took eight times as long as its instructions do (LOG.md), probably
because no instruction cache holds it. The second walk finds the numbers in a cache.

    columns   a thread has 16 rows of one word (words.py), so that the transform, a block's amax and its
              random bits need no other thread
    rows      a thread has 2 rows of 4 words, 16 bytes each; two threads share a block

Divisions are tl.div_rn, since `/` is approximate. Formats are made by exact arithmetic (float_bits.py).

M rows · N columns · W words of a row, N / 2
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.philox import load_key, random_words
from recipes.formats.hadamard import NEGATIVE_ROWS
from recipes.kernels.arithmetic import add_toward_zero, bf16_words, third_byte
from recipes.kernels.float_bits import (
    EXPONENT,
    as_bits,
    as_float,
    first_of,
    larger,
    nearest,
    nearest_e4m3,
    negative,
    second_of,
)
from recipes.kernels.words import SIGNS, along_row, as_words, empty_words, to_row

WARPS = 4
COLUMN_WORDS = 1  # of a row that a thread has in the walk along columns: 1 or 2
THREADS, ROW_WORDS = 32, 4
FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
NEGATIVE = tl.constexpr(NEGATIVE_ROWS)
BLOCK = tl.constexpr(16)


# --- 16 rows of a column ---
# mypy takes the length of a tuple for its type: Triton unrolls the loops in which these grow.


@triton.jit
def _load_columns(x, inside, W):
    """16 rows from the words at x on."""
    rows = ()
    for _ in tl.static_range(16):
        rows = rows + (tl.load(x, mask=inside, other=0),)  # type: ignore[assignment]
        x += W  # an address from the one before is one instruction
    return rows


@triton.jit
def _numbers(rows):
    """Rows of the words' first numbers and rows of their second ones, fp32."""
    first, second = (), ()
    for row in tl.static_range(16):
        first = first + (first_of(rows[row]),)  # type: ignore[assignment]
        second = second + (second_of(rows[row]),)  # type: ignore[assignment]
    return first, second


@triton.jit
def _largest(rows):
    """The largest magnitude of each column, fp32, from rows of fp32 numbers."""
    largest = tl.abs(rows[0])
    for row in tl.static_range(1, 16):
        largest = larger(largest, tl.abs(rows[row]))
    return largest


@triton.jit
def _hadamard(tile):
    """The transform of 16 numbers (recipes/formats/hadamard.py), fp32."""
    summed = ()
    for row in tl.static_range(0, 16, 2):
        first = -0.25 if (NEGATIVE >> row) & 1 else 0.25
        second = tile[row + 1] * (-0.25 if (NEGATIVE >> (row + 1)) & 1 else 0.25)
        summed = summed + (tl.fma(tile[row], first, second), tl.fma(tile[row], first, negative(second)))  # type: ignore[assignment]
    tile = summed
    for stage in tl.static_range(1, 4):
        summed = ()
        for row in tl.static_range(16):
            if (row >> stage) & 1:
                summed = summed + (tile[row - (1 << stage)] - tile[row],)  # type: ignore[assignment]
            else:
                summed = summed + (tile[row] + tile[row + (1 << stage)],)  # type: ignore[assignment]
        tile = summed
    return tile


@triton.jit
def _as_bf16(x):
    return x.to(tl.bfloat16).to(tl.float32)


# --- the format ---


@triton.jit
def _globals(amax):
    """A -> a sixth of the global encode scale g, 1 / g, and the global factor."""
    g = tl.minimum(tl.div_rn(2688.0, amax), FP32_MAX)
    g = tl.where((amax == 0) | (g == 0), 1.0, g)
    return g * 0.16666666666666666, tl.div_rn(1.0, g), tl.div_rn(amax, 2688.0)


@triton.jit
def _scales(amax, of_all):
    """amax of blocks, fp32, and _globals() -> their scales, E4M3 in fp32, and what they are multiplied by. If
    A is nan, so is the global factor, and these may be anything."""
    scale = nearest_e4m3(amax * of_all[0])
    return scale, tl.minimum(tl.div_rn(1.0, scale * of_all[1]), FP32_MAX)


@triton.jit
def _stochastic_e2m1(magnitude, random):
    """random: 0 to 255, times 2^-133. magnitude: at most 6. The sum is rounded down to a multiple of the
    magnitude's own step. If the sum is in the next range, whose step is larger, it is less than the smaller
    step above the range's beginning, so the result is the same."""
    # two steps, times 2^124
    power = as_float(tl.maximum((as_bits(magnitude) & EXPONENT) + (124 << 23), (127 + 124) << 23))
    moved = tl.fma(random, power, magnitude)
    return tl.fma(power, -(2.0 ** (22 - 124)), add_toward_zero(power, 2.0 ** (22 - 124), moved))


@triton.jit
def _values(x, scale, encode, factor, random, STOCHASTIC: tl.constexpr):
    """Magnitudes, fp32."""
    magnitude = tl.minimum(tl.abs(x * encode), 6.0)
    rounded = _stochastic_e2m1(magnitude, random) if STOCHASTIC else nearest(magnitude, 1, 0)
    return rounded * scale * factor


@triton.jit
def _quantized(words, scales, encodes, factor, random, STOCHASTIC: tl.constexpr):
    """scales, encodes, random: for the first and for the second numbers."""
    first = _values(first_of(words), scales[0], encodes[0], factor, random[0], STOCHASTIC)
    second = _values(second_of(words), scales[1], encodes[1], factor, random[1], STOCHASTIC)
    return bf16_words(first, second) | (words & SIGNS)


@triton.jit
def _random_number(words, BYTE: tl.constexpr):
    """A byte of random bits, 0 to 255, as an fp32 number times 2^-133: what its bits are as such a number, so
    that it takes no conversion."""
    return as_float(third_byte(words, BYTE))


# --- kernels ---


@triton.jit
def _columns(x, out, n, W, of_all, key, STOCHASTIC: tl.constexpr):
    """x, out: the first row. n: the words of a row that the program has at a time."""
    inside = n < W
    rows = _load_columns(x + n, inside, W)
    first, second = _numbers(rows)
    first, second = _hadamard(first), _hadamard(second)
    # the largest of rounded numbers is the largest number, rounded
    first_scale, first_encode = _scales(_as_bf16(_largest(first)), of_all)
    second_scale, second_encode = _scales(_as_bf16(_largest(second)), of_all)
    scales, encodes = (first_scale, second_scale), (first_encode, second_encode)
    bits, random = (n, n), (0, 0)
    if STOCHASTIC:
        group = 2 * (tl.program_id(1) * W + n)
        bits = random_words(group, key, 1, rows[0]), random_words(group + 1, key, 1, rows[0])
    out += n
    for row in tl.static_range(16):
        if STOCHASTIC:
            random = (_random_number(bits[0][row // 4], row % 4), _random_number(bits[1][row // 4], row % 4))
        words = bf16_words(first[row], second[row])
        values = _quantized(words, scales, encodes, of_all[2], random, STOCHASTIC)
        tl.store(out, values, mask=inside)
        out += W


@triton.jit
def _two_rows(x, out, pair, W, of_all, key, STOCHASTIC: tl.constexpr, TILE: tl.constexpr):
    """x, out: the first row of the block. pair: of rows, 0 to 7."""
    start = tl.program_id(0) * TILE
    n = start + tl.arange(0, TILE)
    inside = n < W
    bits, random = n, (0, 0)
    if STOCHASTIC:
        group = (tl.program_id(1) * 8 + pair) * (W // 4) + start // 4 + tl.arange(0, TILE // 4)
        word = random_words(group, key, 0, group)
        bits = tl.join(tl.join(word[0], word[2]), tl.join(word[1], word[3])).reshape(TILE)
    for row in tl.static_range(2):
        at = (2 * pair + row) * W + n
        words = tl.load(x + at, mask=inside, other=0)
        largest = as_bits(larger(tl.abs(first_of(words)), tl.abs(second_of(words))))
        scale, encode = _scales(as_float(along_row(largest, TILE, BLOCK)), of_all)
        scale, encode = to_row(scale, TILE, BLOCK), to_row(encode, TILE, BLOCK)
        if STOCHASTIC:
            random = (_random_number(bits, 2 * row), _random_number(bits, 2 * row + 1))
        values = _quantized(words, (scale, scale), (encode, encode), of_all[2], random, STOCHASTIC)
        tl.store(out + at, values, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["amaxes", "key"])
def _nvfp4(
    x, amaxes, key, by_rows, by_columns, W, STOCHASTIC: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr
):
    first = tl.program_id(1).to(tl.int64) * BLOCK * W
    numbers = load_key(key) if STOCHASTIC else (0, 0, 0, 0)
    of_all = _globals(tl.load(amaxes + 1))
    for chunk in range(0, TILE, CHUNK):
        n = tl.program_id(0) * TILE + chunk + tl.arange(0, CHUNK)
        _columns(x + first, by_columns + first, n, W, of_all, numbers, STOCHASTIC)
    of_all = _globals(tl.load(amaxes))
    for pair in range(8):
        _two_rows(x + first, by_rows + first, pair, W, of_all, numbers, STOCHASTIC, TILE)


# the amax may be one of many in a tensor
@triton.jit(do_not_specialize_on_alignment=["amax"])
def _nvfp4_square(x, amax, out, W, TILE: tl.constexpr, CHUNK: tl.constexpr):
    first = tl.program_id(1).to(tl.int64) * BLOCK * W
    of_all = _globals(tl.load(amax))
    for chunk in range(0, TILE, CHUNK):
        n = tl.program_id(0) * TILE + chunk + tl.arange(0, CHUNK)
        inside, into = n < W, out + first + n
        rows = _load_columns(x + first + n, inside, W)
        numbers = _numbers(rows)
        largest = as_bits(larger(_largest(numbers[0]), _largest(numbers[1])))
        scale, encode = _scales(as_float(along_row(largest, CHUNK, BLOCK)), of_all)
        scale, encode = to_row(scale, CHUNK, BLOCK), to_row(encode, CHUNK, BLOCK)
        for row in tl.static_range(16):
            values = _quantized(rows[row], (scale, scale), (encode, encode), of_all[2], (0, 0), False)
            tl.store(into, values, mask=inside)
            into += W


@triton.jit
def _nvfp4_amaxes(x, parts, W, TILE: tl.constexpr, CHUNK: tl.constexpr):
    first = tl.program_id(1).to(tl.int64) * BLOCK * W
    plain, transformed = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for chunk in range(0, TILE, CHUNK):
        n = tl.program_id(0) * TILE + chunk + tl.arange(0, CHUNK)
        numbers = _numbers(_load_columns(x + first + n, n < W, W))
        plain = larger(plain, larger(_largest(numbers[0]), _largest(numbers[1])))
        largest = larger(_largest(_hadamard(numbers[0])), _largest(_hadamard(numbers[1])))
        transformed = larger(transformed, largest)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(parts + program, as_float(tl.max(as_bits(plain), 0)))
    programs = tl.num_programs(0) * tl.num_programs(1)
    tl.store(parts + programs + program, _as_bf16(as_float(tl.max(as_bits(transformed), 0))))


# --- starting them ---


def triton_nvfp4(
    x: torch.Tensor, amaxes: torch.Tensor, key: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, N), bf16, contiguous, and its amaxes (2), fp32, before and after the transform -> its numbers in
    NVFP4, bf16: in blocks along rows, and, transformed, along columns. With a key, rounded stochastically."""
    x = as_words(x)
    by_rows, by_columns = empty_words(x), empty_words(x)
    _nvfp4[_grid(x)](x, amaxes, key, by_rows, by_columns, x.shape[1], STOCHASTIC=key is not None, **_launch())
    return by_rows.view(torch.bfloat16), by_columns.view(torch.bfloat16)


def triton_nvfp4_square(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """x (M, N), bf16, contiguous, and its amax, fp32 -> its numbers in NVFP4 in blocks of 16 x 16, bf16."""
    x = as_words(x)
    out = empty_words(x)
    _nvfp4_square[_grid(x)](x, amax, out, x.shape[1], **_launch())
    return out.view(torch.bfloat16)


def triton_nvfp4_amaxes(x: torch.Tensor) -> torch.Tensor:
    """x (M, N), bf16, contiguous -> fp32 (2): its amax, and that of its transformed columns."""
    x = as_words(x)
    grid = _grid(x)
    parts = torch.empty(2, grid[0] * grid[1], dtype=torch.float32, device=x.device)
    _nvfp4_amaxes[grid](x, parts, x.shape[1], **_launch())
    return parts.amax(1)


def _grid(words: torch.Tensor) -> tuple[int, int]:
    """Neighboring programs have neighboring columns."""
    return triton.cdiv(words.shape[1], _launch()["TILE"]), words.shape[0] // BLOCK.value


def _launch() -> dict:
    threads = THREADS * WARPS
    return {"TILE": threads * ROW_WORDS, "CHUNK": threads * COLUMN_WORDS, "num_warps": WARPS}
