"""Layers in fp8: a Linear, and the two places where its neighbour's kernel knows the largest magnitude that a
cast needs, so that no pass is spent on it. ops/float8.py has the numerics. A weight comes with the tensors of its
float8.Float8; `total` is where its gradient is added, or None to return it (FSDP keeps its own).

    M tokens · F feed-forward width · H, K query and key/value heads · D head width
"""

from __future__ import annotations

import torch

from ops.float8 import FORWARD, GRADIENT, Float8, add_weight_gradient, matmul, quantize
from ops.heads import heads_backward, heads_forward, swiglu_backward, swiglu_with_amax


def _forward(x, amax, w, w_inverse):
    """x (..., K) -> x weight^T (M, N), and what the backward needs of x."""
    x8 = quantize(x.flatten(0, -2), FORWARD, amax)
    y = matmul(x8.values, w, x8.inverse_scale, w_inverse, x.dtype, fast=True)
    return y, x8.transposed, x8.inverse_scale


def _backward(dy8: Float8, xt, x_inverse, wt, w_inverse, total, dtype):
    """dx (M, K), and the weight's gradient if there is no `total` that it is added to."""
    dx = matmul(dy8.values, wt, dy8.inverse_scale, w_inverse, dtype)
    if total is None:
        return dx, matmul(dy8.transposed, xt, dy8.inverse_scale, x_inverse, dtype)
    add_weight_gradient(dy8.transposed, xt, dy8.inverse_scale, x_inverse, total)
    return dx, None


class Float8Linear(torch.autograd.Function):
    """x (..., K), amax of x or None -> x weight^T (..., N)."""

    @staticmethod
    def forward(ctx, x, amax, weight, total, w, wt, w_inverse):
        y, *saved = _forward(x, amax, w, w_inverse)
        ctx.save_for_backward(*saved, wt, w_inverse)
        ctx.total = total
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dy):
        dy8 = quantize(dy.flatten(0, -2), GRADIENT)
        dx, dweight = _backward(dy8, *ctx.saved_tensors, ctx.total, dy.dtype)
        return dx.unflatten(0, dy.shape[:-1]), None, dweight, None, None, None, None


class Float8SwiGLU(torch.autograd.Function):
    """x (..., C), amax of x or None -> down(silu(gate(x)) * up(x)), of a fused gate and up weight u and d."""

    @staticmethod
    def forward(ctx, x, amax, up, up_total, u, ut, u_inverse, down, down_total, d, dt, d_inverse):
        g, *x_saved = _forward(x, amax, u, u_inverse)  # (M, 2F): gate, then up
        y, *h_saved = _forward(*swiglu_with_amax(g), d, d_inverse)
        ctx.save_for_backward(g, *x_saved, ut, u_inverse, *h_saved, dt, d_inverse)
        ctx.totals = up_total, down_total
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dy):
        g, *saved = ctx.saved_tensors
        up_total, down_total = ctx.totals
        dy8 = quantize(dy.flatten(0, -2), GRADIENT)
        dh, ddown = _backward(dy8, *saved[4:], down_total, dy.dtype)
        dg, amax = swiglu_backward(g, dh)
        dx, dup = _backward(quantize(dg, GRADIENT, amax), *saved[:4], up_total, dy.dtype)
        none = (None, None, None, None)
        return dx.unflatten(0, dy.shape[:-1]), None, dup, *none, ddown, *none


class Float8Heads(torch.autograd.Function):
    """x (B, T, C), amax of x or None -> q (B, T, H, D), k and v (B, T, K, D), projected by a fused weight,
    normalised if there are norm weights, and rotated: ops.split_heads on a GPU."""

    @staticmethod
    def forward(ctx, x, amax, weight, total, w, wt, w_inverse, q_norm, k_norm, cos, sin, H, K, eps):
        y, *saved = _forward(x, amax, w, w_inverse)
        qkv = y.unflatten(0, x.shape[:-1])  # (B, T, (H + 2K) D)
        ctx.save_for_backward(*saved, wt, w_inverse, qkv, q_norm, k_norm, cos, sin)
        ctx.total, ctx.eps = total, eps
        return heads_forward(qkv, q_norm, k_norm, cos, sin, H, K, eps)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        *saved, qkv, q_norm, k_norm, cos, sin = ctx.saved_tensors
        dqkv, amax, dnorms = heads_backward(dq, dk, dv, qkv, q_norm, k_norm, cos, sin, ctx.eps)
        dx, dweight = _backward(quantize(dqkv.flatten(0, -2), GRADIENT, amax), *saved, ctx.total, dq.dtype)
        dnorms = (None, None) if q_norm is None else dnorms.to(q_norm.dtype).unbind(0)
        none = (None, None, None, None, None)
        return dx.unflatten(0, qkv.shape[:-1]), None, dweight, *none[:4], *dnorms, *none
