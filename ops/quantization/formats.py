"""Rounding to fp8 (E4M3: largest 448, nan and no inf; E5M2: largest 57344, nan and inf; Micikevicius et al.
2022, sec. 3), and to bf16 at random. Inputs are bf16 or fp32.
"""

from __future__ import annotations

import torch

BF16_DROPPED_BITS = 16  # of the 32 of an fp32 number


def to_float8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x, bf16 or fp32 -> the nearest numbers of dtype (E4M3 or E5M2), ties to even. What is too large
    saturates, also inf; nan stays nan. Without the clamp, torch before 2.13 makes nan of what is too large
    for E4M3."""
    limit = torch.finfo(dtype).max
    return x.float().clamp(-limit, limit).to(dtype)


def round_to_bf16_stochastically(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """x, fp32, any shape, and bits, int32 from 0 to 65535 of the same shape -> bf16: the neighbor farther
    from 0 with a probability that is the distance from the other one in steps. The mean is x itself. inf, nan
    and what bf16 holds exactly do not change; above bf16's largest number is inf, as with rounding to
    nearest. Source: torchao's _fp32_to_bf16_sr."""
    if x.dtype != torch.float32 or bits.shape != x.shape:
        raise ValueError(f"needs fp32 and bits for each element: {x.dtype} {tuple(x.shape)}, {bits.shape}")
    kept = -(1 << BF16_DROPPED_BITS)
    rounded = ((x.view(torch.int32) + bits) & kept).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)
