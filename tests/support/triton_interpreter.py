"""Makes Triton's interpreter compute what a GPU does: it cannot run a GPU's own instructions, and it cuts
digits off where it should round. For programs that are started with TRITON_INTERPRET=1."""

from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from ops.quantization.formats import to_float8
from ops.triton_kernels import float8
from recipes.kernels.float_bits import as_bits, as_float, magnitude_bits, nearest_e4m3

FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def convert(numbers, from_type, to_type, rounding):
    """torch's conversion from or to bf16 or fp8."""
    bits = torch.from_numpy(np.ascontiguousarray(numbers)).view(-1)
    if from_type.is_bf16():
        made, kind = bits.view(torch.int16).view(torch.bfloat16).float(), np.uint32
    elif to_type.is_bf16():
        made, kind = bits.float().bfloat16().view(torch.int16), np.uint16
    else:
        made, kind = to_float8(bits.float(), FP8[to_type.name]).view(torch.uint8), np.uint8
    return made.numpy().view(kind).reshape(numbers.shape)


@triton.jit
def four_bytes(x, E4M3: tl.constexpr):
    return x.to(tl.float8e4nv if E4M3 else tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def two_bytes(even, odd, E4M3: tl.constexpr):
    return four_bytes(even, E4M3).to(tl.uint16) | (four_bytes(odd, E4M3).to(tl.uint16) << 8)


@triton.jit
def largest(magnitudes, axis: tl.constexpr):
    """The interpreter takes seconds for a reduction that is not one of Triton's own."""
    return as_float(tl.max(magnitude_bits(magnitudes), axis))


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def second(words):
    return as_float(words & -0x10000)


@triton.jit
def bf16_words(first_number, second_number):
    low = rounded(first_number, tl.bfloat16).to(tl.int32, bitcast=True)
    high = rounded(second_number, tl.bfloat16).to(tl.int32, bitcast=True)
    return high | ((low >> 16) & 0xFFFF)


@triton.jit
def larger_words(a, b):
    low = tl.maximum(a & 0xFFFF, b & 0xFFFF)
    return tl.maximum(a >> 16, b >> 16) << 16 | low


@triton.jit
def mx_number(x, inverse, scale):
    magnitude = nearest_e4m3(tl.abs(x * inverse))
    return as_float(as_bits(magnitude) | (as_bits(x) & -0x80000000)) * scale


@triton.jit
def mx_words(words, inverse, scale):
    low = mx_number(as_float(words << 16), as_float(inverse << 16), as_float(scale << 16))
    return bf16_words(low, mx_number(second(words), second(inverse), second(scale)))


@triton.jit
def add_toward_zero(x, FACTOR: tl.constexpr, addend):
    """For a sum with a last digit of x * FACTOR * 2^-23."""
    total = x * FACTOR + addend
    above = total - x * FACTOR > addend
    return tl.where(above, total - x * (FACTOR * 2.0**-23), total)


@triton.jit
def in_threads_of(x, y):
    return x


@triton.jit
def third_byte(words, BYTE: tl.constexpr):
    return (((words >> (8 * BYTE)) & 255) << 16).to(tl.int32)


REPLACED = (
    largest, sigmoid, rounded, bf16_words, larger_words, mx_words, add_toward_zero, in_threads_of, third_byte
)  # fmt: skip


def patch_tensors(patch, tensor, scope):
    """Loops that begin at a program's number: NumPy 2.4 makes no number of an array of one."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def prepare(*modules) -> None:
    """Also the functions that these modules of kernels import."""
    interpreter._convert_float = convert
    interpreter._patch_lang_tensor = partial(patch_tensors, interpreter._patch_lang_tensor)
    float8._four_bytes, float8._two_bytes = four_bytes, two_bytes
    for module in modules:
        for function in REPLACED:
            if hasattr(module, function.fn.__name__):
                setattr(module, function.fn.__name__, function)
