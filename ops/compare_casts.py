"""Compares the kernels that emulate a recipe with their plain forms, before a run on a GPU trusts them.

A compiler that rounds or divides otherwise makes other numbers and says nothing: a run would train, with a
recipe that is not the one it names. The plain forms, computed on the CPU, are what tests compare with
TransformerEngine and torchao.
"""

from __future__ import annotations

import torch

from ops.emulation import float8_operand, mxfp8_operand, nvfp4_amaxes, nvfp4_operand, nvfp4_weight
from ops.quantization.random_bits import random_key
from ops.recipes import ONE_SCALE

SHAPE = (128, 1152)  # of every kernel, a row has several programs, and the last one is not full

Casts = dict[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


def compare_casts(recipe: str, device: torch.device) -> str | None:
    """Why this device must not emulate the recipe: which kernel stores other numbers than its plain form, or
    failed. None: every kernel stores the same. Sync point."""
    generator = torch.Generator().manual_seed(0)  # the run's own random numbers stay as they are
    x = torch.randn(SHAPE, generator=generator) * 10.0 ** torch.linspace(-4, 2, SHAPE[1])  # every E4M3 scale
    x[:32, :32] = 0.0  # blocks of zeros
    x, key = x.bfloat16(), random_key(2**40 + 7, iteration=20, micro_step=3, tensor=17)
    plain = _casts(recipe, x, key)
    try:
        written = _casts(recipe, x.to(device), key.to(device))
        for name, tensors in written.items():
            for form, (found, expected) in enumerate(zip(_both(tensors), _both(plain[name]), strict=True)):
                if different := int((found.cpu() != expected).sum()):
                    along = f" along {('rows', 'columns')[form]}" if isinstance(tensors, tuple) else ""
                    of_all = f"{different:,} of {expected.numel():,}"
                    return f"its kernel '{name}' writes other numbers{along} than the plain form ({of_all})"
    except Exception as error:  # whatever fails here would fail in training
        return f"a kernel failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


def _casts(recipe: str, x: torch.Tensor, key: torch.Tensor) -> Casts:
    """What each kernel of a recipe makes of x, by the kernel's name."""
    if recipe in ONE_SCALE:
        scales = {torch.float8_e4m3fn: 3.7, torch.float8_e5m2: 2.0**-4}  # some numbers saturate
        return {
            f"cast to {str(dtype).removeprefix('torch.float8_')}": float8_operand(
                x, torch.tensor(scale, device=x.device), dtype
            )
            for dtype, scale in scales.items()
        }
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
