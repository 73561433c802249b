"""Computes the feed-forward layer with matmuls that compute its activation, too: QuACK's kernels, an extra.

    up forward     x W_up^T -> preactivation, and h = act(preactivation)
    down dgrad     dy W_down -> dh, of which dpreactivation = dh act'(preactivation) is written, and h again
The activation works on a matmul's result while that is in registers, so it needs no kernel and no pass over
memory of its own, and h is not kept from the forward. https://github.com/Dao-AILab/quack, measured
with 0.6.5; whether another version gives the same is seen at the start. ops/linear.py has the other matmuls.

The trap: QuACK's forward computes h from the fp32 result of its matmul, before that is rounded to bf16. So
losses differ in the last digits from those of ops/swiglu.py and ops/gelu.py.

    M tokens · K = C model width · F feed-forward width
    N: columns of the preactivation; F for GELU, 2F for SwiGLU: gate 0, up 0, gate 1, up 1, ...
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from ops.activation import Activation, Delta
from ops.custom_op import custom_op, register_fake
from ops.linear import Linear, weight_gradient
from ops.swiglu import pairs, plain_swiglu_backward, swiglu

SWIGLU, GELU = "swiglu", "gelu_tanh_approx"  # QuACK's names


# --- what the kernels are compared with, and what tests put in their place ---


def plain_forward(
    x: torch.Tensor, weight: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float() @ weight.float().t()
    return wide.to(x.dtype), _plain_activation(wide, activation).to(x.dtype)


def plain_backward(
    dy: torch.Tensor, weight: torch.Tensor, preactivation: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    dh, wide = dy.float() @ weight.float(), preactivation.float()
    if activation == SWIGLU:
        gradient = plain_swiglu_backward(wide, dh)
    else:
        gradient = torch.ops.aten.gelu_backward(dh, wide, approximate="tanh")
    return gradient.to(dy.dtype), _plain_activation(wide, activation).to(dy.dtype)


def _plain_activation(wide: torch.Tensor, activation: str) -> torch.Tensor:
    if activation != SWIGLU:
        return F.gelu(wide, approximate="tanh")
    gate, up = pairs(wide)
    return F.silu(gate) * up


# --- the operations ---


@custom_op("nanomfu::activated_matmul", mutates_args=())
def activated_matmul(
    x: torch.Tensor, weight: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K), weight (N, K) -> preactivation (M, N), h (M, F)."""
    from quack.gemm_interface import gemm_act

    return gemm_act(x.contiguous(), weight.contiguous().t(), activation=activation, tuned=False)


@register_fake(activated_matmul)
def _(x, weight, activation):
    M, N = x.shape[0], weight.shape[0]
    return x.new_empty(M, N), x.new_empty(M, N // 2 if activation == SWIGLU else N)


@register_flop_formula(torch.ops.nanomfu.activated_matmul)
def _(x_shape, weight_shape, *args, **kwargs) -> int:
    return 2 * x_shape[0] * weight_shape[0] * weight_shape[1]


@custom_op("nanomfu::activation_backward_matmul", mutates_args=())
def activation_backward_matmul(
    dy: torch.Tensor, weight: torch.Tensor, preactivation: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """dy (M, C), weight (C, F), preactivation (M, N) -> its gradient (M, N), h (M, F)."""
    from quack.gemm_interface import gemm_dact

    operands = dy.contiguous(), weight.contiguous(), preactivation.contiguous()
    return gemm_dact(*operands, activation=activation, dynamic_scheduler=False, tuned=False)


@register_fake(activation_backward_matmul)
def _(dy, weight, preactivation, activation):
    return preactivation.new_empty(preactivation.shape), dy.new_empty(dy.shape[0], weight.shape[1])


@register_flop_formula(torch.ops.nanomfu.activation_backward_matmul)
def _(dy_shape, weight_shape, *args, **kwargs) -> int:
    return 2 * dy_shape[0] * weight_shape[0] * weight_shape[1]


# --- the layer ---


def fused_feed_forward(x: Activation, up: Linear, activation, down: Linear) -> Delta:
    """feed_forward (ops/feed_forward.py) of SwiGLU or GELU, without biases."""
    value = x.value
    weights, name = (up.weight.to(value.dtype), down.weight.to(value.dtype)), name_of(activation)
    rows = FusedFeedForward.apply(value.flatten(0, -2), *weights, up.weight_grad, down.weight_grad, name)
    return rows.unflatten(0, value.shape[:-1]), None


def name_of(activation) -> str:
    return SWIGLU if activation is swiglu else GELU


class FusedFeedForward(torch.autograd.Function):
    """x (M, C), up (N, C), down (C, F) -> (M, C). The totals are as in ops.linear.LinearFunction."""

    @staticmethod
    def forward(ctx, x, up, down, up_total, down_total, activation):
        preactivation, h = activated_matmul(x, up, activation)
        ctx.save_for_backward(x, preactivation, up, down)
        ctx.up_total, ctx.down_total, ctx.activation = up_total, down_total, activation
        return F.linear(h, down)

    @staticmethod
    def backward(ctx, dy):
        x, preactivation, up, down = ctx.saved_tensors
        d_preactivation, h = activation_backward_matmul(dy, down, preactivation, ctx.activation)
        d_down = weight_gradient(dy, h, ctx.down_total)
        d_up = weight_gradient(d_preactivation, x, ctx.up_total)
        return d_preactivation @ up, d_up, d_down, None, None, None
