"""Compares the kernels of a recipe with plain arithmetic, before a run on a GPU trusts them.

A compiler that rounds or divides otherwise makes other numbers and says nothing: a run would train, with a
recipe that is not the one it names. Emulated casts must have the bits of their plain forms on the CPU, which
are what tests compare with TransformerEngine and torchao; fp8 numbers must be right to a rounding step: a
compiler's fault has made such kernels store wrong ones (ops/triton_kernels/float8.py).
"""

from __future__ import annotations

import torch

from ops.cross_entropy import cross_entropy, cross_entropy_float8
from ops.float8 import FORWARD, GRADIENT, quantize
from ops.quantization.random_bits import random_key
from ops.recipes.mxfp8 import mxfp8_operand
from ops.recipes.nvfp4 import nvfp4_amaxes, nvfp4_operand, nvfp4_weight
from ops.recipes.properties import ONE_SCALE
from ops.swiglu import swiglu_backward, swiglu_backward_float8

SHAPE = (128, 1152)  # of every kernel, a row has several programs, and the last one is not full

Casts = dict[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


def compare_casts(recipe: str, device: torch.device, vocab_size: int | None) -> str | None:
    """Why this device must not run the recipe: which kernel stores other numbers than plain arithmetic, or
    failed. None: every kernel stores the same. vocab_size: of a head that computes in the recipe; its kernels
    are compared at this width, so that training need not compile them for another. Sync point."""
    try:
        if recipe in ONE_SCALE:
            return _compare_float8(device, vocab_size)
        return _compare_emulation(recipe, device)
    except Exception as error:  # whatever fails here would fail in training
        return f"a kernel failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _compare_float8(device: torch.device, vocab_size: int | None) -> str | None:
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(torch.bfloat16)

    x, dh = random(256, 512), random(256, 256)
    written = {
        "cast to e4m3": (x, quantize(x, FORWARD)),
        "cast to e5m2": (x, quantize(x, GRADIENT)),
        "backward of SwiGLU": (swiglu_backward(x, dh), swiglu_backward_float8(x, dh, GRADIENT)),
    }
    if vocab_size is not None:
        logits, targets = random(256, vocab_size), torch.arange(256, device=device) % vocab_size
        _, gradient = cross_entropy_float8(logits.clone(), targets, GRADIENT)
        cross_entropy(logits, targets, True)  # by now, logits are their gradient
        written["gradient of the logits"] = logits, gradient
    for name, (source, found) in written.items():
        expected = (source.float() / found.inverse_scale).double()
        for matrix, kernel in ((expected, found.rows), (expected.t(), found.columns)):
            step = torch.finfo(kernel.dtype).eps * matrix.abs().clamp(min=torch.finfo(kernel.dtype).tiny)
            if not ((kernel.double() - matrix).abs() <= step).all():
                return f"its kernel '{name}' stores wrong fp8 numbers"
    return None


def _compare_emulation(recipe: str, device: torch.device) -> str | None:
    generator = torch.Generator().manual_seed(0)  # the run's own random numbers stay as they are
    x = torch.randn(SHAPE, generator=generator) * 10.0 ** torch.linspace(-4, 2, SHAPE[1])  # every E4M3 scale
    x[:32, :32] = 0.0  # blocks of zeros
    x, key = x.bfloat16(), random_key(2**40 + 7, iteration=20, micro_step=3, tensor=17)
    plain = _casts(recipe, x, key)
    written = _casts(recipe, x.to(device), key.to(device))
    for name, tensors in written.items():
        for form, (found, expected) in enumerate(zip(_both(tensors), _both(plain[name]), strict=True)):
            if different := int((found.cpu() != expected).sum()):
                along = f" along {('rows', 'columns')[form]}" if isinstance(tensors, tuple) else ""
                of_all = f"{different:,} of {expected.numel():,}"
                return f"its kernel '{name}' writes other numbers{along} than the plain form ({of_all})"
    return None


def _casts(recipe: str, x: torch.Tensor, key: torch.Tensor) -> Casts:
    """What each kernel of a recipe makes of x, by the kernel's name."""
    if recipe == "mxfp8":
        return {"cast": mxfp8_operand(x)}
    assert recipe == "nvfp4", recipe
    amaxes = nvfp4_amaxes(x)
    return {
        "amaxes": amaxes,
        "cast": nvfp4_operand(x, amaxes),
        "cast with stochastic rounding": nvfp4_operand(x, amaxes, key),
        "cast of a weight": nvfp4_weight(x, amaxes[0]),
    }


def _both(tensors: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tensors if isinstance(tensors, tuple) else (tensors,)
