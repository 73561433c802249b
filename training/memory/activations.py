"""Estimates the memory of activations: what forward passes keep for the backward, at each level of
activation_checkpointing, and what the fullest moments of an iteration hold besides.

Each term is a tensor that the code named beside it keeps. tests/unit/test_recompute.py compares the levels
with the tensors that a compiled block has kept.

    C model width · A columns of all query heads · F feed-forward width
"""

from __future__ import annotations

from training.memory.sizes import Moment, Sizes
from training.optimization.compile import is_recomputed


def loss_moment(s: Sizes) -> Moment:
    """The fullest moment of the forward: the head has the logits of one part of the tokens, and all blocks
    keep their activations (ops/cross_entropy.py)."""
    C, V, parts = s.model.n_embd, s.model.vocab_size, s.config.logit_parts
    part = s.tokens / parts
    dx = part * s.compute * C  # the gradient of a part's input
    # x + delta, its norm, delta, and x, if the last block does not keep it anyway
    inputs: float = s.tokens * s.compute * C * (3 + _is_recomputed(s, s.model.n_layer - 1))
    logits: float = part * s.compute * V
    if s.low_head:
        # the part's input and the gradient of its logits, quantized, while they are there. The matmul adds to
        # the head's sum; where it cannot (ops/cublaslt.py), a product as large as the head comes after them,
        # which is counted where that is the rule (Forms.adds)
        if not s.in_head.adds:
            logits = max(logits, 4 * s.head)
        logits += 2 * part * s.in_head.operand * V
        inputs += 2 * part * s.in_head.operand * C + (parts - 1) * dx
    else:  # the logits are their own gradient by then, and dx is being computed from them
        scaled = not (s.config.use_fsdp or s.config.dtype == "float16")  # the input for the head's sum
        inputs += (parts + scaled) * dx
    return {"activations": s.tokens * sum(_kept_by_blocks(s)), "logits": logits, "head's inputs": inputs}


def head_backward(s: Sizes, wide: int = 8) -> Moment:
    """The head's backward scales dx in float32: dx, what it is scaled to (8 bytes) and x + delta."""
    inputs = s.tokens * s.model.n_embd * (2 * s.compute + wide)
    return {"activations": s.tokens * sum(_kept_by_blocks(s)), "head's inputs": inputs}


def block_backward(s: Sizes) -> Moment:
    """The backward of the block at which activations are the most: of the last one, or of one that has to be
    recomputed first."""
    kept, moments = _kept_by_blocks(s), []
    for i in range(s.model.n_layer):
        here = sum(kept[: i + 1]) + _gradients_in_a_block(s, i)
        if _is_recomputed(s, i):
            # a compiled block's backward takes all that was recomputed at once, which frees the inputs
            here += kept_by_a_block(s, i) - (kept[i] if s.config.compile else 0)
        moments.append(here)
    # of up's weight, before it is added to the sum
    product = 0 if s.low.adds else 4 * s.model.n_embd * s.up
    return {"activations": s.tokens * max(moments) + product}


def _kept_by_blocks(s: Sizes) -> list[float]:
    """Bytes per token that each block's forward keeps for its backward. A recomputed block keeps its inputs,
    the stream and what is to be added to it; a block before it that is not recomputed keeps the stream."""
    kept: list[float] = []
    for i in range(s.model.n_layer):
        inputs = 1 if i > 0 and not _is_recomputed(s, i - 1) else 2
        kept.append(s.compute * s.model.n_embd * inputs if _is_recomputed(s, i) else kept_by_a_block(s, i))
    kept[0] += s.model.n_embd * (s.config.dropout > 0)  # the mask of the embedding's dropout
    return kept


def _is_recomputed(s: Sizes, i: int) -> bool:
    return is_recomputed(i, s.config.activation_checkpointing)


def kept_by_a_block(s: Sizes, i: int) -> float:
    """Bytes per token that the forward of block i keeps for its backward (model.py, Block)."""
    model, config, compute, low = s.model, s.config, s.compute, i in s.low_blocks
    C, A, F = model.n_embd, model.attention_width, model.d_ff
    # inputs of matmuls: as they are; or in the form for the backward alone (ops/float8_linear.py)
    operand = s.low.operand if low else compute
    inputs = low or not s.recomputes  # whether inputs of Linears after a norm or an activation are kept
    attention = config.activation_checkpointing != "attention"
    size: float = 2 * compute * C  # the two residual sums, which the norms' backward needs
    size += 2 * operand * C * inputs  # the inputs of qkv and up
    size += compute * (A + 2 * model.n_kv_head * model.head_dim)  # qkv
    if not s.recomputes or (attention and config.doc_masking):
        size += compute * _columns_of_rotated_copies(s)
    size += attention * (compute * A + 4 * model.n_head)  # its output, and its log-sum-exp in float32
    size += operand * A * low  # the input of out, if it is not that output
    size += compute * s.up + operand * F * (
        inputs and s.keeps_activated
    )  # the output of up, the input of down
    if not config.compile and not _has_swiglu_kernel(s):
        # the activated gate, which compiled code makes again; or what torch.utils.checkpoint keeps without
        # need, the result of down
        size += compute * F * s.gated if inputs else compute * C
    size += 2 * 2 * 4 * (model.normalization == "layernorm")  # mean and deviation in float32, of two norms
    return size + 2 * C * (config.dropout > 0)  # two masks of one byte


def _has_swiglu_kernel(s: Sizes) -> bool:
    """Whether the kernels of ops/swiglu.py compute the activation."""
    return s.gated and s.model.activation == "silu"


def _columns_of_rotated_copies(s: Sizes) -> int:
    """Columns of q and k if they are kept beside the qkv that they were computed from, of which v is a part.

    Without norms, the backward of ops/heads.py's kernel needs nothing that was computed before, so qkv is
    freed. That kernel is for head widths that are a power of two.
    """
    model, D = s.model, s.model.head_dim
    freed = not model.qk_norm and D & (D - 1) == 0
    return 0 if freed or model.position_encoding != "rope" else model.attention_width + model.n_kv_head * D


def _gradients_in_a_block(s: Sizes, i: int) -> float:
    """Bytes per token that the backward of the feed-forward layer, the fullest of a block, adds to what block
    i has kept: the gradients of its output and of the output of up; and what is named below."""
    C, F, compute = s.model.n_embd, s.model.d_ff, s.compute
    gradients = compute * (C + s.up)
    if i not in s.low_blocks:
        # if the input of down has to be made again: its gradient; swiglu's kernel writes the input beside it,
        # and a backend that does not keep it writes only the input
        again = (not s.keeps_activated) + s.recomputes * (1 + _has_swiglu_kernel(s))
        return gradients + compute * F * again
    if not s.low.is_float8:  # what the gradient of up's output is quantized to
        return gradients + 2 * s.low.operand * s.up
    if s.gated and not s.config.compile:
        # one function (LowPrecisionSwiGLU): at its end, the gradients of its output, of h, of up's output (in
        # fp8, both layouts) and of its input are there
        return compute * (2 * C + F) + 2 * s.up
    return gradients + (compute - 1) * F  # the gradient of down's input, which was kept in one byte
