"""Computes the feed-forward layer with matmuls that compute its activation, too: QuACK's kernels, an extra.

    up forward     x W_up^T -> preactivation, and h = act(preactivation)
    down dgrad     dy W_down -> dh, of which only dpreactivation = dh act'(preactivation) is written
The activation works on a matmul's result while that is in registers, so it needs no kernel and no pass over
memory of its own. QuACK 0.6.5: https://github.com/Dao-AILab/quack. ops/linear.py has the other four matmuls.

The traps
    QuACK computes h from the fp32 result of its matmul, and not from the preactivation rounded to bf16. So
    losses differ in the last digits from those of ops/swiglu.py and ops/gelu.py.
    QuACK's public backward also writes h again, so what runs behind the matmul is generated here, with an
    internal function of QuACK. So training/optimization/ffn_backend.py refuses another version.

    M tokens · K = C model width · F feed-forward width
    N: columns of the preactivation; F for GELU, 2F for SwiGLU: gate 0, up 0, gate 1, up 1, ...
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from ops.activation import Activation, Delta
from ops.custom_op import custom_op, register_fake
from ops.linear import Linear, weight_gradient
from ops.swiglu import pairs, plain_swiglu_backward, swiglu

if TYPE_CHECKING:
    from quack.epilogue.frontend import EpiMod
    from quack.gemm_config import GemmConfig

SWIGLU, GELU = "swiglu", "gelu"
GELU_IN_QUACK = "gelu_tanh_approx"


# --- QuACK's kernels ---


@functools.cache  # kept for ever: QuACK's cache knows a configuration by its id(), which Python gives again
def _config() -> GemmConfig:
    """The fastest of those measured for SwiGLU's two operations on an H200 (LOG.md); GELU's were not
    measured."""
    from quack.gemm_config import GemmConfig

    return GemmConfig(
        tile_m=128,
        tile_n=192,
        pingpong=True,
        cluster_m=2,
        cluster_n=1,
        is_dynamic_persistent=False,
        device_capacity=9,
    )


@functools.cache
def _forward_kernel(activation: str) -> EpiMod:
    from quack.epilogue.library import linear_act_mod

    gated = activation == SWIGLU
    name = SWIGLU if gated else GELU_IN_QUACK
    return linear_act_mod(
        name, gated=gated, has_c=False, has_rowvec=False, has_colvec=False, sr=False, has_alpha=False
    )


@functools.cache
def _backward_kernel(activation: str) -> EpiMod:
    """QuACK's dgated_mod and dact_mod without their output of h. acc is dh, c the preactivation."""
    from quack.activation import dact_fn_map, dgate_fn_map
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.library import _gen_epi_fn

    if activation == SWIGLU:
        body = ["x, y = unpack(c)", "dx, dy, out = dgate(x, y, acc)", 'return {"D": pack(dx, dy)}']
        function = _gen_epi_fn(
            "dgated_only_epi", "dgated_only:swiglu", ["c"], body, {"dgate": dgate_fn_map[SWIGLU]}
        )
        return gemm_epilogue(outputs=(), ops={}, mode="packed_cd_b16x2")(function)
    body = ["dx, _ = dact(c, acc)", 'return {"D": dx}']
    function = _gen_epi_fn(
        "dact_only_epi", "dact_only:gelu", ["c"], body, {"dact": dact_fn_map[GELU_IN_QUACK]}
    )
    return gemm_epilogue(outputs=(), ops={})(function)


def quack_forward(
    x: torch.Tensor, weight: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    preactivation, h = _new_outputs(x, weight, activation)
    outputs = {"D": preactivation, "mAuxOut": h}
    _forward_kernel(activation)(
        x.contiguous(), weight.contiguous().t(), None, out=outputs, config=_config(), tuned=False
    )
    return preactivation, h


def quack_backward(
    dy: torch.Tensor, weight: torch.Tensor, preactivation: torch.Tensor, activation: str
) -> torch.Tensor:
    preactivation = preactivation.contiguous()
    gradient = torch.empty_like(preactivation)
    operands = dy.contiguous(), weight.contiguous(), preactivation
    _backward_kernel(activation)(*operands, out={"D": gradient}, config=_config(), tuned=False)
    return gradient


# --- the same in plain PyTorch: what the kernels are compared with, and what tests put in their place ---


def plain_forward(
    x: torch.Tensor, weight: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float() @ weight.float().t()
    if activation == SWIGLU:
        gate, up = pairs(wide)
        h = F.silu(gate) * up
    else:
        h = F.gelu(wide, approximate="tanh")
    return wide.to(x.dtype), h.to(x.dtype)


def plain_backward(
    dy: torch.Tensor, weight: torch.Tensor, preactivation: torch.Tensor, activation: str
) -> torch.Tensor:
    dh, wide = dy.float() @ weight.float(), preactivation.float()
    if activation == SWIGLU:
        gradient = plain_swiglu_backward(wide, dh)
    else:
        gradient = torch.ops.aten.gelu_backward(dh, wide, approximate="tanh")
    return gradient.to(preactivation.dtype)


# --- the operations ---


@custom_op("nanomfu::activated_matmul", mutates_args=())
def activated_matmul(
    x: torch.Tensor, weight: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K), weight (N, K) -> preactivation (M, N), h (M, F)."""
    return quack_forward(x, weight, activation)


@register_fake(activated_matmul)
def _new_outputs(x, weight, activation):
    M, N = x.shape[0], weight.shape[0]
    return x.new_empty(M, N), x.new_empty(M, N // 2 if activation == SWIGLU else N)


@register_flop_formula(torch.ops.nanomfu.activated_matmul)
def _(x_shape, weight_shape, *args, **kwargs) -> int:
    return 2 * x_shape[0] * weight_shape[0] * weight_shape[1]


@custom_op("nanomfu::activation_backward_matmul", mutates_args=())
def activation_backward_matmul(
    dy: torch.Tensor, weight: torch.Tensor, preactivation: torch.Tensor, activation: str
) -> torch.Tensor:
    """dy (M, C), weight (C, F), preactivation (M, N) -> its gradient (M, N)."""
    return quack_backward(dy, weight, preactivation, activation)


@register_fake(activation_backward_matmul)
def _(dy, weight, preactivation, activation):
    return preactivation.new_empty(preactivation.shape)


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
        ctx.save_for_backward(x, preactivation, h, up, down)
        ctx.up_total, ctx.down_total, ctx.activation = up_total, down_total, activation
        return F.linear(h, down)

    @staticmethod
    def backward(ctx, dy):
        x, preactivation, h, up, down = ctx.saved_tensors
        d_down = weight_gradient(dy, h, ctx.down_total)  # first: compiled code then frees h
        d_preactivation = activation_backward_matmul(dy, down, preactivation, ctx.activation)
        d_up = weight_gradient(d_preactivation, x, ctx.up_total)
        return d_preactivation @ up, d_up, d_down, None, None, None
