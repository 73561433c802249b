"""Estimates the memory of activations: what forward passes keep for the backward, at each level of
activation_checkpointing, and what the fullest moments of an iteration hold besides.

Each term is a tensor that the code named beside it keeps. tests/unit/test_remade.py compares the levels with
the tensors that a compiled block has kept.

    C model width · A columns of all query heads · F feed-forward width · V vocabulary
"""

from __future__ import annotations

from model_config import ModelConfig
from training.configuration.recomputation import REMAKING
from training.memory.sizes import Moment, Sizes
from training.optimization.compile import is_recomputed


def loss_moment(s: Sizes) -> Moment:
    """The fullest moment of the forward: the head has the logits of one part of the tokens, and all blocks
    keep their activations (ops/cross_entropy.py)."""
    C, chunks = s.model.n_embd, s.config.logit_parts
    part = s.tokens / chunks
    held = 3 + is_recomputed(s.model.n_layer - 1, s.config.activation_checkpointing)
    # x + delta, its norm, delta, and x, if the last block does not keep it anyway
    beside: float = s.tokens * s.compute * C * held
    logits, dx = part * s.compute * s.model.vocab_size, part * s.compute * C
    kept = {"activations": s.tokens * sum(_kept_by_blocks(s))}
    if not s.low_head:  # the logits are their own gradient by then, and dx is being computed from them
        scaled = 0 if s.config.use_fsdp or s.config.dtype == "float16" else dx  # the input for the sum
        return {**kept, "logits": logits, "head's inputs": beside + chunks * dx + scaled}
    beside += part * s.both_forms * C  # the part's input
    # their gradient, quantized, while they are there. The matmul adds to the head's sum; where it cannot
    # (ops/cublaslt.py), a product as large as the head comes after them, which is not counted here
    quantized = part * s.both_forms * s.model.vocab_size
    return {**kept, "logits": logits + quantized, "head's inputs": beside + (chunks - 1) * dx}


def head_backward(s: Sizes, wide: int = 8) -> Moment:
    """The head's backward scales dx in float32: dx, what it is scaled to (8 bytes) and x + delta."""
    inputs = s.tokens * s.model.n_embd * (2 * s.compute + wide)
    return {"activations": s.tokens * sum(_kept_by_blocks(s)), "head's inputs": inputs}


def block_backward(s: Sizes) -> Moment:
    """The backward of the block at which activations are the most: of the last one, or of one that has to be
    recomputed first."""
    kept, most = _kept_by_blocks(s), 0.0
    for i in range(s.model.n_layer):
        in_block = kept_by_a_block(s, i)
        recomputed = 0.0
        if is_recomputed(i, s.config.activation_checkpointing):
            # a compiled block's backward takes all that was recomputed at once, which frees the inputs
            recomputed = in_block - (kept[i] if s.config.compile else 0)
        most = max(most, sum(kept[: i + 1]) + recomputed + _gradients_in_a_block(s, i))
    return {"activations": s.tokens * most}


def _kept_by_blocks(s: Sizes) -> list[float]:
    """Bytes per token that each block's forward keeps for its backward. A recomputed block keeps its inputs,
    the stream and what is to be added to it; a block before it that is not recomputed keeps the stream."""
    level, C = s.config.activation_checkpointing, s.model.n_embd
    kept: list[float] = []
    for i in range(s.model.n_layer):
        if is_recomputed(i, level):
            shared = i > 0 and not is_recomputed(i - 1, level)
            kept.append(s.compute * C * (1 if shared else 2))
        else:
            kept.append(kept_by_a_block(s, i))
    kept[0] += s.model.n_embd * (s.config.dropout > 0)  # the mask of the embedding's dropout
    return kept


def kept_by_a_block(s: Sizes, i: int) -> float:
    """Bytes per token that the forward of block i keeps for its backward (model.py, Block)."""
    model, config, compute, low = s.model, s.config, s.compute, i in s.low_blocks
    # inputs of matmuls: as they are; or in the form for the backward alone (ops/low_precision.py)
    operand = 1 if low and not s.emulated else compute
    C, A, F = model.n_embd, model.attention_width, model.d_ff
    qkv = A + 2 * model.n_kv_head * model.head_dim
    gated = model.ffn_type == "swiglu"
    remakes = config.activation_checkpointing in REMAKING  # ops/remade.py
    attention = config.activation_checkpointing != "attention"
    inputs = low or not remakes  # whether inputs of Linears after a norm or an activation are kept
    size = 2 * compute * C  # the two residual sums, which the norms' backward needs
    size += 2 * operand * C * inputs  # the inputs of qkv and up
    size += compute * qkv
    if not remakes or (attention and config.doc_masking):
        size += compute * _columns_of_rotated_copies(model)
    size += attention * (compute * A + 4 * model.n_head)  # its output, and its log-sum-exp in float32
    size += operand * A if low else 0  # the input of out, if it is not that output
    size += compute * F * (2 if gated else 1) + operand * F * inputs  # the output of up, the input of down
    if not config.compile and not _is_swiglu(model):
        # the activated gate, which compiled code makes again; or what torch.utils.checkpoint keeps without
        # need, the result of down
        size += compute * F * gated if inputs else compute * C
    if model.normalization == "layernorm":
        size += 2 * 2 * 4  # mean and deviation in float32, of two norms
    return size + 2 * C * (config.dropout > 0)  # two masks of one byte


def _is_swiglu(model: ModelConfig) -> bool:
    """Whether the kernels of ops/swiglu.py compute it."""
    return model.ffn_type == "swiglu" and model.activation == "silu"


def _columns_of_rotated_copies(model: ModelConfig) -> int:
    """Columns of q and k if they are kept beside the qkv that they were computed from, of which v is a part.

    Without norms, the backward of ops/heads.py's kernel needs nothing that was computed before, so qkv is
    freed. That kernel is for head widths that are a power of two.
    """
    D = model.head_dim
    if model.position_encoding != "rope" or (not model.qk_norm and D & (D - 1) == 0):
        return 0
    return model.attention_width + model.n_kv_head * D


def _gradients_in_a_block(s: Sizes, i: int) -> float:
    """Bytes per token that the backward of the feed-forward layer, the fullest of a block, adds to what block
    i has kept: the gradient of its output, of the input of down, and of the output of up; and
    the input of down, if it has to be made again."""
    model, compute = s.model, s.compute
    F = model.d_ff
    up = F * (2 if model.ffn_type == "swiglu" else 1)
    gradients = compute * (model.n_embd + F + up)
    if i not in s.low_blocks and s.config.activation_checkpointing in REMAKING:
        # swiglu's kernel writes the input of down beside the gradients; else that is dropped before the last
        return gradients + compute * F * _is_swiglu(model)
    if i not in s.low_blocks:
        return gradients - compute * F  # the input of down is no longer needed
    if s.emulated:  # the gradient of up's output, and what it is quantized to
        return compute * (model.n_embd + up) + s.both_forms * up
    if not s.config.compile and model.ffn_type == "swiglu":
        # one function (LowPrecisionSwiGLU): at its end, the gradients of its output, of h, of up's output (in
        # fp8, both layouts) and of its input are there
        return compute * (2 * model.n_embd + F) + 2 * up
    return gradients - F
