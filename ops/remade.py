"""Linears and attention whose inputs the backward makes again, instead of keeping them: the first levels of
activation_checkpointing. Only what is bound by memory is made again, so no matmul is computed twice; with
the level 'attention', attention is.

Inputs of a Linear are needed for its weight's gradient alone. So its backward computes its input's gradient
first, makes the input again, computes the weight's gradient and drops it. LLMQ's --recompute-norm,
--recompute-swiglu and --recompute-att (arXiv 2512.15306) are the same choices.

A Linear in low precision keeps its input in that precision, in half of the bytes. That stays so.

    M tokens · C, N, K widths · F feed-forward width
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.library import custom_op
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ops.linear import Linear, LinearFunction
from ops.matmul import weight_gradient
from ops.norm import Norm, normalize
from ops.swiglu import swiglu, swiglu_backward_and_product


class Remake(NamedTuple):
    """What the layer after a norm needs to make the norm's output again, and whether it does the same with
    attention."""

    total: torch.Tensor  # (..., C), what was normalized: the residual stream, which is kept anyway
    norm: Norm
    attention: bool


def linear_of_norm(layer: Linear, x: torch.Tensor, amax: torch.Tensor | None, remake: Remake) -> torch.Tensor:
    """layer(x), of x (..., C), the norm of remake.total."""
    if layer.low_precision is not None:
        return layer(x, amax)
    norm_weight, norm_bias, eps, centered = remake.norm
    weight, bias, later = _operands(layer, x)
    y = _NormLinear.apply(
        x, remake.total, norm_weight, norm_bias, eps, centered, weight, bias, layer.weight_grad
    )
    return y if later is None else y + later


def linear_of_swiglu(layer: Linear, gate_up: torch.Tensor) -> torch.Tensor:
    """layer(swiglu(gate_up)), of gate_up (..., 2F), pairs of gate and up."""
    weight, bias, later = _operands(layer, gate_up)
    y = _SwiGLULinear.apply(gate_up, weight, bias, layer.weight_grad)
    return y if later is None else y + later


def again(
    function: Callable[..., torch.Tensor],
    *inputs: object,
    keep_rng: bool,
    keep_products: bool = False,
    flex: bool = False,
) -> torch.Tensor:
    """function(*inputs), of which the backward makes everything again; or, with keep_products, all but the
    results of matmuls and attention. keep_rng: with the same random numbers. flex: flex attention may be
    among it, which takes no policy."""
    context: dict = {}
    if keep_products:
        context = {"context_fn": _keeping_products}
    elif torch.compiler.is_compiling() and not flex:
        context = {"context_fn": _keeping_nothing}
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=keep_rng, **context)


def linear_of_again(
    layer: Linear,
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    keep_rng: bool,
    flex: bool,
) -> torch.Tensor:
    """layer(function(x)), of which the backward makes function(x) again, and not the product."""

    def product(x: torch.Tensor) -> torch.Tensor:
        y = function(x)
        # compiled code leaves out what nothing reads; autograd's own Linear keeps its input, then computes
        if torch.compiler.is_compiling() or layer.weight_grad is None:
            return layer(y)
        weight, _, bias = _operands(layer, y)
        # checkpoint() stops once the last tensor to be kept is there, here before the product
        result = _Product.apply(_Gradients.apply(y, weight, layer.weight_grad), y.detach(), weight.detach())
        return result if bias is None else result + bias

    return again(product, x, keep_rng=keep_rng, flex=flex)


# --- Linears ---


def _operands(layer: Linear, x: torch.Tensor):
    """The weight, a bias for inside of the matmul, and one to be added after it: as Linear.forward has it."""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    if layer.weight_grad is not None:
        return layer.weight, None, bias
    return layer.weight.to(x.dtype), bias, None


def _bias_gradient(dy: torch.Tensor) -> torch.Tensor:
    return dy.flatten(0, -2).sum(0)


class _NormLinear(torch.autograd.Function):
    """x (..., C), the norm of total; weight (N, C) -> (..., N). The norm's own backward goes through x."""

    @staticmethod
    def forward(ctx, x, total, norm_weight, norm_bias, eps, centered, weight, bias, weight_grad):
        ctx.save_for_backward(total, norm_weight, norm_bias, weight)
        ctx.eps, ctx.centered, ctx.has_bias, ctx.weight_grad = eps, centered, bias is not None, weight_grad
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        total, norm_weight, norm_bias, weight = ctx.saved_tensors
        dx = dy @ weight
        x = norm_again(total, norm_weight, norm_bias, ctx.eps, ctx.centered)
        dweight = weight_gradient(dy, x, ctx.weight_grad)
        dbias = _bias_gradient(dy) if ctx.has_bias else None
        return dx, None, None, None, None, None, dweight, dbias, None


class _Gradients(LinearFunction):
    """LinearFunction's backward, without the product: what stands for it has its shape and no memory."""

    @staticmethod
    def forward(ctx, x, weight, total):
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return x.new_empty(()).expand(*x.shape[:-1], len(weight))


class _Product(torch.autograd.Function):
    """x (..., K), weight (N, K) -> (..., N), whose gradient goes to what stands for it."""

    @staticmethod
    def forward(ctx, stand_in, x, weight):
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None


class _SwiGLULinear(torch.autograd.Function):
    """gate_up (..., 2F), weight (N, F) -> (..., N). SwiGLU's backward reads gate_up and writes the product,
    too: 2 more bytes for each of its elements in bf16, and no kernel of its own."""

    @staticmethod
    def forward(ctx, gate_up, weight, bias, weight_grad):
        ctx.save_for_backward(gate_up, weight)
        ctx.has_bias, ctx.weight_grad = bias is not None, weight_grad
        return F.linear(swiglu(gate_up), weight, bias)

    @staticmethod
    def backward(ctx, dy):
        gate_up, weight = ctx.saved_tensors
        dh = dy @ weight
        dgate_up, h = swiglu_backward_and_product(gate_up.flatten(0, -2), dh.flatten(0, -2))
        dweight = weight_gradient(dy, h, ctx.weight_grad)
        dbias = _bias_gradient(dy) if ctx.has_bias else None
        return dgate_up.view_as(gate_up), dweight, dbias, None


@custom_op("nanomfu::norm_again", mutates_args=())
def norm_again(
    total: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, centered: bool
) -> torch.Tensor:
    """The norm of total (..., C), bit for bit as add_norm made it. An operation of its own, so that
    torch.compile does not find that it has this result already and keep it."""
    if total.is_cuda:
        from ops.triton_kernels.norm import triton_norm

        return triton_norm(total.contiguous().flatten(0, -2), weight, bias, eps, centered).view_as(total)
    return normalize(total, Norm(weight, bias, eps, centered))


@norm_again.register_fake
def _(total, weight, bias, eps, centered):
    return total.new_empty(total.shape)


# --- attention ---

_KEPT = {
    *("mm", "addmm", "bmm", "baddbmm", "_softmax", "_scaled_dot_product_flash_attention_for_cpu"),
    *(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    *(f"_{kind}_attention_forward" for kind in ("flash", "efficient", "cudnn")),
}


def _policy(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    """Keeps matmuls, and attention kernels of whatever library. What else ATen computes is bound by memory,
    and so is the kernel of ops/heads.py."""
    namespace, _, name = operation.name().partition("::")
    name = name.partition(".")[0]
    remade = name not in _KEPT if namespace == "aten" else (namespace, name) == ("nanomfu", "heads")
    return CheckpointPolicy.MUST_RECOMPUTE if remade else CheckpointPolicy.MUST_SAVE


_keeping_products = functools.partial(create_selective_checkpoint_contexts, _policy)
# said explicitly: without it, compiled code of torch 2.11 keeps q and k of the heads' kernel all the same
_keeping_nothing = functools.partial(
    create_selective_checkpoint_contexts, lambda *_, **keywords: CheckpointPolicy.MUST_RECOMPUTE
)
