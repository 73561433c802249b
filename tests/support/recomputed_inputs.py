"""The kernels that make a Linear's input again, against those of the forward, for a GPU or for Triton's
interpreter."""

from support import triton_interpreter
from support.emulated_operands import assert_same_bits
from support.tensors import random, random_bf16

from ops.triton_kernels import norm, swiglu


def assert_the_product_is_the_forwards(shape, device, columns):
    M, F = shape
    gate_up, dh = random_bf16(M, 2 * F, device=device, std=3.0), random_bf16(M, F, device=device)
    dx, h = swiglu.triton_swiglu_backward_and_product(gate_up, dh, columns)
    assert_same_bits(h, swiglu.triton_swiglu(gate_up, columns)[0].cpu(), "h")
    assert_same_bits(dx, swiglu.triton_swiglu_backward(gate_up, dh, columns).cpu(), "the gradient")


def assert_the_norm_is_the_forwards(shape, device):
    x, delta = (random_bf16(*shape, device=device, std=std) for std in (2.0, 0.5))
    weight, bias = (1 + 0.3 * random(shape[1], device=device, std=std) for std in (1.0, 2.0))
    for centered, added in ((False, None), (True, None), (True, bias)):
        total, normed, _, _ = norm.triton_add_norm(x, delta, weight, added, 1e-6, centered)
        again = norm.triton_norm(total, weight, added, 1e-6, centered)
        assert_same_bits(again, normed.cpu(), f"norm, centered {centered}, bias {added is not None}")


if __name__ == "__main__":  # with TRITON_INTERPRET=1, which counts when triton is imported
    triton_interpreter.prepare(norm, swiglu)
    for rows, width in ((5, 48), (3, 100)):
        assert_the_product_is_the_forwards((rows, width), "cpu", 64)
        assert_the_norm_is_the_forwards((rows, width), "cpu")
    print("equal")
