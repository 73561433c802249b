"""The backward of SwiGLU in fp8 by the scale of the past, on a GPU (delayed_float8.py).

x and its gradient (N, 2F) have gate and up beside each other: gate 0, up 0, gate 1, up 1, ...

N tokens · F feed-forward width
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.float8 import as_words, empty_pair, launch, pair_tile, store_both, tiles
from ops.triton_kernels.swiglu import gradients, load_pairs, row_gradients
from recipes.kernels.delayed_float8 import integer, keep_amax, used_scale, walkers
from recipes.kernels.float_bits import magnitude_bits


@triton.jit(do_not_specialize_on_alignment=["scale"])
def _swiglu_backward_amax_without_history(x, dh, scale, found, N, F, BLOCK: tl.constexpr):
    """Walks over rows; ends at once if there is a history (delayed_float8.py)."""
    if tl.load(scale) == 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        bits = tl.zeros((BLOCK,), tl.int32)
        for index in tl.range(tl.program_id(0), N, tl.num_programs(0)):
            row = tl.cast(index, tl.int64)
            gate, up = load_pairs(x, row, F, BLOCK)
            dgate, dup = gradients(gate, up, tl.load(dh + row * F + column, mask=column < F, other=0.0))
            bits = tl.maximum(bits, tl.maximum(magnitude_bits(dgate), magnitude_bits(dup)))
        largest = tl.max(bits, 0).to(tl.float32, bitcast=True).to(x.dtype.element_ty).to(tl.float32)
        tl.atomic_max(found, magnitude_bits(largest), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["scale", "found", "amax", "inverse"])
def _swiglu_backward_delayed(
    x, dh, scale, found, amax, inverse, y, yt, N, F,
    E4M3: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    factor = used_scale(scale, found, inverse, E4M3)
    _, column, inside_h = pair_tile(N, F, TILE_M, TILE_N // 2)
    pair, both, inside = pair_tile(N, 2 * F, TILE_M, TILE_N)
    even = row_gradients(x, dh, 2 * pair, both, column, F, 1.0, inside, inside_h)
    odd = row_gradients(x, dh, 2 * pair + 1, both, column, F, 1.0, inside, inside_h)
    keep_amax(amax, even, odd)
    store_both(y, yt, even * factor, odd * factor, pair, both, N, 2 * F, inside, E4M3)


def triton_delayed_swiglu_backward(
    x: torch.Tensor,
    dh: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    dtype: torch.dtype,
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """triton_swiglu_backward's dx in fp8, (N, 2F) and (2F, N), by its scale, by its own amax if that is 0;
    and the inverse of the scale. amax becomes the larger one of itself and the amax of dx."""
    N, F = dh.shape
    (y, yt), found, inverse = empty_pair(x, dtype), torch.zeros_like(scale), torch.empty_like(scale)
    _swiglu_backward_amax_without_history[walkers(x.device), triton.cdiv(F, columns)](
        x, dh, scale, integer(found), N, F, BLOCK=columns, num_warps=8
    )
    _swiglu_backward_delayed[tiles(N, 2 * F)](
        x, dh, scale, found, integer(amax), inverse, *as_words(y, yt), N, F, **launch(dtype)
    )
    return y, yt, inverse
