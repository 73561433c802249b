"""fp8 matmuls with one scale per tensor, computed from the tensor itself ("tensorwise", "dynamic scaling").

Forward operands are e4m3 (3 bits of mantissa), gradients e5m2 (more range): Micikevicius et al. 2022, sec. 3.
A tensor's largest magnitude is mapped to the largest fp8 number; the matmul accumulates in fp32, multiplies by
both inverse scales and returns bf16. Weights are quantised once per iteration (training/precision.py),
activations and gradients where they are used. float8_kernels.py makes an operand and its transpose in one pass;
here is the plain form, which a CPU runs: the same fp8 values, multiplied in fp32.

    M tokens · K, N widths · F feed-forward width
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.library import custom_op

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST_AMAX = 1e-12  # an all-zero tensor has a finite scale
ALIGNMENT = 16  # both widths of an fp8 matmul must be multiples of it


class Float8(NamedTuple):
    """A matrix in fp8: values * inverse_scale is about the matrix."""

    values: torch.Tensor  # (M, N)
    transposed: torch.Tensor  # (N, M), contiguous
    inverse_scale: torch.Tensor  # () fp32


def scale_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What maps amax to the largest number of dtype; fp32."""
    return (torch.finfo(dtype).max / amax.double().clamp(min=SMALLEST_AMAX)).float()


def quantize(x: torch.Tensor, dtype: torch.dtype) -> Float8:
    """x (M, N) as fp8. The maximum is taken row by row first, so that torch.compile can take it in the kernel
    that produces x."""
    scale = scale_of(x.abs().amax(-1).amax(), dtype)
    return Float8(*_cast(x, scale, dtype), scale.reciprocal())


def empty_like(matrix: torch.Tensor) -> Float8:
    """Room for a weight; requantize() fills it."""
    values = torch.empty_like(matrix, dtype=FORWARD)
    inverse_scale = torch.empty((), dtype=torch.float32, device=matrix.device)
    return Float8(values, torch.empty_like(matrix.t(), dtype=FORWARD).contiguous(), inverse_scale)


def requantize(matrix: torch.Tensor, into: Float8) -> None:
    """Writes matrix in fp8 into the tensors of `into`, whose addresses stay: captured code has them."""
    scale = scale_of(matrix.abs().amax(-1).amax(), FORWARD)
    into.inverse_scale.copy_(scale.reciprocal())
    if matrix.is_cuda:
        from float8_kernels import quantize

        quantize(matrix, scale, FORWARD, out=into[:2])
        return
    into.values.copy_(_saturated(matrix.float() * scale, FORWARD))
    into.transposed.copy_(into.values.t())


def matmul(a, b_transposed, a_inverse, b_inverse, dtype=torch.bfloat16, fast=False) -> torch.Tensor:
    """a (M, K) times the matrix whose transpose (N, K) is given -> (M, N) in dtype. fast: Hopper keeps partial
    sums in less than fp32, which forward results stand and gradients should not."""
    if a.is_cuda:
        return torch._scaled_mm(
            a, b_transposed.t(), a_inverse, b_inverse, out_dtype=dtype, use_fast_accum=fast
        )
    return ((a.float() @ b_transposed.float().t()) * (a_inverse * b_inverse)).to(dtype)


def _saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def _both(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    values = _saturated(x, dtype)
    return values, values.t().contiguous()


@custom_op("nanomfu::float8_cast", mutates_args=())
def _cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if x.is_cuda:
        from float8_kernels import quantize

        return quantize(x.contiguous(), scale, dtype)
    return _both(x.float() * scale, dtype)


@_cast.register_fake
def _(x, scale, dtype):
    M, N = x.shape
    return x.new_empty(M, N, dtype=dtype), x.new_empty(N, M, dtype=dtype)


@custom_op("nanomfu::add_float8_weight_gradient", mutates_args=("total",))
def _add_weight_gradient(
    dyt: torch.Tensor,
    xt: torch.Tensor,
    dy_inverse: torch.Tensor,
    x_inverse: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """total (N, K) fp32 += dy^T x, of dy^T (N, M) and x^T (K, M)."""
    total.add_(matmul(dyt, xt, dy_inverse, x_inverse, torch.float32))


@_add_weight_gradient.register_fake
def _(dyt, xt, dy_inverse, x_inverse, total):
    return None


def _weight_gradient(dy: Float8, xt, x_inverse, total, dtype):
    """Adds to `total`, or returns the gradient in dtype if there is none (FSDP keeps its own)."""
    if total is None:
        return matmul(dy.transposed, xt, dy.inverse_scale, x_inverse, dtype)
    _add_weight_gradient(dy.transposed, xt, dy.inverse_scale, x_inverse, total)
    return None


class Float8Linear(torch.autograd.Function):
    """x (..., K) times weight^T, by its fp8 form -> (..., N). weight itself is where the gradient belongs."""

    @staticmethod
    def forward(ctx, x, weight, total, w, wt, w_inverse):
        x8 = quantize(x.flatten(0, -2), FORWARD)
        ctx.save_for_backward(x8.transposed, x8.inverse_scale, wt, w_inverse)
        ctx.total, ctx.dtype = total, weight.dtype
        y = matmul(x8.values, w, x8.inverse_scale, w_inverse, x.dtype, fast=True)
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dy):
        xt, x_inverse, wt, w_inverse = ctx.saved_tensors
        dy8 = quantize(dy.flatten(0, -2), GRADIENT)
        dweight = _weight_gradient(dy8, xt, x_inverse, ctx.total, ctx.dtype)
        dx = matmul(dy8.values, wt, dy8.inverse_scale, w_inverse, dy.dtype)
        return dx.unflatten(0, dy.shape[:-1]), dweight, None, None, None, None


class Float8SwiGLU(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)), both Linears in fp8. The product and the gradient of gate and up exist in
    fp8 alone: their amax comes from a pass that writes nothing, cheaper than writing them in bf16."""

    @staticmethod
    def forward(ctx, x, up, up_total, u, ut, u_inverse, down, down_total, d, dt, d_inverse):
        x8 = quantize(x.flatten(0, -2), FORWARD)
        g = matmul(x8.values, u, x8.inverse_scale, u_inverse, x.dtype, fast=True)  # (M, 2F): gate, then up
        scale = scale_of(_swiglu_amax(g), FORWARD)
        h, ht = _swiglu_cast(g, scale, FORWARD)  # (M, F)
        h_inverse = scale.reciprocal()
        ctx.save_for_backward(x8.transposed, x8.inverse_scale, g, ht, h_inverse, ut, u_inverse, dt, d_inverse)
        ctx.totals, ctx.dtype = (up_total, down_total), up.dtype
        y = matmul(h, d, h_inverse, d_inverse, x.dtype, fast=True)
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dy):
        xt, x_inverse, g, ht, h_inverse, ut, u_inverse, dt, d_inverse = ctx.saved_tensors
        up_total, down_total = ctx.totals
        dy8 = quantize(dy.flatten(0, -2), GRADIENT)
        ddown = _weight_gradient(dy8, ht, h_inverse, down_total, ctx.dtype)
        dh = matmul(dy8.values, dt, dy8.inverse_scale, d_inverse, dy.dtype)
        scale = scale_of(_swiglu_backward_amax(g, dh), GRADIENT)
        dg8 = Float8(*_swiglu_backward_cast(g, dh, scale, GRADIENT), scale.reciprocal())
        dup = _weight_gradient(dg8, xt, x_inverse, up_total, ctx.dtype)
        dx = matmul(dg8.values, ut, dg8.inverse_scale, u_inverse, dy.dtype)
        return dx.unflatten(0, dy.shape[:-1]), dup, None, None, None, None, ddown, None, None, None, None


# --- SwiGLU into fp8 ---


def _swiglu(g: torch.Tensor) -> torch.Tensor:
    gate, up = g.float().chunk(2, -1)
    return F.silu(gate) * up


def _swiglu_gradient(g: torch.Tensor, dh: torch.Tensor) -> torch.Tensor:
    gate, up = g.float().chunk(2, -1)
    sigmoid, dh = gate.sigmoid(), dh.float()
    return torch.cat((dh * up * sigmoid * (1 + gate * (1 - sigmoid)), dh * gate * sigmoid), -1)


@custom_op("nanomfu::swiglu_amax", mutates_args=())
def _swiglu_amax(g: torch.Tensor) -> torch.Tensor:
    if g.is_cuda:
        from float8_kernels import swiglu_amax

        return swiglu_amax(g)
    return _swiglu(g).abs().amax()


@_swiglu_amax.register_fake
def _(g):
    return g.new_empty((), dtype=torch.float32)


@custom_op("nanomfu::swiglu_cast", mutates_args=())
def _swiglu_cast(
    g: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    if g.is_cuda:
        from float8_kernels import swiglu_quantize

        return swiglu_quantize(g, scale, dtype)
    return _both(_swiglu(g) * scale, dtype)


@_swiglu_cast.register_fake
def _(g, scale, dtype):
    M, width = g.shape[0], g.shape[1] // 2
    return g.new_empty(M, width, dtype=dtype), g.new_empty(width, M, dtype=dtype)


@custom_op("nanomfu::swiglu_backward_amax", mutates_args=())
def _swiglu_backward_amax(g: torch.Tensor, dh: torch.Tensor) -> torch.Tensor:
    if g.is_cuda:
        from float8_kernels import swiglu_backward_amax

        return swiglu_backward_amax(g, dh)
    return _swiglu_gradient(g, dh).abs().amax()


@_swiglu_backward_amax.register_fake
def _(g, dh):
    return g.new_empty((), dtype=torch.float32)


@custom_op("nanomfu::swiglu_backward_cast", mutates_args=())
def _swiglu_backward_cast(
    g: torch.Tensor, dh: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    if g.is_cuda:
        from float8_kernels import swiglu_backward_quantize

        return swiglu_backward_quantize(g, dh, scale, dtype)
    return _both(_swiglu_gradient(g, dh) * scale, dtype)


@_swiglu_backward_cast.register_fake
def _(g, dh, scale, dtype):
    M, width = g.shape
    return g.new_empty(M, width, dtype=dtype), g.new_empty(width, M, dtype=dtype)


# --- the loss's gradient in fp8 ---


def loss_gradient(logits, targets, log_sums) -> Float8:
    """softmax - one_hot of logits (M, V). Its magnitude is at most 1, so the scale needs no pass."""
    limit = torch.finfo(GRADIENT).max
    inverse = torch.full((), 1 / limit, dtype=torch.float32, device=logits.device)
    return Float8(*_loss_gradient(logits, targets, log_sums, limit), inverse)


@custom_op("nanomfu::float8_loss_gradient", mutates_args=())
def _loss_gradient(
    logits: torch.Tensor, targets: torch.Tensor, log_sums: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if logits.is_cuda:
        from float8_kernels import loss_gradient

        return loss_gradient(logits, targets, log_sums, scale, GRADIENT)
    gradient = (logits.float() - log_sums[:, None]).exp()
    counted, column = (targets >= 0)[:, None], targets.clamp(min=0)[:, None]
    gradient.scatter_add_(-1, column, -torch.ones_like(column, dtype=gradient.dtype))
    return _both(gradient * counted * scale, GRADIENT)


@_loss_gradient.register_fake
def _(logits, targets, log_sums, scale):
    M, V = logits.shape
    return logits.new_empty(M, V, dtype=GRADIENT), logits.new_empty(V, M, dtype=GRADIENT)
