"""Makes a block's backward compute inputs of its Linears and attention again, instead of keeping them: the
first levels of activation_checkpointing. Only what is bound by memory is repeated, so no matmul is computed
twice; with the level 'attention', attention is.

Inputs of a Linear are needed for its weight's gradient alone. So its backward computes its input's gradient
first, the input again, the weight's gradient, and drops the input. LLMQ's --recompute-norm,
--recompute-swiglu and --recompute-att (arXiv 2512.15306) are the same choices.

A Linear in low precision keeps its input in that precision, in half of the bytes. That stays so.

    M tokens · C, N widths · F feed-forward width
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ops.activation import Activation, Delta
from ops.feed_forward import feed_forward
from ops.heads import keeps_copies
from ops.linear import Linear, weight_gradient
from ops.swiglu import swiglu, swiglu_backward_and_product


def recompute(block: Any, level: str) -> None:
    """Makes the backward of a block (model.Block) recompute what `level` says: 'memory_bound' or 'attention'.
    Before the block is compiled."""
    attn, ffn = block.attn, block.ffn
    attn.qkv.recomputes_input = ffn.up.recomputes_input = True
    if level == "attention" and attn.out.keeps_input:  # then out's input is computed again, too
        attn.out.ends_recomputation = True
        attn.run_projection = _projection_again
    elif level == "attention":
        attn.run_heads = _heads_again
    else:
        attn.run_heads = _copies_again
    if ffn.up.keeps_input:
        ffn.compute = _recomputed_feed_forward


def _projection_again(part, qkv: Activation, rotary, mask) -> Delta:
    """Of Attention.attend_and_project the backward computes everything again but the product."""
    if not torch.is_grad_enabled():
        return part(qkv, rotary, mask)

    def value(*fields) -> torch.Tensor:
        return part(Activation(*fields), rotary, mask)[0]

    return _again(value, *qkv, keep_rng=_draws(part.__self__), flex=mask is not None), None


def _heads_again(part, qkv: Activation, rotary, mask, keep_products: bool = False) -> torch.Tensor:
    """Of Attention.attend_heads the backward computes everything again, or all but attention."""
    if not torch.is_grad_enabled():
        return part(qkv, rotary, mask)

    def heads(*fields) -> torch.Tensor:
        return part(Activation(*fields), rotary, mask)

    how = {"keep_products": keep_products, "flex": mask is not None}
    return _again(heads, *qkv, keep_rng=_draws(part.__self__), **how)


def _copies_again(part, qkv: Activation, rotary, mask) -> torch.Tensor:
    """Where Attention.attend_heads keeps copies of q and k beside qkv, the backward makes them again."""
    # not with a mask: the kernel of flex attention cannot be kept while q and k are computed again
    copies = mask is None and keeps_copies(qkv.value, rotary, part.__self__.q_norm)
    return _heads_again(part, qkv, rotary, mask, keep_products=True) if copies else part(qkv, rotary, mask)


def _draws(attn) -> bool:
    return attn.training and attn.dropout > 0


def _recomputed_feed_forward(x: Activation, up: Linear, activation, down: Linear) -> Delta:
    """feed_forward(), of which the activation's result is not kept."""
    if not torch.is_grad_enabled():
        return feed_forward(x, up, activation, down)
    if activation is not swiglu:
        return _again(lambda h: down(activation(h)), up(x), keep_rng=False, keep_products=True), None
    gate_up = up(x)
    weight, bias, added = down.operands(gate_up.dtype)
    y = SwiGLULinear.apply(gate_up, weight, bias, down.weight_grad)
    return (y if added is None else y + added), None


class SwiGLULinear(torch.autograd.Function):
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
        dbias = dy.flatten(0, -2).sum(0) if ctx.has_bias else None
        return dgate_up.view_as(gate_up), dweight, dbias, None


# --- torch.utils.checkpoint ---


def _again(
    function: Callable[..., torch.Tensor],
    *inputs,
    keep_rng: bool,
    keep_products: bool = False,
    flex: bool = False,
) -> torch.Tensor:
    """function(*inputs), of which the backward computes everything again; or, with keep_products, all but the
    results of matmuls and attention. keep_rng: with the same random numbers. flex: flex attention may be
    among it, which takes no policy."""
    context: dict = {}
    if keep_products:
        context = {"context_fn": _keeping_products}
    elif torch.compiler.is_compiling() and not flex:
        context = {"context_fn": _keeping_nothing}
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=keep_rng, **context)


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
    repeated = name not in _KEPT if namespace == "aten" else (namespace, name) == ("nanomfu", "heads")
    return CheckpointPolicy.MUST_RECOMPUTE if repeated else CheckpointPolicy.MUST_SAVE


_keeping_products = functools.partial(create_selective_checkpoint_contexts, _policy)
# said explicitly: without it, compiled code of torch 2.11 keeps q and k of the heads' kernel all the same
_keeping_nothing = functools.partial(
    create_selective_checkpoint_contexts, lambda *_, **keywords: CheckpointPolicy.MUST_RECOMPUTE
)
