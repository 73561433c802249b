"""Stand-ins for torch's matmul of scaled blocks, and a GPU that has one. They read codes and scales in the
layout of the real one."""

from recipes import block_scaled
from recipes.block_scaled import numbers_and_factor
from training.hardware import peaks
from training.hardware.capability import lookup
from training.optimization import low_precision
from training.records import beginning


def decode(codes, scales):
    """The numbers of a form as the emulation has them."""
    numbers, factor = numbers_and_factor(codes, scales)
    return (numbers.float() * factor).bfloat16()


def emulating(a, a_scales, b, b_scales, dtype):
    """The emulation's own matmul."""
    a, b = decode(a, a_scales).to(dtype), decode(b, b_scales).to(dtype)
    return a @ b.t()


def exact(a, a_scales, b, b_scales, dtype):
    """As tensor cores compute it: the global factors multiply the sums."""
    (a, a_factor), (b, b_factor) = numbers_and_factor(a, a_scales), numbers_and_factor(b, b_scales)
    return ((a.float() @ b.float().t()) * (a_factor * b_factor)).to(dtype)


def wrong_scale(a, a_scales, *others):
    """Exact, but for one block, whose scale is another."""
    a_scales = a_scales.clone()
    a_scales[5] ^= 8
    return exact(a, a_scales, *others)


def failing(*arguments):
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nand more")


def use(patch, stand_in):
    """patch(object, name, value): on a CPU, a run finds a B200 that multiplies so."""
    for module in (low_precision, beginning, peaks):
        patch(module, "capability", lambda device: lookup((10, 0), "NVIDIA B200"))
    patch(peaks, "_gpu_name", lambda device: "NVIDIA B200")
    patch(block_scaled, "scaled_mm", stand_in)
